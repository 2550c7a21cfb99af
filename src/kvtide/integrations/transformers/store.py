"""A model's KV store: opens the tiers for it, and runs prompts on them. The face of this integration. Next: turns.

    with KvStore(loaded, StoreOptions(...)) as store:
        session = store.session(token_ids)       # what is kept of them is not computed again
        output = session.generate(max_new_tokens=64)

Plain `model.generate(ids, cache=session.kv)` works too while the store is open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch

from kvtide.cache import CacheOptions, LostKv, TieredCache
from kvtide.cache.choice import Pace, Reuse
from kvtide.cache.options import check_dram
from kvtide.cache.steps import next_prefill_end
from kvtide.errors import ConfigError, UnsupportedError
from kvtide.integrations.transformers.drafting import Drafter, is_plain_greedy
from kvtide.integrations.transformers.kvcache import TieredKv
from kvtide.integrations.transformers.models import LoadedModel
from kvtide.integrations.transformers.places import Below, as_kept_by_transformers, device_memory
from kvtide.integrations.transformers.selecting import Selecting
from kvtide.integrations.transformers.wiring import Wiring
from kvtide.select.contract import Budget, RebuildsKeys
from kvtide.select.full import Full
from kvtide.select.names import make_selector
from kvtide.spec import KVShape, SlotLayout, Split, auto_group_blocks
from kvtide.tiers.cipher import MasterKey
from kvtide.tiers.stacked import StackedTier
from kvtide.trace.record import Recorder

KNEE_BYTES = 128 << 10  # where the drives measured in benchmarks/group_size stop gaining from larger reads

LOST_MAX = 8  # every matched group may be lost once; a disk that loses more than these of what we just wrote is broken


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Budgets and places. `directory` None or `disk_bytes` 0 means no file tier, `remote` None no remote one.

    Changes which KV may be reused: block_tokens, group_blocks, knee_bytes, split, adapter. All else changes speed and
    room.
    """

    device_bytes: int
    dram_bytes: int
    disk_bytes: int = 0
    directory: Path | None = None
    remote: str | None = None  # URL of a remote that other machines share
    block_tokens: int = 16
    group_blocks: int | None = None  # None: the smallest whose fragments reach the drive's knee
    knee_bytes: int = KNEE_BYTES  # read only where `group_blocks` is None
    split: Split = "none"  # how layers are cut into fragments: none, kv or head
    gap_bytes_max: int = 0  # how far apart fragments may lie in the file that are read together
    adapter: str = ""
    key_file: Path | None = None  # encrypts what lies below DRAM (docs/security.md)
    engine: str = "auto"
    depth_max: int = 64  # operations in flight
    write_policy: Literal["through", "back"] = "through"
    is_prefetching: bool = True
    select: SelectOptions | None = None  # None: attention is to everything
    reuse: Reuse = "auto"  # load what is kept, compute it again, or what was measured to be faster


@dataclass(frozen=True, slots=True)
class SelectOptions:
    """Decoding that attends to a selection: the name of the method, and how much each layer attends to."""

    name: str
    budget: Budget


