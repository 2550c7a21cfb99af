"""Every evictor against a plain reference of its rule, in lists and dicts.

A reference is told one id at a time, knows no arrays, and looks at everything whenever it is asked.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.evict import EVICTOR_NAMES, NEVER, Facts, make_evictor
from kvtide.planner.hits import simulate

CAPACITY = 12


class Order:
    """lru, fifo, lip: one list, first goes first."""

    def __init__(self, name, _capacity):
        self.name, self.ids = name, []

    def admit(self, i, **_facts):
        self.forget(i)
        self.ids.insert(0 if self.name == "lip" else len(self.ids), i)

    def touch(self, i, **_facts):
        if i in self.ids and self.name != "fifo":
            self.ids.remove(i)
            self.ids.append(i)

    def forget(self, i):
        if i in self.ids:
            self.ids.remove(i)

    def victims(self, num, allowed):
        return [i for i in self.ids if i in allowed][: max(num, 0)]


class Slru:
    def __init__(self, _name, capacity):
        self.new, self.protected, self.num_max = [], [], int(0.8 * capacity)

    def admit(self, i, **_facts):
        self.forget(i)
        self.new.append(i)

    def touch(self, i, **_facts):
        if i in self.new + self.protected:
            self.forget(i)
            self.protected.append(i)
            while len(self.protected) > self.num_max:
                self.new.append(self.protected.pop(0))

    def forget(self, i):
        self.new = [x for x in self.new if x != i]
        self.protected = [x for x in self.protected if x != i]

    def victims(self, num, allowed):
        return [i for i in self.new + self.protected if i in allowed][: max(num, 0)]


class Lfu:
    def __init__(self, _name, capacity):
        self.count, self.last, self.now, self.period = {}, {}, 0, 10 * capacity

    def admit(self, i, **_facts):
        self.count[i] = 0
        self.touch(i)

    def touch(self, i, **_facts):
        if i in self.count:
            self.now += 1
            self.count[i], self.last[i] = min(self.count[i] + 1, 15), self.now
            if self.now % self.period == 0:
                self.count = {x: n // 2 for x, n in self.count.items()}

    def forget(self, i):
        self.count.pop(i, None)

    def victims(self, num, allowed):
        return sorted(set(self.count) & allowed, key=lambda i: (self.count[i], self.last[i]))[: max(num, 0)]


class Gdsf:
    def __init__(self, _name, _capacity):
        self.uses, self.worth, self.value, self.last = {}, {}, {}, {}
        self.offered, self.floor, self.now = set(), 0.0, 0

    def admit(self, i, **facts):
        self.uses[i], self.worth[i], self.value[i] = 0, 1.0, 0.0
        self.touch(i, **facts)

    def touch(self, i, cost=None, size=None, **_facts):
        if i in self.value:
            self.now += 1
            if cost is not None:
                self.worth[i] = cost / size
            self.uses[i] += 1
            self.value[i], self.last[i] = self.floor + self.uses[i] * self.worth[i], self.now
            self.offered.discard(i)

    def forget(self, i):
        if i in self.value and i in self.offered:
            self.floor = max(self.floor, self.value[i])
        self.value.pop(i, None)
        self.offered.discard(i)

    def victims(self, num, allowed):
        found = sorted(set(self.value) & allowed, key=lambda i: (self.value[i], self.last[i]))[: max(num, 0)]
        self.offered.update(found)
        return found


class Belady:
    def __init__(self, _name, _capacity):
        self.next, self.last, self.now = {}, {}, 0

    def admit(self, i, next_use=NEVER, **_facts):
        self.now += 1
        self.next[i], self.last[i] = next_use, self.now

    def touch(self, i, **facts):
        if i in self.next:
            self.admit(i, **facts)

    def forget(self, i):
        self.next.pop(i, None)

    def victims(self, num, allowed):
        return sorted(set(self.next) & allowed, key=lambda i: (-self.next[i], self.last[i]))[: max(num, 0)]


class S3Fifo:
    """Algorithm 1 of the paper, one eviction after the other; victims stay in their queue until they are forgotten."""

    def __init__(self, _name, capacity):
        self.small, self.main, self.ghosts, self.uses, self.key = [], [], [], {}, {}
        self.num_small = max(1, capacity // 10)
        self.num_ghosts = capacity - self.num_small

    def admit(self, i, key=None, **_facts):
        self.small, self.main = [x for x in self.small if x != i], [x for x in self.main if x != i]
        self.key[i], self.uses[i] = i if key is None else key, 0
        (self.main if self.key[i] in self.ghosts else self.small).append(i)
        self.ghosts = [k for k in self.ghosts if k != self.key[i]]

    def touch(self, i, **_facts):
        if i in self.small + self.main:
            self.uses[i] = min(self.uses[i] + 1, 3)

    def forget(self, i):
        if i in self.small:
            self.ghosts = [*(k for k in self.ghosts if k != self.key[i]), self.key[i]]
            self.ghosts = self.ghosts[max(0, len(self.ghosts) - self.num_ghosts) :]
        self.small, self.main = [x for x in self.small if x != i], [x for x in self.main if x != i]

    def evict_small(self, allowed, taken):
        for i in list(self.small):
            if i in allowed and i not in taken:
                if self.uses[i] > 1:
                    self.small.remove(i)
                    self.main.append(i)
                    self.uses[i] = 0
                else:
                    taken.append(i)
                    return True
        return False

    def evict_main(self, allowed, taken):
        while movable := [i for i in self.main if i in allowed and i not in taken]:
            i = movable[0]
            if not self.uses[i]:
                taken.append(i)
                return True
            self.main.remove(i)
            self.main.append(i)
            self.uses[i] -= 1
        return False

    def victims(self, num, allowed):
        taken = []
        while len(taken) < num and len([i for i in self.small if i not in taken]) >= self.num_small:
            if not self.evict_small(allowed, taken):
                break
        for evict in (self.evict_main, self.evict_small, self.evict_main):  # no more in the one: then the other
            while len(taken) < num and evict(allowed, taken):
                pass
        return taken


class Arc:
    """Figure 4 of the paper, but that REPLACE comes before the request is known."""

    def __init__(self, _name, capacity):
        self.t1, self.t2, self.b1, self.b2, self.p, self.c, self.key = [], [], [], [], 0.0, capacity, {}

    def admit(self, i, key=None, **_facts):
        self.t1, self.t2 = [x for x in self.t1 if x != i], [x for x in self.t2 if x != i]
        self.key[i] = key = i if key is None else key
        if key in self.b1:
            self.p = min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
            self.b1.remove(key)
            self.t2.append(i)
        elif key in self.b2:
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self.b2.remove(key)
            self.t2.append(i)
        else:
            self.t1.append(i)
            while self.b1 and len(self.t1) + len(self.b1) > self.c:
                self.b1.pop(0)
            while self.b2 and len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) > 2 * self.c:
                self.b2.pop(0)

    def touch(self, i, **_facts):
        if i in self.t1 + self.t2:
            self.t1, self.t2 = [x for x in self.t1 if x != i], [*(x for x in self.t2 if x != i), i]

    def forget(self, i):
        for content, ghosts in ((self.t1, self.b1), (self.t2, self.b2)):
            if i in content:
                content.remove(i)
                ghosts[:] = [*(k for k in ghosts if k != self.key[i]), self.key[i]]

    def victims(self, num, allowed):
        t1, t2 = list(self.t1), list(self.t2)
        found = []
        while len(found) < num:
            once, again = [i for i in t1 if i in allowed], [i for i in t2 if i in allowed]
            if not once and not again:
                break
            source = t1 if once and (len(t1) > self.p or not again) else t2
            found.append((once if source is t1 else again)[0])
            source.remove(found[-1])
        return found


REFERENCES = {"lru": Order, "fifo": Order, "lip": Order, "slru": Slru, "lfu": Lfu, "gdsf": Gdsf, "belady": Belady}
REFERENCES |= {"s3-fifo": S3Fifo, "arc": Arc, "look-ahead": Order}  # which nobody told anything
IDS = st.lists(st.integers(0, CAPACITY - 1), max_size=CAPACITY, unique=True)
FEW = st.lists(st.integers(0, CAPACITY - 1), max_size=4, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["admit", "touch", "touch", "forget"]), FEW | IDS, st.integers(0, 10**6)),
        st.tuples(st.sampled_from(["ask", "evict"]), st.integers(0, CAPACITY + 1), IDS | st.just([])),
        st.tuples(st.just("evict"), st.integers(0, 4), st.just([])),
    ),
    max_size=60,
)


def play(name, steps, *, capacity, has_facts):
    """Do the same to an evictor and its reference, and compare all that they answer."""
    evictor, reference, inside = make_evictor(name, capacity), REFERENCES[name](name, capacity), set()
    for step, *args in steps:
        kind = step
        if kind in {"ask", "evict"}:
            num, pinned = args
            allowed = set(range(capacity)) - set(pinned)
            victims = evictor.victims(num, np.isin(np.arange(capacity), list(allowed))).tolist()
            assert victims == reference.victims(num, allowed)
            assert len(victims) == min(num, len(inside & allowed))
            kind, ids, seed = ("forget", victims, 0) if step == "evict" else (step, [], 0)
        else:
            ids, seed = args
        if kind != "ask":
            ids = [i for i in ids if i not in inside] if kind == "admit" else ids
            random = np.random.default_rng(seed)
            keys, next_use = random.integers(0, 2 * capacity, len(ids)), random.integers(0, 30, len(ids))
            costs, sizes = random.integers(1, 9, len(ids)).astype(float), random.integers(1, 4, len(ids))
            facts = Facts(keys.astype(np.uint64), costs, sizes, next_use) if has_facts else Facts()
            if kind == "forget":
                evictor.forget(np.array(ids, np.int64))
            else:
                getattr(evictor, kind)(np.array(ids, np.int64), facts)
            for place, (i, key, cost, size, after) in enumerate(zip(ids, keys, costs, sizes, next_use, strict=True)):
                if i not in ids[place + 1 :]:  # an id named twice counts once, at its later place
                    known = {"key": int(key), "cost": cost, "size": int(size), "next_use": int(after)}
                    getattr(reference, kind)(i, **(known if has_facts and kind != "forget" else {}))
            inside = inside | set(ids) if kind == "admit" else inside - set(ids) if kind == "forget" else inside


@pytest.mark.parametrize("name", REFERENCES)
@given(steps=STEPS, has_facts=st.booleans())
@settings(max_examples=40, deadline=None)
def test_evictor_is_its_reference(name, steps, has_facts):
    play(name, steps, capacity=CAPACITY, has_facts=has_facts)


def busy(seed, capacity):
    """Yield the calls of a full tier: skewed uses, ids named twice, some pinned, some evictions not carried out."""
    random = np.random.default_rng(seed)
    for _ in range(300):
        kind = random.choice(["touch", "evict", "ask", "forget"], p=[0.6, 0.3, 0.07, 0.03])
        num = int(random.integers(1, 6))
        if kind == "touch":
            yield kind, (random.random(num) ** 2 * capacity).astype(int).tolist(), int(random.integers(10**6))
        elif kind == "forget":
            yield kind, random.choice(capacity, num).tolist(), 0
        else:
            yield kind, num if random.random() < 0.9 else capacity, random.choice(capacity, 3).tolist()
        if random.random() < 0.8:
            yield "admit", random.permutation(capacity).tolist(), int(random.integers(10**6))


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("has_facts", [False, True])
def test_evictor_of_a_busy_tier_is_its_reference(name, has_facts):
    for seed in range(6):
        play(name, busy(seed, 24), capacity=24, has_facts=has_facts)


@pytest.mark.parametrize("seed", range(4))
def test_look_ahead_keeps_what_is_expected_and_gives_up_last_what_is_needed_first(seed):
    random, evictor, recency, expected = np.random.default_rng(seed), make_evictor("look-ahead", CAPACITY), [], []
    for _ in range(400):
        kind = random.choice(["admit", "admit", "touch", "touch", "expect", "evict"])
        named = random.permutation(CAPACITY)[: random.integers(0, 5)]
        ids = named.tolist()
        if kind == "expect":
            over = expected[::-1]
            recency = [i for i in recency if i not in over] + over
            expected = [i for i in ids if i in recency]
            evictor.expect(named)
        elif kind == "evict":
            order = [i for i in recency if i not in expected] + expected[::-1]
            victims = evictor.victims(len(ids), np.ones(CAPACITY, np.bool_))
            assert victims.tolist() == order[: len(ids)]
            evictor.forget(victims)
            recency = [i for i in recency if i not in victims]
            expected = [i for i in expected if i not in victims]
        else:
            getattr(evictor, kind)(named)
            moved = ids if kind == "admit" else [i for i in ids if i in recency]
            expected = [i for i in expected if kind == "touch" or i not in moved]
            recency = [i for i in recency if i not in moved] + moved


TRACES = st.lists(st.integers(0, 9), min_size=1, max_size=80)


def hits_of(name, trace, capacity):
    """Return the hits of single-block requests under a reference."""
    reference, slot_of, free = REFERENCES[name](name, capacity), {}, list(range(capacity))
    hits = []
    for time, block in enumerate(trace):
        later = [t for t in range(time + 1, len(trace)) if trace[t] == block]
        facts = {"key": block, "next_use": later[0] if later else NEVER}
        hits.append(int(block in slot_of))
        if block in slot_of:
            reference.touch(slot_of[block], **facts)
            continue
        if not free:
            free = reference.victims(1, set(range(capacity)))
            reference.forget(free[0])
            slot_of = {b: s for b, s in slot_of.items() if s != free[0]}
        slot_of[block] = free.pop()
        reference.admit(slot_of[block], **facts)
    return hits


@given(trace=TRACES, capacity=st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_single_block_requests_hit_as_the_references_say_and_never_more_than_belady(trace, capacity):
    start, blocks = np.arange(len(trace) + 1), np.array(trace)
    capacity = min(capacity, len(set(trace)))  # a tier that holds all has nothing to decide
    hits = {name: simulate(start, blocks, capacity, policy=name, look_ahead=0).hits for name in EVICTOR_NAMES}
    for name in REFERENCES:
        assert hits[name].tolist() == hits_of(name, trace, capacity), name
    hits["look-ahead"] = simulate(start, blocks, capacity, policy="look-ahead", look_ahead=5).hits
    assert max(h.sum() for h in hits.values()) == hits["belady"].sum()


@pytest.mark.parametrize("name", EVICTOR_NAMES)
def test_work_is_constant_an_id_whatever_the_capacity(name):
    """Counted in entries looked at: the same for a tier sixteen times as large, even with one id stuck in front."""
    scanned = []
    for capacity in (500, 8000):
        random, evictor = np.random.default_rng(4), make_evictor(name, capacity)
        evictor.admit(np.arange(capacity))
        evictable = np.arange(capacity) > 0
        num_ids = capacity
        for _ in range(capacity // 4):
            used = np.unique((random.random(16) ** 3 * capacity).astype(np.int64))
            evictor.touch(used)
            victims = evictor.victims(8, evictable)
            evictor.forget(victims)
            evictor.admit(victims, Facts(keys=random.integers(0, 4 * capacity, 8).astype(np.uint64)))
            num_ids += len(used) + 16
        holder = getattr(evictor, "_queues", None) or evictor._heap
        scanned.append(holder.num_scanned / num_ids)
    assert max(scanned) < 3
    assert scanned[1] < 1.3 * scanned[0]


@pytest.mark.parametrize("name", EVICTOR_NAMES)
def test_what_may_not_go_is_not_looked_at_one_by_one(name):
    capacity = 50_000
    evictor = make_evictor(name, capacity)
    evictor.admit(np.arange(capacity)[::-1])
    evictable = np.zeros(capacity, np.bool_)
    evictable[30_000:40_000:1000] = True
    expected = [30_000, 31_000] if name == "lip" else [39_000, 38_000]
    assert evictor.victims(2, evictable).tolist() == expected
    assert len(evictor.victims(11, evictable)) == 10
    assert (getattr(evictor, "_queues", None) or evictor._heap).num_scanned < 10_000


def test_unknown_names_are_answered_with_those_near_and_all():
    with pytest.raises(ConfigError, match=r"'s3fifo'; near it: s3-fifo.*; type one of lru, .*belady"):
        make_evictor("s3fifo", 4)
