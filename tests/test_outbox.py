"""KV on its way to a remote: what hangs there delays nobody who wants KV from here, and holds bounded memory."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import numpy as np
import pytest

from kvhelp import Walker, small_cache, small_identity, small_layout
from kvtide.blocks import KEY
from kvtide.io.drive import SimDrive
from kvtide.io.ops import address_of, aligned_buffer
from kvtide.spec import SlotLayout
from kvtide.tiers.contract import FAILED, OK, GroupRecords, Statuses
from kvtide.tiers.gate import Gate
from kvtide.tiers.outbox import Outbox
from kvtide.tiers.remote import RemoteOptions, RemoteTier
from kvtide.tiers.stacked import StackedTier
from kvtide.tiers.streams import Arrival, Publisher
from simkv import MODEL, Groups, check_cache, check_slots, group_key, sim_tier
from test_remote_faults import DictClient

# Another test of this process may have loaded Lance; no child here uses it.
pytestmark = pytest.mark.filterwarnings("ignore:lance is not fork-safe:UserWarning")

KEYS = [group_key(number) for number in range(6)]
A, B = list(range(60)), list(range(1000, 1060))


class HangingClient(DictClient):
    """Puts wait while it hangs; `events` is shared with whoever tells what happened meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.is_hung, self.may_go_on, self.has_begun = False, threading.Event(), threading.Event()

    def hang(self) -> None:
        self.is_hung = True

    def wake(self) -> None:
        self.is_hung = False
        self.may_go_on.set()

    def put(self, names: list[str], values: Any) -> Statuses:
        if self.is_hung:
            self.events.append("hangs")
            self.has_begun.set()
            assert self.may_go_on.wait(20)
            self.events.append("woken")
        return super().put(names, values)


def far_tier(client: DictClient, layout: SlotLayout) -> RemoteTier:
    return RemoteTier(lambda: client, layout, small_identity(layout).digest(), RemoteOptions(rest_ns=0))


def as_keys(keys: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), KEY)


def outboxes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvtide-outbox"]


def test_demand_from_the_file_goes_on_while_the_remote_hangs() -> None:
    layout, client = small_layout(), HangingClient()
    near = sim_tier(SimDrive(MODEL), layout, 40)
    tier = StackedTier(near, far_tier(client, layout))
    cache = small_cache(layout, tier, tokens=256, dram_groups=4, windows=1)
    walker, first, second = Walker(cache), cache.open(A), cache.open(B)
    for at in range(0, 60, 20):
        walker.step([first], [A[at : at + 20]])
    cache.drain()
    client.hang()
    walker.step([second], [B[:20]])
    assert client.has_begun.wait(20)
    reads = near.stats().num_reads
    for token in (60, 61, 62):  # all layers of what came before, from the file: it has no room in DRAM
        walker.step([first], [[token]])
        client.events.append("decoded")
    for at in (20, 40):  # and new KV goes to the file
        walker.step([second], [B[at : at + 20]])
    client.events.append("stored")
    assert near.stats().num_reads > reads
    client.wake()
    cache.drain()
    assert client.events[:5] == ["hangs", "decoded", "decoded", "decoded", "stored"]
    assert tier.outbox.held_bytes == 0
    check_cache(cache, [first, second])
    check_slots(near)
    cache.close()
    assert not outboxes()


def test_what_the_outbox_has_no_room_for_is_refused_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    layout, client = small_layout(), HangingClient()
    size, groups = sum(layout.fragment_padded_bytes), Groups(layout)
    tier = StackedTier(sim_tier(SimDrive(MODEL), layout, 8), far_tier(client, layout), outbox_bytes=2 * size)
    client.hang()
    assert groups.write(tier, KEYS[:3], [1] * 3) == [OK] * 3
    assert client.has_begun.wait(20)
    assert groups.write(tier, KEYS[3:], [1] * 3) == [OK] * 3
    assert tier.outbox.held_bytes == 2 * size
    assert tier.outbox.num_refused == 4
    assert caplog.text.count("were not sent") == 1
    client.wake()
    tier.drain()
    assert tier.outbox.held_bytes == 0
    assert tier.far.lookup(as_keys(KEYS)).tolist() == [True] * 2 + [False] * 4
    assert groups.write(tier, KEYS[3:4], [1]) == [OK]
    tier.close()
    assert tier.far.lookup(as_keys(KEYS)).tolist() == [True] * 2 + [False, True, False, False]


def test_patience_sends_everything_through_a_small_outbox() -> None:
    layout, client = small_layout(), HangingClient()
    tier = StackedTier(sim_tier(SimDrive(MODEL), layout, 8), far_tier(client, layout), outbox_bytes=1)
    tier.is_patient = True
    assert Groups(layout).write(tier, KEYS, [1] * 6) == [OK] * 6
    tier.close()
    assert tier.far.lookup(as_keys(KEYS)).all()
    assert tier.outbox.num_refused == 0


