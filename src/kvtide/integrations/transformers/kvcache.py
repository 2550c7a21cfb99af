"""A `transformers` cache whose KV lives in tiers. Next: store (sessions, recovery).

Works with unmodified models: `update` keeps the new KV and returns K and V of the whole sequence as plain tensors,
views of a device window, so attention is exact whatever kernel the model uses. While a layer computes, the next comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvtide.cache import Sequence, TieredCache
from kvtide.cache.windows import Window
from kvtide.errors import ConfigError, UnsupportedError
from kvtide.integrations.transformers.selecting import Selecting
from kvtide.tiers.contract import Cause


class KvLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's face of a `TieredKv`."""

    is_sliding = False  # the whole sequence is kept; a sliding mask is the model's business
    is_croppable = False
    supports_early_init = False

    def __init__(self, owner: TieredKv, index: int) -> None:
        super().__init__()
        self._owner, self._index = owner, index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: memory was reserved when the cache was made."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new KV, return all of it. Shapes: [B, H, T, D]."""
        self.is_initialized = True
        return self._owner.step_layer(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        """Return the tokens kept so far."""
        return self._owner.num_tokens

    def get_max_length(self) -> int:
        """Return -1: there is no limit but the budgets."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the KV length attention will see, and its offset."""
        return self._owner.num_tokens + query_length, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Follow a beam search; all layers move together, so the first one does it."""
        if self._index == 0:
            self._owner.reorder(beam_idx.tolist())


class TieredKv(Cache):  # type: ignore[misc]
    """Cache of one prompt: one sequence, or several that began as one (samples, beams).

    Threads: the thread that runs the model.
    """

    def __init__(self, cache: TieredCache, sequence: Sequence, arena: torch.Tensor, dtype: torch.dtype) -> None:
        num_layers = cache.layout.num_layers
        super().__init__(layers=[KvLayer(self, index) for index in range(num_layers)])
        self.cache = cache
        self.sequences = [sequence]
        self.capacity_hint = 0
        self.on_layer: Callable[[int], object] | None = None  # told of each layer whose KV is kept
        self.selecting: Selecting | None = None  # who attends to a selection of this cache; None: to everything
        self._arena, self._dtype, self._num_layers = arena, dtype, num_layers
        self._step: torch.Tensor | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether attention is to a selection now."""
        return self.selecting is not None and self.selecting.is_sparse

    @property
    def num_tokens(self) -> int:
        """Tokens kept in every layer."""
        return self.sequences[0].num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens kept so far."""
        del layer_idx
        return self.num_tokens

    def expect(self, input_ids: torch.Tensor | None) -> None:
        """Take the token ids of the step about to run, None if they are unknown. Shapes: [B, T]."""
        self._step = None if input_ids is None else input_ids.detach().cpu()

    def step_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep KV of one layer of the step, return K and V of everything so far.

        Shapes: k, v [B, H, T, D] of the step; returned [B, H, all tokens, D], views that hold until the next layer.
        Raises: LostKv if KV of earlier tokens cannot be read back; IoError if there is no room; ConfigError for KV of
        another shape or dtype, or too small a device budget; UnsupportedError if the step's tokens are unknown.
        """
        self._check(layer, k, v)
        if layer == 0 and not self.is_sparse:
            self.begin(k.shape[0], k.shape[2])
        if self.is_sparse:
            return self._step_sparse(layer, k, v)
        cause: Cause = "decode-read" if k.shape[2] == 1 else "restore"
        window = self.cache.layer(self.sequences, layer, cause=cause)
        all_k, all_v = self._tensors(window, k, v)
        num_old = self.num_tokens
        all_k[:, :, num_old:].copy_(k)
        all_v[:, :, num_old:].copy_(v)
        for row, sequence in enumerate(self.sequences):
            new_k, new_v = _rows(all_k[row, :, num_old:]), _rows(all_v[row, :, num_old:])
            self.cache.write(sequence, layer, new_k, new_v, window=window, row=row)
        if self.on_layer is not None:
            self.on_layer(layer)
        is_last = layer == self._num_layers - 1
        self.cache.prefetch(self.sequences, (layer + 1) % self._num_layers, is_written=is_last)
        if is_last:
            self._seal()
        return all_k, all_v

    def _step_sparse(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep KV of one layer; attention finds the rest itself. Returns what it was given."""
        self.cache.write(self.sequences[0], layer, _rows(k[0]), _rows(v[0]))
        if layer == self._num_layers - 1:
            self._seal(is_exact=False)
        return k, v

    def reorder(self, rows: list[int]) -> None:
        """Let row i continue what row `rows[i]` was: a shared beginning is not copied."""
        old, taken = self.sequences, set[int]()
        self.sequences = []
        for row in rows:
            self.sequences.append(self.cache.fork(old[row]) if row in taken else old[row])
            taken.add(row)
        for row, sequence in enumerate(old):
            if row not in taken:
                self.cache.release(sequence)

    def truncate(self, num_tokens: int) -> None:
        """Forget the tokens from `num_tokens` on."""
        for sequence in self.sequences:
            self.cache.truncate(sequence, num_tokens)

    def fork(self) -> TieredKv:
        """Return a second cache with the same tokens so far."""
        assert len(self.sequences) == 1, "only a cache of one row is forked"
        child = TieredKv(self.cache, self.cache.fork(self.sequences[0]), self._arena, self._dtype)
        child.capacity_hint = self.capacity_hint
        return child

    def release(self) -> None:
        """End its sequences; what they computed stays for others. Idempotent."""
        if self.selecting is not None and self.selecting.follows(self.sequences):
            self.selecting.stop()
        for sequence in self.sequences:
            self.cache.release(sequence)

    def _check(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        shape = self.cache.layout.shape.layers[layer]
        got = (k.shape[1] * k.shape[3] * k.element_size(), v.shape[1] * v.shape[3] * v.element_size())
        if got != (shape.k_bytes, shape.v_bytes) or k.dtype != self._dtype:
            raise ConfigError(
                f"layer {layer} gave {got[0]}+{got[1]} bytes of K and V a token as {k.dtype}; the cache was made for "
                f"{shape.k_bytes}+{shape.v_bytes} as {self._dtype}: open it with this model's configuration"
            )
        if self._step is None or self._step.shape != (k.shape[0], k.shape[2]):
            raise UnsupportedError(
                "the token ids of this step are unknown, and KV without its tokens cannot be kept: run the model with "
                "input_ids (not inputs_embeds) while the store that made this cache is open"
            )

    def begin(self, num_rows: int, num_new: int) -> None:
        """Make room for a step. Attention to a selection begins it before the first layer, to read ahead; else KV does.

        Raises: IoError if there is no room; LostKv if the tail cannot be read back.
        """
        while len(self.sequences) < num_rows and self.sequences:
            self.sequences.append(self.cache.fork(self.sequences[0]))
        if len(self.sequences) != num_rows:
            raise UnsupportedError(f"a step of {num_rows} rows on a cache of {len(self.sequences)}")
        for sequence in self.sequences:
            if sequence.pending is not None:
                self.cache.abort_step(sequence)
        needed = self.num_tokens + num_new
        if self.selecting is not None and not self.selecting.follows(self.sequences):
            self.selecting = None  # others began where this one was: each attends to everything
        if not self.is_sparse:
            self.cache.resize(max(needed, self.capacity_hint), needed, num_rows)
        if self.selecting is not None:
            self.selecting.begin(num_new)
        for sequence in self.sequences:
            self.cache.begin_step(sequence, num_new)
        if self.selecting is not None:
            self.selecting.read_hinted()

    def _seal(self, *, is_exact: bool = True) -> None:
        assert self._step is not None
        for row, sequence in enumerate(self.sequences):
            self.cache.seal(sequence, self._step[row].numpy(), is_exact=is_exact)
        self._step = None

    def _tensors(self, window: Window, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the window as [B, H, T, D] for all tokens with this step's."""
        windows, num_rows = self.cache.windows, k.shape[0]
        num_tokens = self.num_tokens + k.shape[2]
        typed = self._arena.view(self._dtype)
        size = typed.element_size()
        tensors = []
        for like, offset in ((k, windows.k_offset), (v, windows.v_offset)):
            heads, dim = like.shape[1], like.shape[3]
            start = offset(window, 0, 0)
            stride = (offset(window, 1, 0) - start) // size
            shape = (num_rows, heads, num_tokens, dim)
            tensors.append(typed.as_strided(shape, (stride, dim, heads * dim, 1), start // size))
        return tensors[0], tensors[1]


def _rows(part: torch.Tensor) -> Any:
    """Return [H, T, D] as bytes [T, H * D * itemsize] on the host; on a CPU device nothing is copied."""
    tokens = part.permute(1, 0, 2)
    return tokens.reshape(tokens.shape[0], -1).cpu().view(torch.uint8).numpy()