class KvStore:
    """Tiers opened for one model.

    Raises: ConfigError for budgets too small or a foreign directory; FormatError for files that are not what they
    claim; IoError if another process owns the store or the disk refuses; UnsupportedError for a model whose KV or
    device it does not know.
    Threads: the thread that runs the model.
    """

    def __init__(self, loaded: LoadedModel, options: StoreOptions, *, recorder: Recorder | None = None) -> None:
        self.loaded, self.options = loaded, options
        shape = KVShape.of(as_kept_by_transformers(loaded), loaded.dtype)
        group = options.group_blocks or auto_group_blocks(shape, options.block_tokens, options.knee_bytes)
        master = MasterKey.read(options.key_file) if options.key_file is not None else None
        self.layout = SlotLayout(shape, options.block_tokens, group, options.split, is_encrypted=master is not None)
        self.identity = loaded.identity(self.layout, adapter=options.adapter)
        if master is not None:
            self.identity = replace(self.identity, encryption=master.name)
        digest = self.identity.digest()
        self.root = digest if master is None else master.root(digest)  # what keys of blocks are chained from
        check_dram(self.layout, options.dram_bytes)  # before the file tier reserves its room
        self._arena, self._tensor = device_memory(options.device_bytes, loaded.model.device)
        self._below = Below(self.identity, self.layout, options, recorder, master)
        self.namespace, self.remote, self.tier = self._below.namespace, self._below.remote, self._below.tier
        try:
            self.cache = TieredCache(
                self.layout,
                self.root,
                self._arena,
                CacheOptions(
                    dram_bytes=options.dram_bytes,
                    write_policy=options.write_policy,
                    is_prefetching=options.is_prefetching,
                    reuse=options.reuse,
                    evictor="lip" if options.select is None else "lru",  # selections come back; scans of layers do not
                ),
                tier=self._below.tier,
                recorder=recorder,
                pace=Pace.parse(self.namespace.read_pace()) if self.namespace else None,
            )
        except BaseException:
            self._below.close()
            raise
        self._wiring: Wiring | None = None
        self.selecting: Selecting | None = None
        self.drafter: Drafter | None = None
        if options.select is not None:
            try:
                self._wiring, self.selecting = self._select(options.select)
            except BaseException:
                self._close_tiers()
                raise
        self._hook = loaded.model.register_forward_pre_hook(_tell_tokens, with_kwargs=True)

    def session(self, tokens: list[int], *, salt: str = "") -> Session:
        """Start from `tokens`; what is kept of them is not computed again.

        Raises: ConfigError for an empty prompt or one longer than the model's positions.
        """
        if not tokens:
            raise ConfigError("the prompt is empty: at least one token is needed")
        if len(tokens) > self.loaded.max_positions:
            raise ConfigError(
                f"the prompt has {len(tokens)} tokens, the model {self.loaded.max_positions} positions: "
                f"shorten the document, or type --model with one for longer contexts"
            )
        sequence = self.cache.open(tokens, salt=salt)
        kv = TieredKv(self.cache, sequence, self._tensor, self.loaded.torch_dtype)
        return Session(self, kv, list(tokens))

    def _select(self, options: SelectOptions) -> tuple[Wiring, Selecting]:
        """Meet the model's attention, and return that and who selects for it."""
        wiring = Wiring(self.loaded)
        selector = make_selector(options.name, wiring.heads, group_tokens=self.layout.tokens_per_group)
        if isinstance(selector, RebuildsKeys) and wiring.rope() is None:
            raise ConfigError(
                f"{options.name} rebuilds keys before RoPE, and {self.loaded.name} has none; type --select auto"
            )
        selecting = Selecting(self.cache, wiring, selector, options.budget, self.loaded.torch_dtype)
        if options.budget.tokens:
            self.check_budget(selecting, options.budget.tokens + 1)
        if options.name.partition("+")[0] == "pmr":
            self.drafter = Drafter(self.loaded.model)
        wiring.attach(_before)
        return wiring, selecting

    def check_budget(self, selecting: Selecting, num_tokens: int) -> None:
        """Raise ConfigError if what a step over `num_tokens` may attend to leaves nothing to choose."""
        reach = selecting.budget.reach(num_tokens)
        if not reach.is_everything and not isinstance(selecting.selector, Full):
            reach.check(selecting.selector.unit, num_fresh=self.layout.tokens_per_group + 1)

    def close(self) -> None:
        """Store what the file tier lacks and give everything back. Idempotent."""
        self._hook.remove()
        if self._wiring is not None:
            self._wiring.detach()
        self._close_tiers()

    def _close_tiers(self) -> None:
        if isinstance(self.tier, StackedTier):
            self.tier.stop_waiting()
        try:
            self.cache.close()
        finally:
            if self.namespace is not None:
                self.namespace.write_pace(self.cache.pace.text())
            self._below.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Session:
    """One prompt and what follows from it."""

    def __init__(self, store: KvStore, kv: TieredKv, tokens: list[int]) -> None:
        self.kv, self.tokens = kv, tokens
        self.matched, self.choice = kv.sequences[0].matched, kv.sequences[0].choice
        self.num_lost = 0
        self._store = store

    def prefill(self, on_progress: Callable[[int, int], None] | None = None, *, reserve_tokens: int = 0) -> None:
        """Compute what is not kept of the prompt, all but its last step, which `generate` runs.

        `reserve_tokens` is how many more will come: the device budget is cut for all of them at once. `on_progress`
        gets the tokens that are done and all there are.
        Raises: ConfigError for too small a device budget; IoError if no tier has room, or what is stored keeps being
        lost.
        """
        self.kv.capacity_hint = len(self.tokens) + reserve_tokens
        while True:
            start = self.kv.num_tokens
            if on_progress is not None:
                on_progress(start, len(self.tokens))
            end = next_prefill_end(start, len(self.tokens))
            if end >= len(self.tokens):
                return
            try:
                self.forward(start, end)
            except LostKv as lost:
                self._heal(lost)

    def generate(self, *, max_new_tokens: int, **options: Any) -> Any:
        """Run `model.generate` on the prompt; its output, whose sequences begin with the prompt.

        KV that turns out unreadable on the way is computed again, and what is drawn on a CPU is drawn the same again.
        Options go to `generate` as they are.
        Raises: as `prefill`; ConfigError if a store that selects may attend to too small a share of this prompt.
        """
        if self._store.selecting is not None:
            self._store.check_budget(self._store.selecting, len(self.tokens))
        ids = self._ids(0, len(self.tokens))
        # The mask is given, or `generate` would leave out every token of the prompt that is also the padding token.
        options = {"pad_token_id": _pad_id(self._store.loaded), "attention_mask": torch.ones_like(ids)} | options
        restore = _dice(ids.device)
        while True:
            self._start_selecting()
            try:
                if self._drafts(options):
                    return self._generate_drafted(max_new_tokens, options)
                return self._store.loaded.model.generate(ids, cache=self.kv, max_new_tokens=max_new_tokens, **options)
            except LostKv as lost:
                if self._store.selecting is not None:
                    self._store.selecting.stop()  # what is computed again attends to everything
                self._heal(lost)
                self.prefill(reserve_tokens=max_new_tokens)
                restore()

    def _drafts(self, options: dict[str, Any]) -> bool:
        """Say whether this is greedy decoding of one row, which drafts are for."""
        if self._store.drafter is None or self.kv.selecting is None:
            return False
        return is_plain_greedy(self._store.loaded.model.generation_config, options)

    def _generate_drafted(self, max_new_tokens: int, options: dict[str, Any]) -> Any:
        assert self._store.drafter is not None, "asked for drafts without a drafter"
        streamer = options.get("streamer")
        if streamer is not None:
            streamer.put(self._ids(0, len(self.tokens)).cpu())
        found = self._store.drafter.generate(
            self.kv,
            self.tokens,
            max_new_tokens=max_new_tokens,
            on_token=lambda token: streamer.put(torch.tensor([token])) if streamer is not None else None,
            keep_logits=bool(options.get("output_logits")),
        )
        if streamer is not None:
            streamer.end()
        return found if options.get("return_dict_in_generate") else found.sequences

    def _start_selecting(self) -> None:
        """Have the next step summarise, and those after it attend to a selection, if the store selects at all."""
        selecting = self._store.selecting
        if selecting is not None and len(self.kv.sequences) == 1:
            selecting.start(self.kv.sequences[0])
            self.kv.selecting = selecting

    def fork(self) -> Session:
        """Return a second session that continues from the same tokens."""
        child = Session(self._store, self.kv.fork(), list(self.tokens))
        child.matched = self.matched
        return child

    def release(self) -> None:
        """End the session; what it computed stays for others. Idempotent."""
        self.kv.release()

    def _ids(self, start: int, end: int) -> torch.Tensor:
        return torch.tensor([self.tokens[start:end]], device=self._store.loaded.model.device)

    def forward(self, start: int, end: int) -> None:
        """Run one step on the prompt's tokens `start` to `end`, which must follow what is kept."""
        ids = self._ids(start, end)
        with torch.inference_mode():
            self._store.loaded.model(input_ids=ids, cache=self.kv, use_cache=True, logits_to_keep=1)

    def _heal(self, lost: LostKv) -> None:
        """Go back to one sequence of KV that is there; raise `lost` where that would go on for ever."""
        self.num_lost += 1
        if self.num_lost > len(self.matched.units) + LOST_MAX:
            raise lost
        for sequence in self.kv.sequences[1:]:
            self._store.cache.release(sequence)
        self.kv.sequences = self.kv.sequences[:1]
        sequence = self.kv.sequences[0]
        num_left = self._store.cache.heal(sequence)
        if num_left >= len(self.tokens):
            self._store.cache.truncate(sequence, len(self.tokens) - 1)