def test_a_remote_that_never_answers_is_given_up_at_close(caplog: pytest.LogCaptureFixture) -> None:
    layout, client = small_layout(), HangingClient()
    tier = StackedTier(sim_tier(SimDrive(MODEL), layout, 8), far_tier(client, layout))
    groups = Groups(layout)
    client.hang()
    for key in KEYS[:3]:
        groups.write(tier, [key], [1])
    assert client.has_begun.wait(20)
    tier.outbox.close(0.01)
    assert "2 groups were not sent" in caplog.text
    assert groups.write(tier, KEYS[3:4], [1]) == [OK]  # the near tier is not concerned
    assert tier.outbox.num_refused == 1
    client.wake()
    assert tier.outbox.drain(60)
    assert tier.far.lookup(as_keys(KEYS)).tolist() == [True] + [False] * 5, "what was queued was dropped"
    tier.close()


def test_without_a_near_tier_nobody_waits_but_who_wants_the_room() -> None:
    layout, client = small_layout(), HangingClient()
    tier = StackedTier(None, far_tier(client, layout))
    cache = small_cache(layout, tier, tokens=256, dram_groups=20)
    walker, sequence = Walker(cache), cache.open(A)
    client.hang()
    walker.step([sequence], [A[:40]])
    assert client.has_begun.wait(20)
    walker.step([sequence], [A[40:60]])
    for token in (60, 61):
        walker.step([sequence], [[token]])
        client.events.append("decoded")
    assert client.events == ["hangs", "decoded", "decoded"]
    cache._mover.drain()
    assert cache.ledger.is_sent.any()
    assert not cache.ledger.is_clean().any()
    client.wake()
    cache.drain()
    assert not cache.ledger.is_sent.any()
    full = sequence.units[:7]
    assert cache.ledger.is_clean(full).all()
    assert cache.ledger.is_far[full].all()
    check_cache(cache, [sequence])
    cache.release(sequence)
    cache.close()
    assert cache.num_refused == 0


def test_units_that_end_while_they_are_sent_are_not_mistaken_for_others() -> None:
    layout, client = small_layout(), HangingClient()
    tier = StackedTier(None, far_tier(client, layout))
    cache = small_cache(layout, tier, tokens=64, dram_groups=3)
    walker, sequence, other = Walker(cache), cache.open(A), cache.open(B)
    client.hang()
    walker.step([sequence], [A[:16]])
    assert client.has_begun.wait(20)
    cache.release(sequence)
    with cache._lock:
        units = np.flatnonzero(cache.ledger.uid >= 0)
        cache.ledger.dispose(units)
    walker.step([other], [B[:16]])
    client.wake()
    cache.drain()
    cache.flush()
    check_cache(cache, [other])
    cache.release(other)
    cache.close()
    fresh = small_cache(layout, StackedTier(None, far_tier(client, layout)), tokens=64)
    for tokens in (A, B):
        assert fresh.match(tokens[:16]).num_tokens == 16
    fresh.close()


def test_a_fault_of_the_client_leaves_no_place_taken(caplog: pytest.LogCaptureFixture) -> None:
    layout, client = small_layout(), DictClient()
    outbox, groups = Outbox(far_tier(client, layout)), Groups(layout)

    def write(keys: list[bytes]) -> list[int]:
        class Over:
            write = staticmethod(outbox.write)

        return groups.write(Over(), keys, [1] * len(keys))  # type: ignore[arg-type]

    client.broken = TypeError("an unexpected argument")
    assert write(KEYS) == [FAILED] * 6
    assert outbox.held_bytes == 0
    client.broken = None
    assert write(KEYS) == [OK] * 6
    outbox.close()
    assert write(KEYS) == [FAILED] * 6
    assert "TypeError" in caplog.text


def test_who_reads_enters_before_who_sends() -> None:
    gate, order, inside = Gate(), list[str](), threading.Event()

    def enter(how: str) -> None:
        with gate.first() if how == "first" else gate.last():
            order.append(how)

    with gate.last():
        threads = [threading.Thread(target=enter, args=(how,)) for how in ("last", "first", "last", "first")]
        for thread in threads:
            thread.start()
        while gate._num_first < 2:
            inside.wait(0.001)
    for thread in threads:
        thread.join(60)
    assert order == ["first", "first", "last", "last"]


