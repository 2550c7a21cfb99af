"""What a loss of power may leave of a tier's writes, at every boundary between them, and whether that is right.

Theory. The drive in memory notes when each write began and ended. At a boundary some writes are pending: with a *safe*
cache (or where only the process died) those in flight; with a *volatile* one also the last that ended, since nothing
syncs them. A state is the file with everything before, and of the pending writes none, all, a prefix of them, all but
one, or random ones, each whole or torn at sectors of 512 bytes or pages of 4 KiB, in any order. On every state a tier
is opened by a scan, and all of it is read and compared with a ledger. With a safe cache every acknowledged value must
be there; with a volatile one values may be gone, but none may be wrong; accounts are exact in both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from kvhelp import small_identity, small_layout
from kvtide.io.drive import SimDrive, SimFile
from kvtide.io.ops import PAGE_BYTES
from kvtide.io.sim import SimEngine, VirtualClock
from kvtide.spec import SlotLayout, Split
from kvtide.tiers.contract import CORRUPT, OK
from kvtide.tiers.file import FileTier
from oracle import Book, Ledger, WrongStoreError
from simkv import MODEL, check_slots, sim_tier

NUM_KEYS, NUM_SLOTS, WINDOW = 14, 7, 6
DRAWS = 4  # random states of each kind at a boundary
VARIANTS_MAX = 6
Image = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Boundary:
    """One write begins or ends, after what the ledger was told by then. Shapes: acked, ever, may_miss [keys]."""

    serial: int
    is_begin: bool
    acked: npt.NDArray[np.int64]
    ever: npt.NDArray[np.int64]
    may_miss: npt.NDArray[np.bool_]


class NotingDrive(SimDrive):
    """A drive that notes when each write begins and ends."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(MODEL)
        self._ledger = ledger
        self.boundaries: list[Boundary] = []
        self.writes: dict[int, tuple[int, bytes]] = {}

    def _note(self, serial: int, *, is_begin: bool) -> None:
        told = self._ledger
        self.boundaries.append(Boundary(serial, is_begin, told.acked.copy(), told.ever.copy(), told.may_miss.copy()))

    def begin_write(self, file: SimFile, offset: int, data: bytes) -> int:
        serial = super().begin_write(file, offset, data)
        self.writes[serial] = (offset, data)
        self._note(serial, is_begin=True)
        return serial

    def end_write(self, serial: int, landed: list[tuple[int, bytes]], length: int) -> tuple[int, int]:
        self._note(serial, is_begin=False)
        return super().end_write(serial, landed, length)


def record(layout: SlotLayout, seed: int, num_operations: int, *, is_packed: bool) -> NotingDrive:
    """Store, drop and close at random; return the drive with what was noted.

    Slots that are packed never get a group anew that is there, as chunk stores do it.
    """
    rng, ledger, book = np.random.default_rng(seed), Ledger(NUM_KEYS), Book(layout, NUM_KEYS)
    drive = NotingDrive(ledger)
    tier, held = sim_tier(drive, layout, NUM_SLOTS, is_packed=is_packed), set[int]()
    for _ in range(num_operations):
        numbers = rng.permutation(NUM_KEYS)[: int(rng.integers(1, 4))]
        if rng.random() < 0.1:
            tier = _opened_again(drive, tier, layout, is_packed=is_packed)
        if rng.random() < 0.3 or len(held) + len(numbers) > NUM_SLOTS:
            gone = np.array(sorted(held), np.int64)
            gone = rng.permutation(gone)[: len(numbers)]
            ledger.expose(gone)
            tier.drop(book.keys[gone])
            held -= set(gone.tolist())
            continue
        if is_packed:
            numbers = numbers[[number not in held for number in numbers.tolist()]]
        if not len(numbers):
            continue
        versions = ledger.intend(numbers)
        good = book.write(tier, numbers, versions) == OK
        ledger.ack(numbers[good], versions[good])
        held |= set(numbers[good].tolist())
    return drive


def _opened_again(drive: SimDrive, tier: FileTier, layout: SlotLayout, *, is_packed: bool) -> FileTier:
    """Hand the headers over, as a checkpoint does."""
    slots, pages = tier.headers()
    fd = drive.open("data", direct=True)
    engine = SimEngine(drive, VirtualClock())
    again = FileTier(engine, fd, layout, small_identity(layout).digest(), NUM_SLOTS, is_packed=is_packed)
    again.table.has_header[:] = tier.table.has_header
    decoded = again._codec.decode(pages)
    again.adopt(slots, decoded, decoded.valid)
    again.write_after(tier.sequence)
    return again


def torn(offset: int, data: bytes, rng: random.Random) -> list[tuple[int, bytes]]:
    """Return the sectors, or pages, of a write that reached the medium: a random part."""
    step = rng.choice([512, PAGE_BYTES])
    if len(data) // step < 2:
        step = 512
    pieces = [(offset + at, data[at : at + step]) for at in range(0, len(data), step)]
    return [piece for piece in pieces if rng.random() < 0.5]


