"""Small geometry and a stand-in for a model: KV that is a function of the tokens before it, so it can be checked."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np

from kvtide.cache import CacheOptions, CpuArena, TieredCache
from kvtide.cache.sequence import Sequence
from kvtide.spec import Dtype, Identity, KVShape, LayerShape, Layout, SlotLayout, Split
from kvtide.tiers.namespace import OpenNamespace, open_namespace
from kvtide.trace.record import Recorder

NUM_LAYERS = 3


def small_layout(block_tokens: int = 4, group_blocks: int = 2, split: Split = "none") -> SlotLayout:
    layer = LayerShape(k_bytes=256, v_bytes=256, num_heads=2)
    shape = KVShape(dtype=Dtype.BF16, layers=(layer,) * NUM_LAYERS, layer_index=tuple(range(NUM_LAYERS)))
    return SlotLayout(shape, block_tokens, group_blocks, split)


def small_identity(layout: SlotLayout, model: str = "small") -> Identity:
    return Identity(
        model=model,
        weights_digest="0" * 64,
        tokenizer_digest="1" * 64,
        revision="",
        adapter="",
        rope=(),
        dtype=Dtype.BF16,
        layout=Layout.LAYER_MAJOR,
        block_tokens=layout.block_tokens,
        group_blocks=layout.group_blocks,
        tp_rank=0,
        tp_size=1,
        layers=tuple((i, 256, 256, 2, 0) for i in range(layout.num_layers)),
        split=layout.split,
    )


def open_small(
    root: Path,
    layout: SlotLayout,
    num_slots: int = 16,
    engine: str = "auto",
    gap_bytes_max: int = 0,
    recorder: Recorder | None = None,
) -> OpenNamespace:
    capacity_bytes = 4096 + num_slots * layout.slot_bytes
    return open_namespace(
        root,
        small_identity(layout),
        layout,
        capacity_bytes=capacity_bytes,
        engine=engine,
        gap_bytes_max=gap_bytes_max,
        recorder=recorder,
    )


def kv_rows(tokens: list[int], layer: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V [end - start, 256] of tokens start..end: each row depends on every token up to its own.

    No two bytes of a row are alike by rule, so that keys, values and heads are not taken for each other.
    """
    rows = []
    state = hashlib.sha256(b"%d" % layer)
    for index, token in enumerate(tokens[:end]):
        state.update(token.to_bytes(4, "little"))
        if index >= start:
            rows.append(np.frombuffer(hashlib.shake_128(state.digest()).digest(512), np.uint8))
    both = np.array(rows, np.uint8).reshape(-1, 512)
    return both[:, :256], both[:, 256:]


def threads_since(before: set[threading.Thread]) -> list[str]:
    """Names of the threads that run and are not among those that ran `before`, which may have ended meanwhile."""
    return sorted(thread.name for thread in set(threading.enumerate()) - before)


class Walker:
    """Drives a cache the way a model does, and checks every byte attention would see."""

    def __init__(self, cache: TieredCache) -> None:
        self.cache = cache

    def step(self, sequences: list[Sequence], tokens: list[list[int]]) -> None:
        cache, num_new = self.cache, len(tokens[0])
        needed = sequences[0].num_tokens + num_new
        cache.resize(needed, needed, len(sequences))
        for sequence in sequences:
            cache.begin_step(sequence, num_new)
        for layer in range(cache.layout.num_layers):
            window = cache.layer(sequences, layer, cause="decode-read" if num_new == 1 else "restore")
            for row, (sequence, new) in enumerate(zip(sequences, tokens, strict=True)):
                old = sequence.num_tokens
                everything = sequence.tokens + new
                k, v = kv_rows(everything, layer, 0, len(everything))
                for want, at in (
                    (k, cache.windows.k_offset(window, row, 0)),
                    (v, cache.windows.v_offset(window, row, 0)),
                ):
                    got = cache.windows.arena.buffer[at : at + want.size].reshape(want.shape)
                    np.testing.assert_array_equal(got[:old], want[:old])
                    got[old:] = want[old:]
                cache.write(sequence, layer, k[old:], v[old:], window=window, row=row)
            is_last = layer == cache.layout.num_layers - 1
            cache.prefetch(sequences, (layer + 1) % cache.layout.num_layers, is_written=is_last)
        for sequence, new in zip(sequences, tokens, strict=True):
            cache.seal(sequence, new)


def small_cache(
    layout: SlotLayout,
    tier: object = None,
    *,
    windows: int = 2,
    tokens: int = 64,
    dram_groups: int = 8,
    policy: str = "through",
    evictor: str = "lip",
    recorder: Recorder | None = None,
) -> TieredCache:
    arena = CpuArena(windows * tokens * 512)
    dram_bytes = (dram_groups * layout.num_fragments + 8) * max(layout.fragment_padded_bytes)
    options = CacheOptions(dram_bytes=dram_bytes, write_policy=policy, evictor=evictor)
    return TieredCache(layout, small_identity(layout).digest(), arena, options, tier=tier, recorder=recorder)
