"""Why a prompt is not in a store: one case for each reason, after restarts and kills, and beside a living owner."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from inprocess import kvtide
from kvhelp import Walker, open_small, small_cache, small_identity, small_layout
from kvtide.blocks import KEY, chain_keys, chain_root
from kvtide.chunks import ChunkOptions, ChunkStore, fold
from kvtide.io.ops import PAGE_BYTES, address_of, aligned_buffer
from kvtide.tiers.contract import OK, REASONS, GroupRecords
from kvtide.tiers.departures import NUM_MAX, RECORD, Departures, read_departures
from kvtide.tiers.glance import Glance, glance
from kvtide.tiers.verify import verify_namespace
from kvtide.tiers.why import NEVER, OTHER_IDENTITY, OTHER_SALT, THERE, Why, why_key, why_prompt

LAYOUT = small_layout()
IDENTITY = small_identity(LAYOUT)
TOKENS = list(range(32))  # eight blocks, four groups


def fill(root: Path, prompts: list[list[int]], num_slots: int = 16, salt: str = "", **rest: object) -> None:
    """Store the KV of prompts, one after the other, and close the store."""
    space = open_small(root, LAYOUT, num_slots)
    cache = small_cache(LAYOUT, space.tier, **rest)
    try:
        for tokens in prompts:
            sequence = cache.open(tokens, salt=salt)
            if sequence.num_tokens < len(tokens):
                Walker(cache).step([sequence], [tokens[sequence.num_tokens :]])
            cache.release(sequence)
            cache.drain()
    finally:
        cache.close()
        space.close()


def explain(root: Path, tokens: list[int] = TOKENS, salts: tuple[str, ...] = ("",)) -> Why:
    return why_prompt(np.array(tokens), glance(root), IDENTITY, salts)


def reasons(told: Why) -> list[tuple[int, int, str]]:
    return [(run.first, run.end, run.why) for run in told.runs]


def corrupt(root: Path, slot: int) -> None:
    file = root / IDENTITY.digest().hex()[:32] / "data.kvt"
    with file.open("r+b") as data:
        data.seek(PAGE_BYTES + slot * LAYOUT.slot_bytes + LAYOUT.fragment_offset[0])
        byte = data.read(1)[0]
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte ^ 1]))


# Each reason


def test_what_is_there_and_what_never_was(tmp_path: Path) -> None:
    fill(tmp_path / "s", [TOKENS])
    told = explain(tmp_path / "s", [*TOKENS, *range(900, 908)])
    assert reasons(told) == [(0, 8, THERE), (8, 10, NEVER)]
    assert (told.exists, told.reused_tokens, told.owner, told.is_full) == (True, 32, 0, False)
    assert explain(tmp_path / "s", TOKENS[:6]).reused_tokens == 4, "a block that is not full is found as far as it goes"


def test_evicted_and_when_and_after_a_restart(tmp_path: Path) -> None:
    began = time.time_ns()
    fill(tmp_path / "s", [TOKENS, [*range(100, 124)]], num_slots=4)
    told = explain(tmp_path / "s")
    gone = [run for run in told.runs if run.why == "evicted"]
    assert gone
    assert {run.why for run in told.runs} <= {THERE, "evicted"}
    for run in gone:
        assert began <= run.from_ns <= run.to_ns <= time.time_ns()
        assert run.who == str(os.getpid())
    assert told.is_full
    fill(tmp_path / "s", [], num_slots=4)
    assert reasons(explain(tmp_path / "s")) == reasons(told)
    fill(tmp_path / "s", [TOKENS], num_slots=4)
    assert reasons(explain(tmp_path / "s")) == [(0, 8, THERE)], (
        "what is stored again is there, whatever the journal says"
    )


def test_another_identity_and_which_field_differs(tmp_path: Path) -> None:
    fill(tmp_path / "s", [TOKENS])
    other = small_identity(LAYOUT, model="other")
    told = why_prompt(np.array(TOKENS), glance(tmp_path / "s"), other)
    assert not told.exists
    assert reasons(told) == [(0, 8, OTHER_IDENTITY)]
    assert told.runs[0].who == told.others[0].digest == IDENTITY.digest().hex()[:32]
    assert told.others[0].fields == {"model": ("other", "small")}
    assert told.others[0].num_tokens == 32
    blocks = small_identity(small_layout(block_tokens=8))
    told = why_prompt(np.array(TOKENS), glance(tmp_path / "s"), blocks)
    assert told.others[0].fields == {"block_tokens": ("8", "4")}
    assert reasons(told) == [(0, 4, OTHER_IDENTITY)]


def test_another_salt(tmp_path: Path) -> None:
    fill(tmp_path / "s", [TOKENS], salt="blue")
    assert reasons(explain(tmp_path / "s")) == [(0, 8, NEVER)]
    told = explain(tmp_path / "s", salts=("", "red", "blue"))
    assert [(run.why, run.who) for run in told.runs] == [(OTHER_SALT, "blue")]
    assert reasons(explain(tmp_path / "s", salts=("blue",))) == [(0, 8, THERE)]


def test_dropped_as_corrupt_when_read(tmp_path: Path) -> None:
    root = tmp_path / "s"
    fill(root, [TOKENS])
    corrupt(root, 1)
    space = open_small(root, LAYOUT)
    cache = small_cache(LAYOUT, space.tier)
    sequence = cache.open([*TOKENS, 1])
    with pytest.raises(OSError, match="could not be read back"):
        Walker(cache).step([sequence], [[1]])
    during = explain(root)
    assert (2, 4, "corrupt") in reasons(during)
    assert during.owner == os.getpid()
    cache.close()
    space.close()
    assert (2, 4, "corrupt") in reasons(explain(root))
    assert explain(root).reused_tokens == 8


def test_dropped_as_corrupt_by_verify(tmp_path: Path) -> None:
    root = tmp_path / "s"
    fill(root, [TOKENS])
    corrupt(root, 2)
    assert verify_namespace(root / IDENTITY.digest().hex()[:32]).num_corrupt == 1
    assert reasons(explain(root)) == [(0, 4, THERE), (4, 6, "corrupt"), (6, 8, THERE)]


def test_not_stored_since_the_store_was_full_of_what_is_in_use(tmp_path: Path) -> None:
    root = tmp_path / "s"
    space = open_small(root, LAYOUT, num_slots=2)
    cache = small_cache(LAYOUT, space.tier, dram_groups=8)
    sequence = cache.open(TOKENS)
    Walker(cache).step([sequence], [TOKENS])
    cache.drain()
    assert reasons(explain(root)) == [(0, 4, THERE), (4, 8, "full")]
    cache.release(sequence)
    cache.close()
    space.close()


def test_chunks_that_were_evicted_and_refused(tmp_path: Path) -> None:
    store = ChunkStore(ChunkOptions(tmp_path / "s", 4096 + 4 * 8192, 4096, "m", admission="second-touch"))
    buffer = aligned_buffer(6 * 4096)
    at = address_of(buffer) + np.arange(6, dtype=np.uint64) * np.uint64(4096)
    keys = fold([b"%d" % number for number in range(6)])
    assert (store.store(keys, at) != OK).all(), "nothing is let in the first time"
    assert store.counts.refused == 6
    assert (store.store(keys[:4], at[:4]) == OK).all(), "the second time they are"
    assert (store.store(keys[4:5], at[4:5]) == OK).all()
    seen = glance(tmp_path / "s")
    found = [why_key(key, seen)[0].why for key in keys.tolist()]
    assert found[5] == "refused"
    assert found == ["evicted", *[THERE] * 4, "refused"]
    store.close()
    assert [why_key(key, glance(tmp_path / "s"))[0].why for key in keys.tolist()] == found


def test_every_other_reason_is_told_as_it_was_noted(tmp_path: Path) -> None:
    fill(tmp_path / "s", [[1, 2, 3, 4]])
    keys = chain_keys(TOKENS, block_tokens=4, parent=chain_root(IDENTITY.digest()))
    space = open_small(tmp_path / "s", LAYOUT)
    ones = np.ones(8, np.int64)
    records = GroupRecords(keys, keys, ones * 4, ones, np.column_stack([keys, keys]))
    for row, reason in enumerate(REASONS):
        space.tier.note(records.take(np.array([row])), reason)
    space.close()
    assert [run.why for run in explain(tmp_path / "s").runs] == list(REASONS)


# The journal


def test_the_journal_is_small_private_and_forgets_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "departures.kvt"
    times = iter(range(1, 1000))

    def key(number: int) -> bytes:
        return number.to_bytes(32, "little")

    def records(first: int, end: int) -> GroupRecords:
        keys = np.array([key(number) for number in range(first, end)], KEY)
        ones = np.ones(end - first, np.int64)
        return GroupRecords(keys, keys, ones, ones, keys[:, None])

    journal = Departures(path, clock=lambda: next(times), num_max=16)
    assert not path.exists()
    journal.note(records(0, 0), "evicted")
    journal.flush()
    assert not path.exists(), "nothing left"
    for first in range(0, 40, 5):
        journal.note(records(first, first + 5), "evicted", np.arange(5, dtype=np.uint64))
        journal.flush()
        if first == 20:  # a restart goes on where the last owner stopped
            journal.close()
            journal = Departures(path, clock=lambda: next(times), num_max=16)
    journal.note(records(39, 40), "corrupt", np.ones(1, np.uint64))
    journal.close()
    assert path.stat().st_size == 16 * RECORD.itemsize
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = read_departures(path, 16)
    assert sorted(found) == sorted(key(number) for number in range(25, 40))
    assert found[key(39)].reason == "corrupt"
    journal = Departures(path, num_max=16)
    journal.note(records(100, 200), "evicted")
    journal.close()
    assert sorted(read_departures(path, 16)) == sorted(key(number) for number in range(184, 200))


def test_the_real_one_has_room_for_a_million_tokens() -> None:
    assert RECORD.itemsize == 64
    assert NUM_MAX * RECORD.itemsize == 4 << 20


def test_torn_records_and_garbage_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "departures.kvt"
    keys = np.array([bytes([number]) * 32 for number in range(1, 9)], KEY)
    ones = np.ones(8, np.int64)
    journal = Departures(path)
    journal.note(GroupRecords(keys, keys, ones, ones, keys[:, None]), "evicted")
    journal.close()
    content = bytearray(path.read_bytes())
    for place in range(8):
        torn = content.copy()
        torn[64 * place + 40] ^= 1
        path.write_bytes(torn)
        assert set(read_departures(path)) == {key for row, key in enumerate(keys.tolist()) if row != place}
    for junk in (b"", b"\0" * 6400, content[:100], np.random.default_rng(5).bytes(9999)):
        path.write_bytes(junk)
        assert len(read_departures(path)) == (junk == content[:100])
        journal = Departures(path)
        journal.note(GroupRecords(keys, keys, ones, ones, keys[:, None]), "failed")
        journal.close()
        assert set(read_departures(path)) == set(keys.tolist())
        path.unlink()


def test_a_journal_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    root = tmp_path / "s"
    fill(root, [TOKENS], num_slots=4)
    journal = root / IDENTITY.digest().hex()[:32] / "departures.kvt"
    for make in (lambda: journal.symlink_to(tmp_path / "elsewhere"), lambda: os.mkfifo(journal), journal.mkdir):
        make()
        fill(root, [[*range(500, 524)], TOKENS], num_slots=4)
        assert explain(root).problem == ""
        assert not (tmp_path / "elsewhere").exists()
        journal.rmdir() if journal.is_dir() and not journal.is_symlink() else journal.unlink()


# Owners that live, and that died


OWNER = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from kvhelp import Walker, open_small, small_cache, small_layout
layout = small_layout()
space = open_small(Path(sys.argv[1]), layout, 4)
cache = small_cache(layout, space.tier)
for tokens in (list(range(32)), list(range(100, 116))):
    sequence = cache.open(tokens)
    Walker(cache).step([sequence], [tokens])
    cache.release(sequence)
    cache.drain()
print(space.tier.stats().num_groups, flush=True)
sys.stdin.read()
"""