@pytest.mark.parametrize("has_near", [True, False], ids=["over a near tier", "remote alone"])
def test_kv_that_only_its_session_can_use_is_not_sent(has_near: bool) -> None:
    layout, client = small_layout(), DictClient()
    near = sim_tier(SimDrive(MODEL), layout, 20) if has_near else None
    cache = small_cache(layout, StackedTier(near, far_tier(client, layout)), tokens=256, dram_groups=20)
    walker, sequence, seal = Walker(cache), cache.open(A), cache.seal
    walker.step([sequence], [A[:20]])  # two groups and a half
    cache.seal = functools.partial(seal, is_exact=False)  # type: ignore[method-assign]
    walker.step([sequence], [A[20:50]])
    own = sequence.units[2:]
    cache.flush()
    assert cache.ledger.is_own[own].all()
    assert not cache.ledger.is_own[sequence.units[:2]].any()
    assert sum(name.endswith(":m") for name in client.values) == 2
    if near is not None:
        assert near.stats().num_groups == len(sequence.units), "here it may be evicted and read back"
    cache.drain()
    assert cache.num_refused == 0
    cache.release(sequence)
    cache.close()
    assert sum(name.endswith(":m") for name in client.values) == 2


def test_who_decodes_sees_that_the_prefill_failed() -> None:
    layout, client = small_layout(), DictClient()
    far, one = far_tier(client, layout), np.ones(1, np.int64)
    records = GroupRecords(as_keys(KEYS[:1]), np.zeros(1, KEY), one, one, np.zeros((1, layout.group_blocks), KEY))
    Publisher(far, records, 0).finish(is_whole=False)
    arrival = Arrival(far, records)
    assert not arrival.has_begun()
    assert arrival.is_over


def test_a_gate_is_not_entered_twice() -> None:
    gate = Gate()
    with gate.first(), pytest.raises(AssertionError, match="entered again"), gate.last():
        pass
    with gate.last():
        pass


def test_a_thread_that_cannot_start_costs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, client, real, left = small_layout(), DictClient(), threading.Thread.start, [1]

    def start(thread: threading.Thread) -> None:
        if thread.name == "kvtide-outbox" and left:
            left.pop()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    tier, groups = StackedTier(None, far_tier(client, layout)), Groups(layout)
    with pytest.raises(RuntimeError, match="can't start"):
        groups.write(tier, KEYS[:1], [1])
    assert tier.outbox.held_bytes == 0
    assert groups.write(tier, KEYS[1:2], [1]) == [OK]
    tier.close()


def test_an_answer_that_fails_stops_nothing() -> None:
    layout, client = small_layout(), DictClient()
    tier, groups, page = StackedTier(None, far_tier(client, layout)), Groups(layout), aligned_buffer(1 << 20)

    def broken(_statuses: Statuses) -> None:
        raise RuntimeError("planted")

    addresses = np.full((1, layout.num_fragments), address_of(page), np.uint64)
    assert tier.begin(groups.records(KEYS[:1]), addresses, broken, cause="demote") == 1
    tier.drain()
    assert groups.write(tier, KEYS[1:2], [1]) == [OK]
    assert tier.outbox.held_bytes == 0
    tier.close()


def test_what_a_full_near_tier_refuses_is_sent_once_it_is_kept() -> None:
    layout, client, copied = small_layout(), DictClient(), []
    tier = StackedTier(sim_tier(SimDrive(MODEL), layout, 3), far_tier(client, layout))
    copy = tier.outbox._copy
    tier.outbox._copy = lambda sources, targets: (copied.append(len(sources)), copy(sources, targets))  # type: ignore[method-assign]
    cache = small_cache(layout, tier, tokens=256, dram_groups=6, windows=1)
    walker = Walker(cache)
    for first in range(0, 6000, 1000):
        tokens = list(range(first, first + 16))
        sequence = cache.open(tokens)
        walker.step([sequence], [tokens])
        cache.drain()
        cache.release(sequence)
    cache.drain()
    assert sum(copied) == 12
    cache.close()
    tier.close()


def test_a_forked_child_waits_for_nothing() -> None:
    layout, client = small_layout(), HangingClient()
    tier = StackedTier(sim_tier(SimDrive(MODEL), layout, 8), far_tier(client, layout))
    client.hang()
    Groups(layout).write(tier, KEYS[:3], [1] * 3)
    assert client.has_begun.wait(5)
    pid = os.fork()
    if not pid:
        tier.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    client.wake()
    tier.close()


def test_a_unit_that_ends_while_it_is_sent_is_waited_for_by_nobody() -> None:
    layout, client = small_layout(), HangingClient()
    tier = StackedTier(None, far_tier(client, layout))
    cache = small_cache(layout, tier, tokens=256, dram_groups=8, windows=1)
    walker, sequence = Walker(cache), cache.open(list(range(8)))
    client.hang()
    walker.step([sequence], [list(range(8))])
    cache._mover.drain()
    ledger = cache.ledger
    sent = np.flatnonzero(ledger.is_sent)
    assert len(sent)
    cache.release(sequence)
    with cache._lock:
        ledger.dispose(sent)
    assert not ledger.is_sent.any()
    client.wake()
    cache.close()
    tier.close()
