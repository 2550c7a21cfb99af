"""Stores of several kinds of chunks under one capacity: pools of a hybrid model, objects of several shapes.

Every kind gets room for the same number of chunks, since engines cut all their pools by the same tokens. The first kind
alone has all of the capacity; when another comes, those before it shrink. Chunks that then lie beyond are given up,
which costs little when it happens: at the start, when files are almost empty. Next: kvtide.integrations.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from kvtide.blocks import KeyArray
from kvtide.chunks.options import ChunkOptions
from kvtide.chunks.store import ChunkStore
from kvtide.errors import ConfigError, FormatError
from kvtide.io.ops import PAGE_BYTES
from kvtide.spec import Identity
from kvtide.tiers.inspect import find_namespaces
from kvtide.tiers.namespace import prepare_root, read_identity
from kvtide.trace.record import Recorder
from kvtide.units import format_bytes

KIND = "kind"
_log = logging.getLogger("kvtide.chunks")
Gone = Callable[[str, KeyArray], object]


@dataclass(frozen=True, slots=True)
class Kind:
    """Chunks that lie in pieces of `piece_bytes`. `facts` are those that not all kinds share."""

    name: str
    piece_bytes: tuple[int, ...]
    facts: tuple[tuple[str, str], ...] = ()


class SeveralStores:
    """One `ChunkStore` a kind, all of one model and some common facts.

    `shared` is what their options have in common: its sizes of chunks and pieces count for nothing. `on_gone` is that
    of `ChunkStore`, with the name of the kind before the keys. `recorder_of` is asked for a recorder for each store,
    and `on_open` told of the store and it.
    Threads: any may call.
    """

    def __init__(
        self,
        shared: ChunkOptions,
        on_gone: Gone | None = None,
        *,
        recorder_of: Callable[[], Recorder | None] = lambda: None,
        on_open: Callable[[ChunkStore, Recorder | None], object] = lambda *_: None,
    ) -> None:
        self._shared, self._on_gone, self._recorder_of, self._on_open = shared, on_gone, recorder_of, on_open
        self._opening = threading.Lock()
        self._stores: dict[str, ChunkStore] = {}
        self._is_closed = False

    @property
    def stores(self) -> Mapping[str, ChunkStore]:
        """The open stores, by the name of their kind."""
        return self._stores

    def adopt(self) -> None:
        """Open the stores of all kinds that earlier runs left in the directory.

        Raises: as `open`.
        """
        prepare_root(self._shared.directory)
        wanted = self._options(Kind("", (1,))).identity()
        found = []
        for path in find_namespaces(self._shared.directory):
            try:
                identity = read_identity(path)
            except FormatError as error:
                _log.warning("kvtide: passed over: %s", error)
                continue
            facts = dict(identity.facts)
            if (name := facts.get(KIND, "")) and _is_kin(identity, wanted, name):
                found.append(Kind(name, tuple(layer[1] for layer in identity.layers)))
        self.open(found)

    def open(self, kinds: Iterable[Kind]) -> None:
        """Open a store for each of `kinds` that has none; those there are shrink to make room. Waits for them.

        Raises: ConfigError if the capacity is too small for so many kinds; those of `ChunkStore`.
        """
        with self._opening:
            new = {kind.name: self._options(kind) for kind in kinds if kind.name not in self._stores}
            if not new or self._is_closed:
                return
            slots = {name: options.slot_layout().slot_bytes for name, options in new.items()}
            slots |= {name: store.layout.slot_bytes for name, store in self._stores.items()}
            num = (self._shared.capacity_bytes - PAGE_BYTES * len(slots)) // sum(slots.values())
            if num < 1:
                raise ConfigError(
                    f"a capacity of {format_bytes(self._shared.capacity_bytes)} holds not one chunk of each of "
                    f"{len(slots)} kinds; give it {format_bytes(sum(slots.values()) + PAGE_BYTES * len(slots))} or more"
                )
            for name, store in self._stores.items():
                store.resize(PAGE_BYTES + num * slots[name])
            for name, options in new.items():
                gone = functools.partial(self._on_gone, name) if self._on_gone else None
                sized = replace(options, capacity_bytes=PAGE_BYTES + num * slots[name])
                recorder = self._recorder_of()
                self._stores = {**self._stores, name: ChunkStore(sized, gone, recorder=recorder)}
                self._on_open(self._stores[name], recorder)

    def close(self) -> None:
        """Finish what was begun, then give up all files and locks. Idempotent."""
        with self._opening:
            self._is_closed = True
        for store in self._stores.values():
            store.close()

    def _options(self, kind: Kind) -> ChunkOptions:
        facts = {**self._shared.facts, **dict(kind.facts), KIND: kind.name}
        return replace(self._shared, chunk_bytes=sum(kind.piece_bytes), piece_bytes=kind.piece_bytes, facts=facts)


def _is_kin(identity: Identity, wanted: Identity, name: str) -> bool:
    """Say whether `identity` is `wanted` but for its sizes and its kind."""
    facts = tuple((fact, name if fact == KIND else told) for fact, told in wanted.facts)
    return replace(wanted, layers=identity.layers, facts=facts) == identity