def _dice(device: torch.device) -> Callable[[], None]:
    """Return what sets the random generators a sampling `generate` draws from back to where they are now."""
    is_cuda, cpu = device.type == "cuda", torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if is_cuda else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return restore


def _before(module: Any, kwargs: dict[str, Any]) -> None:
    """Tell an attention module who selects for the step that reaches it; None for attention to everything."""
    kv = kwargs.get("cache", kwargs.get("past_key_values"))
    selecting = kv.selecting if isinstance(kv, TieredKv) else None
    layer, hidden = int(module.layer_idx), kwargs["hidden_states"]
    if kv is not None and selecting is not None and selecting.is_sparse and layer == 0:
        kv.begin(*hidden.shape[:2])  # which ends the selection of a cache that is not followed, or of more rows
        selecting = kv.selecting
    module.kvtide_step = selecting
    if selecting is not None and selecting.is_sparse:
        selecting.before(layer, hidden, kwargs.get("position_embeddings"))


def _tell_tokens(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    kv, ids = kwargs.get("cache", kwargs.get("past_key_values")), kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(kv, TieredKv):
        return
    kv.expect(ids)
    mask = kwargs.get("attention_mask")
    is_prompt = ids is not None and ids.shape[1] > 1  # a padded prompt is seen there; decoding is not slowed down
    if is_prompt and isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask.all():
        raise UnsupportedError(
            "the prompt is padded, and KV computed beside padding is not that of its tokens alone: run prompts of "
            "different length one by one"
        )


def _pad_id(loaded: LoadedModel) -> int:
    for source in (loaded.tokenizer.pad_token_id, loaded.tokenizer.eos_token_id):
        if source is not None:
            return int(np.atleast_1d(source)[0])
    return 0
