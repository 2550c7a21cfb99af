"""Groups by the attention mass that low-rank keys foretell, one layer ahead: kvtide's own, and the default. Pure.
Next: clo.

Keys of a head, less their mean, are compressed to 3 of 8 of their numbers, one byte each. The mean is left out because
softmax does not see it: it adds the same to every logit. The directions kept are those that lose least of q.k, for
queries that mostly point anywhere and partly like those of the prompt's end. Softmax is taken for each query head
before heads are added up, so a head that is sure of one token is not averaged away. A group's score is the sum of its
tokens' shares: the attention mass it is expected to hold. One list of groups for all heads, so one read a group; asked
with the query that the layer before predicts, so that the read overlaps compute.

Tried and dropped: 1 of 8 directions in the metric of the prompt's queries alone. It foretells the mass of prose as
well, but a question's queries differ from those of the prose before it, and what it asks for was missed.

Source: the pieces are KVSwap's (one list of groups, a layer ahead) and ShadowKV's (softmax before reduction).
"""

from __future__ import annotations

import numpy as np

from kvtide.select.choose import Rows, best, total_mass
from kvtide.select.contract import Floats, Heads, Keys, Reach, Selection
from kvtide.select.spectrum import basis

GROUP_TOKENS = 16
RANK_RATIO = 3 / 8  # of a head's dimensions
QUERY_SHARE = 0.1  # weight of the prompt's queries in the metric, beside "any direction"
RANGE = 1.25  # room for keys longer than any of the prompt


class LowRank:
    """Compressed keys of every token and KV head."""

    is_ahead = True

    def __init__(self, heads: Heads, *, unit: int = GROUP_TOKENS, rank_ratio: float = RANK_RATIO) -> None:
        self.unit, self._heads = unit, heads
        self._rank = max(1, min(round(heads.dim * rank_ratio), heads.dim))
        each = (heads.num_layers, heads.num_kv)
        self._means = np.zeros((*each, 1, heads.dim), np.float32)
        self._of_keys = np.zeros((*each, heads.dim, self._rank), np.float32)  # to whole numbers of a byte
        self._of_queries = np.zeros_like(self._of_keys)  # so that products with those are logits
        self._rows = [self._empty() for _ in range(heads.num_layers)]

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        by_head, asked = keys.post.transpose(1, 0, 2), self._heads.all_by_kv(queries)
        self._means[layer] = by_head.mean(axis=1, keepdims=True)
        for head, rows in enumerate(by_head - self._means[layer]):
            root, inverse = _roots(asked[head])
            directions = basis(rows @ root, self._rank)
            short = rows @ root @ directions
            least = np.abs(by_head[head]).max() * np.float32(1e-4)  # keys all alike, of a prompt of one token
            step: Floats = np.maximum(np.abs(short).max(axis=0) * np.float32(RANGE / 127), least + np.float32(1e-12))
            self._of_keys[layer, head] = root @ directions / step
            self._of_queries[layer, head] = inverse @ directions * (step * self._heads.scaling)
        self._rows[layer] = self._empty()
        self.on_append(layer, keys)

    def on_append(self, layer: int, keys: Keys) -> None:
        by_head = keys.post.transpose(1, 0, 2) - self._means[layer]
        short = np.rint(np.matmul(by_head, self._of_keys[layer]).transpose(1, 0, 2))
        self._rows[layer].append(np.clip(short, -127, 127).astype(np.int8))

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        if reach.is_everything:
            return Selection.everything(reach.num_tokens)
        heads, rows = self._heads, self._rows[layer].rows
        num = min(reach.bounds(self.unit)[1], len(rows) // self.unit)  # what is behind takes no part in any softmax
        short = np.matmul(heads.by_kv(query), self._of_queries[layer])  # [Hkv, G, rank]
        logits = short @ rows[: num * self.unit].astype(np.float32).transpose(1, 2, 0)
        mass = total_mass(logits.reshape(heads.num_q, -1))
        return best(mass.reshape(1, num, self.unit).sum(axis=2), reach, self.unit)

    def fast_bytes(self) -> int:
        kept = (self._means, self._of_keys, self._of_queries)
        return sum(rows.num_bytes for rows in self._rows) + sum(array.nbytes for array in kept)

    def _empty(self) -> Rows:
        return Rows((self._heads.num_kv, self._rank), np.int8)


def _roots(queries: Floats) -> tuple[Floats, Floats]:
    """Return the square root of the metric of queries, and its inverse. Shapes: [n, D] to [D, D] each."""
    dim = queries.shape[1]
    moment = queries.T @ queries
    size = float(np.trace(moment)) / dim + 1e-12
    metric = QUERY_SHARE * moment / size + (1 - QUERY_SHARE) * np.eye(dim)
    values, vectors = np.linalg.eigh(metric)
    roots = np.sqrt(np.maximum(values, 1e-6))
    return ((vectors * roots) @ vectors.T).astype(np.float32), ((vectors / roots) @ vectors.T).astype(np.float32)