def test_beside_an_owner_and_after_it_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "s"), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "4\n"
        told = explain(tmp_path / "s")
        assert told.owner == owner.pid
        evicted = [run for run in told.runs if run.why == "evicted"]
        assert sum(run.end - run.first for run in evicted) == 4, "two groups gave way to two"
        assert {run.who for run in evicted} == {str(owner.pid)}
        assert sum(run.end - run.first for run in told.runs if run.why == THERE) == 4
        before = (tmp_path / "s" / told.digest / "data.kvt").stat().st_mtime_ns
        explain(tmp_path / "s")
        assert (tmp_path / "s" / told.digest / "data.kvt").stat().st_mtime_ns == before
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    after = explain(tmp_path / "s")
    assert after.owner == 0
    assert reasons(after) == reasons(told), "the slots of those that left were used again"


def test_groups_that_a_scan_brings_back_are_there(tmp_path: Path) -> None:
    """A drop leaves the header in the file; who opens after a kill finds it again, and so does who looks."""
    root = tmp_path / "s"
    fill(root, [TOKENS])
    space = open_small(root, LAYOUT)
    space.tier.drop(space.tier.inventory().keys)
    assert reasons(explain(root)) == [(0, 8, "dropped")], "the owner holds nothing"
    os.close(space.fd)  # as a kill leaves it
    os.close(space.lock_fd)
    space.engine.close()
    assert reasons(explain(root)) == [(0, 8, THERE)]
    space = open_small(root, LAYOUT)
    assert space.tier.stats().num_groups == 4
    assert reasons(explain(root)) == [(0, 8, THERE)], "its owner found them"
    space.tier.drop(space.tier.inventory().keys[:2])
    assert reasons(explain(root)) == [(0, 4, "dropped"), (4, 8, THERE)]
    space.close()
    assert reasons(explain(root)) == [(0, 4, "dropped"), (4, 8, THERE)], "a checkpoint lacks them"


