"""Made-up keys and queries for selectors, and RoPE tables to turn them with."""

from __future__ import annotations

import numpy as np

from kvtide.select.contract import Heads, Keys
from kvtide.select.rope import Rope

DIM = 16


def heads(group: int = 2, num_kv: int = 2, num_layers: int = 3) -> Heads:
    return Heads(num_layers=num_layers, num_q=group * num_kv, num_kv=num_kv, dim=DIM, scaling=DIM**-0.5)


def rope(num: int = 1024, rotated: int = DIM, scale: float = 1.0) -> Rope:
    rates = 10000.0 ** (-np.arange(rotated // 2) / (rotated // 2))
    angles = np.tile(np.arange(num)[:, None] * rates, 2)
    return Rope((np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32))


def random_rows(num: int, num_heads: int, seed: int = 0, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, num_heads, dim)).astype(np.float32)


def planted(geometry: Heads, num: int, at: int, strength: float = 20.0) -> tuple[Keys, np.ndarray, np.ndarray]:
    """Keys of which the one at `at` is strongly aligned with every query of its head; they have RoPE tables.

    Shapes: returns keys, prefill queries [32, Hq, D], and the query [Hq, D] to select with.
    """
    directions = random_rows(1, geometry.num_kv, seed=1)[0]
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    keys = random_rows(num, geometry.num_kv, seed=2)
    keys[at] = directions * strength
    per_query = np.repeat(directions, geometry.group, axis=0)
    queries = random_rows(33, geometry.num_q, seed=3) * np.float32(0.3) + per_query * np.float32(3)
    return Keys(keys, 0, rope()), queries[:32], queries[32]


def lifelike(geometry: Heads, num: int, seed: int = 5) -> tuple[Keys, np.ndarray]:
    """Keys that lie mostly in few dimensions and are like their neighbours, and 40 queries that point at some of them.

    Shapes: returns keys, queries [40, Hq, D].
    """
    rng = np.random.default_rng(seed)
    axes = rng.standard_normal((geometry.num_kv, 4, DIM)).astype(np.float32)
    topics = np.repeat(rng.standard_normal((-(-num // 12), geometry.num_kv, 4)), 12, axis=0)[:num]
    own = topics + 0.5 * rng.standard_normal(topics.shape)
    keys = np.einsum("thr,hrd->thd", own.astype(np.float32), axes) + 0.1 * random_rows(num, geometry.num_kv, seed + 1)
    at = rng.integers(0, num, 40)
    queries = np.repeat(keys[at], geometry.group, axis=1) + 0.5 * random_rows(40, geometry.num_q, seed + 2)
    return Keys(keys.astype(np.float32), 0, rope()), queries.astype(np.float32) * np.float32(0.5)
