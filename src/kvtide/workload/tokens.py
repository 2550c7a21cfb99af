"""Token ids for prompts of which only the blocks are known, to replay them on real tiers. Pure. Next: synthetic.

Decides the tokens: numbers that follow from block id and place, and mean nothing to a model.
"""

from __future__ import annotations

import numpy as np

from kvtide.spec.geometry import whole_number
from kvtide.workload.prefixes import mixed
from kvtide.workload.requests import Ids, Workload

VOCAB_MAX = 1 << 32  # ids of tokens are hashed as 32 bits


def tokens_of(workload: Workload, request: int, *, vocab: int = 32_000) -> Ids:
    """Return token ids of a prompt, 0 to vocab - 1: blocks with equal ids get equal tokens, others get others.

    Different blocks are told apart by all their tokens together; those of one or two tokens may meet by accident. The
    default is the vocabulary of Llama 2. An unfilled block is a block of its own, so its tokens are not those that a
    later, longer prompt has in its place.

    Shapes: [input_tokens of the request].
    Raises: ConfigError if vocab is not 2 to 2**32.
    """
    whole_number("vocab", vocab, least=2, most=VOCAB_MAX)
    places = np.arange(int(workload.input_tokens[request]), dtype=np.int64)
    blocks = workload.blocks_of(request)[places // workload.block_tokens]
    numbers = mixed((blocks * workload.block_tokens + places % workload.block_tokens).view(np.uint64))
    return (numbers % np.uint64(vocab)).astype(np.int64)