def test_a_namespace_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    root = tmp_path / "s"
    fill(root, [TOKENS])
    file = root / IDENTITY.digest().hex()[:32] / "data.kvt"
    file.write_bytes(b"garbage" * 1000)
    assert "expected b'KVTFILE'" in explain(root).problem
    file.unlink()
    assert "No such file" in explain(root).problem
    (file.parent / "identity.json").write_text("{")
    seen = glance(root)[0]
    assert isinstance(seen, Glance)
    assert "not JSON" in seen.problem


# The command


def test_the_command_explains_ids_and_keys(tmp_path: Path) -> None:
    root = tmp_path / "s"
    fill(root, [TOKENS, [*range(100, 124)]], num_slots=4)
    ids = ",".join(map(str, TOKENS))
    done = kvtide("why", ids, "--dir", root)
    assert done.returncode == 0, done.stderr
    assert "evicted for newer KV, 20" in done.stdout
    assert "tokens would be reused" in done.stdout
    told = json.loads(kvtide("why", ids, "--dir", root, "--json").stdout)["namespaces"][0]
    assert {run["why"] for run in told["runs"]} <= {"there", "evicted"}
    key = chain_keys(TOKENS, block_tokens=4, parent=chain_root(IDENTITY.digest()))[-1].tobytes().hex()
    assert json.loads(kvtide("why", key, "--dir", root, "--json").stdout)["namespaces"][0]["why"] in {
        "there",
        "evicted",
    }
    assert "never stored in any" in kvtide("why", "0" * 64, "--dir", root).stdout
    (tmp_path / "ids").write_text(f"[{ids}]")
    assert kvtide("why", f"@{tmp_path / 'ids'}", "--dir", root).stdout == done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["", "--dir", "s"], "the prompt is empty"),
        (["@none.txt", "--dir", "s"], "@none.txt: No such file"),
        (["1,99999999999", "--dir", "s"], "token ids must be"),
        (["1,2", "--dir", "nowhere"], "is not a directory"),
        (["1,2", "--dir", "s", "--group-blocks", "x"], "--group-blocks is 'x'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_explained_is_an_error(words, told, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "s", [])
    done = kvtide("why", *words)
    assert done.returncode == 2
    assert told in done.stderr