def variants(pending: list[tuple[int, bytes]], rng: random.Random) -> Iterator[list[tuple[int, bytes]]]:
    """Yield what of the pending writes may have reached the medium, in the order it did."""
    for num in range(len(pending) + 1):
        yield pending[:num]
    for index in range(len(pending) - 1):
        yield pending[:index] + pending[index + 1 :]
    for index, (offset, data) in enumerate(pending):
        for others in ([], pending[:index], pending[:index] + pending[index + 1 :]):
            yield [*others, *torn(offset, data, rng)]
    for _ in range(DRAWS if pending else 0):
        chosen = [write for write in pending if rng.random() < 0.5]
        rng.shuffle(chosen)
        yield [piece for offset, data in chosen for piece in torn(offset, data, rng)]


def some(pending: list[tuple[int, bytes]], rng: random.Random) -> list[list[tuple[int, bytes]]]:
    """Return none and all of the pending writes, and a few of the other variants: boundaries tell more than draws."""
    rest = list(variants(pending, rng))
    rng.shuffle(rest)
    return [[], pending, *rest[:VARIANTS_MAX]]


@dataclass(slots=True)
class Counts:
    """What was looked at."""

    states: int = 0
    boundaries: int = 0
    volatile_states: int = 0
    corrupt_groups: int = 0
    verified_bytes: int = 0
    seen: set[bytes] = field(default_factory=set)


def put(image: Image, pieces: list[tuple[int, bytes]]) -> Image:
    """Return `image` with pieces written in order."""
    made = image.copy()
    for offset, data in pieces:
        made[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    return made


class Checker:
    """Opens states of one recording and compares."""

    def __init__(self, layout: SlotLayout, counts: Counts, *, is_packed: bool) -> None:
        self._layout, self._counts, self._is_packed = layout, counts, is_packed
        self._book, self._ledger = Book(layout, NUM_KEYS), Ledger(NUM_KEYS)
        self._num_bytes = PAGE_BYTES + NUM_SLOTS * layout.slot_bytes

    def states(self, drive: NotingDrive, seed: int, num_max: int) -> None:
        """Check every state of `drive` until `num_max` were.

        Raises: WrongStoreError or AssertionError, with the boundary and the state in the message.
        """
        rng, counts = random.Random(seed), self._counts
        image, ended, in_flight = np.zeros(self._num_bytes, np.uint8), list[int](), list[int]()
        for index, boundary in enumerate(drive.boundaries):
            if boundary.is_begin:
                in_flight.append(boundary.serial)
            else:
                in_flight.remove(boundary.serial)
                ended.append(boundary.serial)
            if len(ended) > WINDOW:
                image = put(image, [drive.writes[ended.pop(0)]])
            counts.boundaries += 1
            safe = put(image, [drive.writes[serial] for serial in ended])
            flying = [drive.writes[serial] for serial in in_flight]
            late = [drive.writes[serial] for serial in ended] + flying
            for is_volatile, base, pending in ((False, safe, flying), (True, image, late)):
                for number, pieces in enumerate(some(pending, rng)):
                    if counts.states >= num_max:
                        return
                    try:
                        self._check(put(base, pieces), boundary, is_volatile=is_volatile)
                    except AssertionError as error:
                        where = f"boundary {index}, {'volatile' if is_volatile else 'safe'} cache, state {number}"
                        raise WrongStoreError(f"{where}: {error}") from error

    def _check(self, image: Image, boundary: Boundary, *, is_volatile: bool) -> None:
        counts, ledger = self._counts, self._ledger
        name = xxhash.xxh3_128_digest(image) + bytes([is_volatile]) + boundary.acked.tobytes()
        if name in counts.seen:
            return
        counts.seen.add(name)
        counts.states += 1
        counts.volatile_states += is_volatile
        ledger.acked[:], ledger.ever[:], ledger.may_miss[:] = boundary.acked, boundary.ever, boundary.may_miss
        drive = SimDrive(MODEL)
        drive.open("data", size_bytes=self._num_bytes)
        drive._paths["data"].write(0, image.tobytes())
        tier = sim_tier(drive, self._layout, NUM_SLOTS, is_packed=self._is_packed)
        check_slots(tier)
        numbers = self._book.numbers_of(tier.inventory().keys)
        assert (numbers >= 0).all(), "a key that was never stored"
        statuses, versions, num_bytes = self._book.read(tier, numbers)
        assert set(statuses.tolist()) <= {OK, CORRUPT}, f"answers {statuses.tolist()}"
        good = statuses == OK
        assert good.all() or is_volatile or self._is_packed, "a header that is whole has fragments that are not"
        counts.corrupt_groups += int((~good).sum())
        counts.verified_bytes += num_bytes
        ledger.judge(numbers[good], versions[good], is_lossy=is_volatile)
        check_slots(tier)


KINDS: tuple[tuple[Split, bool], ...] = (("none", False), ("none", True), ("head", False), ("kv", True))


def check_states(num_states: int, seed: int) -> Counts:
    """Check that many states of recordings of every kind, an equal part each; return what was looked at.

    Raises: WrongStoreError with the kind, the seed and the state.
    """
    counts = Counts()
    for number, (split, is_packed) in enumerate(KINDS):
        layout, until, turn = small_layout(split=split), num_states * (number + 1) // len(KINDS), 0
        checker = Checker(layout, counts, is_packed=is_packed)
        while counts.states < until:
            one = seed + 1000 * number + turn
            try:
                drive = record(layout, one, 30, is_packed=is_packed)
                checker.states(drive, one, until)
            except AssertionError as error:
                raise WrongStoreError(f"split {split}, packed {is_packed}, seed {one}: {error}") from error
            turn += 1
    return counts
