"""What one worker of a soak does with a file tier until it is ended: everything, in random order. Next: _chunk_life."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

import _paths  # noqa: F401 - first, for what comes from tests
from _places import Disk, Drive
from kvtide.errors import IoError
from kvtide.tiers.contract import CORRUPT, FAILED, FULL, MISSING, OK
from kvtide.tiers.file import FileTier
from oracle import Book, Ledger, WrongStoreError
from simkv import check_slots

NUM_KEYS = 60
SLOTS = 10, 16, 24
OPERATIONS = {"put": 30, "get": 30, "drop": 10, "get_all": 2, "reopen": 2, "lose": 1, "resize": 1, "fork": 1}
FAULTY = {"fail_for_a_while": 2, "limit_for_a_while": 2, "fill_the_disk": 1}


class TierLife:
    """One owner of one namespace. `ledger` says what earlier owners were told.

    `ballast` is a file to fill the file system with; None: it is not to be filled.
    """

    def __init__(
        self,
        place: Disk | Drive,
        ledger: Ledger,
        rng: np.random.Generator,
        *,
        has_faults: bool,
        ballast: Path | None = None,
    ) -> None:
        self._place, self._ledger, self._rng, self._ballast = place, ledger, rng, ballast
        self._book = Book(place.layout, ledger.num_keys)
        self._num_slots = int(rng.choice(SLOTS))
        self._held: dict[int, int] = {}
        self._tier: FileTier = None  # type: ignore[assignment] - until `begin`
        weights = OPERATIONS | (FAULTY if has_faults and isinstance(place, Disk) else {})
        if ballast is None:
            weights.pop("fill_the_disk", None)
        self._names = list(weights)
        self._shares = np.array(list(weights.values())) / sum(weights.values())
        self._is_hurt = False  # while operations fail

    def begin(self) -> None:
        """Open what the one before left, and check all of it."""
        if self._ballast is not None:
            self._ballast.unlink(missing_ok=True)  # of an owner that was killed on a full disk
        if self._may_shrink():
            self._ledger.expose(np.arange(self._ledger.num_keys))
        self._open(self._num_slots)

    def _may_shrink(self) -> bool:
        """Whether an owner before had more slots: what lies beyond is lost by rule."""
        if not isinstance(self._place, Disk):
            return False
        sizes = [path.stat().st_size for path in self._place.root.glob("*/data.kvt")]
        return any(size > 4096 + self._num_slots * self._place.layout.slot_bytes for size in sizes)

    def work(self, until: float) -> None:
        """Do operations until that time of the monotonic clock, then close."""
        while time.monotonic() < until:
            getattr(self, "_" + str(self._rng.choice(self._names, p=self._shares)))()
            self._ledger.add("operations")
        self._place.close()

    # Opening and closing

    def _open(self, num_slots: int, held: dict[int, int] | None = None) -> None:
        """Open and check everything; `held` is what must be there after a clean close, no more and no less."""
        if self._tier is not None and self._place.is_lossy:
            self._ledger.add("faults", self._tier.stats().num_failed + self._tier.stats().num_corrupt)
        tier = self._tier = self._place.open(num_slots)
        self._num_slots = num_slots
        check_slots(tier)
        self._place.check(num_slots)
        numbers = self._book.numbers_of(tier.inventory().keys)
        if (numbers < 0).any():
            raise WrongStoreError("a key that was never stored")
        statuses, versions, num_bytes = self._book.read(tier, numbers)
        good = statuses == OK
        if not self._place.is_lossy and not good.all():
            raise WrongStoreError(f"keys {numbers[~good].tolist()} answer {statuses[~good].tolist()}")
        gone = numbers[(statuses != OK) & tier.lookup(self._book.keys[numbers])]
        tier.drop(self._book.keys[gone])  # a read that failed leaves its group where it is
        self._held = self._ledger.judge(numbers[good], versions[good], is_lossy=self._place.is_lossy)
        if held is not None and self._place.was_clean and self._held != held:
            raise WrongStoreError(f"closed with {held}, opened with {self._held}")
        check_slots(tier)
        self._ledger.add("verified_bytes", num_bytes)
        self._ledger.add("reopened")

    def _reopen(self) -> None:
        self._place.close()
        self._open(self._num_slots, dict(self._held))

    def _lose(self) -> None:
        self._place.give_up()
        self._open(self._num_slots)

    def _resize(self) -> None:
        num_slots = int(self._rng.choice(SLOTS))
        held = dict(self._held)
        for key, slot in self._tier._slot_of.items():  # noqa: SLF001
            number = int(self._book.numbers_of(np.frombuffer(key, self._book.keys.dtype))[0])
            if slot >= num_slots:
                self._ledger.expose(np.array([number]))
                del held[number]
        self._place.close()
        self._open(num_slots, held)

    # Groups

    def _some(self, num_max: int) -> npt.NDArray[np.int64]:
        return self._rng.permutation(self._ledger.num_keys)[: int(self._rng.integers(1, num_max + 1))]

    def _put(self) -> None:
        numbers = self._some(6)
        num_free = self._num_slots - len(self._held)
        if len(numbers) > num_free and self._rng.random() < 0.8:
            self._forget(np.array(list(self._held)[: len(numbers) - num_free]), "evicted")
            num_free = self._num_slots - len(self._held)
        versions = self._ledger.intend(numbers)
        statuses = self._book.write(self._tier, numbers, versions)
        allowed = {OK, FULL, FAILED} if self._is_hurt or self._place.is_lossy else {OK, FULL}
        assert set(statuses.tolist()) <= allowed, f"answers {statuses.tolist()}"
        num_full = int((statuses == FULL).sum())
        assert num_full == max(0, len(numbers) - num_free), f"{num_full} of {len(numbers)} found no room in {num_free}"
        good = statuses == OK
        self._ledger.ack(numbers[good], versions[good])
        for number, version in zip(numbers[good].tolist(), versions[good].tolist(), strict=True):
            self._held.pop(number, None)  # the newest comes last
            self._held[number] = version
        self._ledger.add("refused", int((~good).sum()))
        check_slots(self._tier)

    def _forget(self, numbers: npt.NDArray[np.int64], reason: str) -> None:
        self._ledger.expose(numbers)
        self._tier.drop(self._book.keys[numbers], reason=reason)  # type: ignore[arg-type]
        for number in numbers.tolist():
            self._held.pop(number, None)

    def _drop(self) -> None:
        self._forget(self._some(4), "dropped")
        check_slots(self._tier)

    def _get(self) -> None:
        self._read(self._some(8))

    def _get_all(self) -> None:
        self._read(np.arange(self._ledger.num_keys))

    def _read(self, numbers: npt.NDArray[np.int64]) -> None:
        statuses, versions, num_bytes = self._book.read(self._tier, numbers)
        for number, status, version in zip(numbers.tolist(), statuses.tolist(), versions.tolist(), strict=True):
            wanted = self._held.get(number)
            if wanted is None:
                assert status == MISSING, f"key {number} is not there and answers {status}"
            elif status == OK:
                assert version == wanted, f"key {number} has version {version}, not {wanted}"
            else:
                assert self._is_hurt or self._place.is_lossy, f"key {number} answers {status}"
                assert status in {CORRUPT, FAILED}
                if not self._tier.lookup(self._book.keys[[number]])[0]:
                    assert self._place.is_lossy, "a read that failed lost a good group"
                    del self._held[number]
                    self._ledger.expose(np.array([number]))
        self._ledger.add("verified_bytes", num_bytes)

    def _fork(self) -> None:
        """Let a child try to use what it must not, and close its copy: nothing changes here."""
        space = self._place.space
        if space is None:
            return
        pid = os.fork()
        if not pid:
            refused = 0
            for action in (
                lambda: self._book.read(self._tier, np.array(list(self._held) or [0])),
                lambda: self._tier.drop(self._book.keys),
            ):
                try:
                    action()
                except IoError as error:
                    refused += error.errno == errno.EPERM
            space.close()
            os._exit(0 if refused == 2 or (refused and not self._held) or not self._held else 1)
        assert os.waitpid(pid, 0)[1] == 0, "a forked child could use its parent's store"
        self._ledger.add("forks")
        self._get_all()
        check_slots(self._tier)

    # Faults

    def _busy(self) -> None:
        for _ in range(int(self._rng.integers(1, 8))):
            getattr(self, str(self._rng.choice(["_put", "_get", "_drop"])))()

    @contextlib.contextmanager
    def _hurt(self):  # noqa: ANN202
        self._is_hurt = True
        try:
            yield
        finally:
            self._is_hurt = False

    def _fail_for_a_while(self) -> None:
        failing = self._place.failing
        assert failing is not None
        before, failing.share = failing.num_failed, float(self._rng.choice([0.05, 0.5, 1.0]))
        try:
            with self._hurt():
                self._busy()
        finally:
            failing.share = 0.0
        self._ledger.add("faults", failing.num_failed - before)

    def _limit_for_a_while(self) -> None:
        """Let writes beyond a random place in the file be refused with EFBIG."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = 4096 + self._num_slots * self._place.layout.slot_bytes
        before = self._tier.stats().num_failed
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(self._rng.integers(0, size // 4096)) * 4096, hard))
        try:
            with self._hurt():
                self._busy()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        self._ledger.add("faults", self._tier.stats().num_failed - before)

    def _fill_the_disk(self) -> None:
        """Leave no byte free, work, grow in vain, close and open; then make room."""
        assert self._ballast is not None
        _fill(self._ballast)
        try:
            self._busy()
            self._place.close()
            held = dict(self._held)
            try:
                self._place.open(10 * max(SLOTS))
            except IoError as error:
                if error.errno != errno.ENOSPC:
                    raise
                self._ledger.add("faults")
            else:
                raise WrongStoreError("grew on a full disk")
            self._open(self._num_slots, held)
            self._busy()
        finally:
            self._ballast.unlink()


def _fill(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for size in (1 << 16, 4096, 512):
            with contextlib.suppress(OSError):
                while True:
                    os.write(fd, bytes(size))
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
