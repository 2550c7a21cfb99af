"""`kvtide store` on real files: what it lists, what it finds broken, what it deletes, and what it leaves alone."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvhelp import open_small, small_identity, small_layout
from kvtide import ConfigError, IoError, cli, cli_store
from kvtide.blocks import KEY
from kvtide.chunks import ChunkOptions, ChunkStore
from kvtide.io.ops import PAGE_BYTES, address_of, aligned_buffer
from kvtide.tiers import verify as verify_module
from kvtide.tiers.contract import GroupRecords
from kvtide.tiers.inspect import drop_namespace, find_namespaces, list_namespaces
from kvtide.tiers.namespace import MARKER
from kvtide.tiers.owner import lock
from kvtide.tiers.verify import verify_namespace

LAYOUT = small_layout()
NUM_SLOTS, NUM_GROUPS = 16, 5
DIGEST = small_identity(LAYOUT).digest().hex()[:32]


@pytest.fixture
def kvtide(monkeypatch, capsys):
    """Run the command line in this process; gives exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kvtide", "store", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as left:
            code = left.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def write_groups(tier, num=NUM_GROUPS, seed=7):
    """Fill `num` slots with random bytes; keys count from 1."""
    layout, rng = tier.layout, np.random.default_rng(seed)
    lengths = layout.fragment_padded_bytes
    buffer = aligned_buffer(sum(lengths) * num)
    buffer[:] = rng.integers(0, 256, buffer.size, np.uint8)
    sizes = np.array(list(lengths) * num)
    addresses = (address_of(buffer) + np.cumsum(sizes) - sizes).astype(np.uint64).reshape(num, len(lengths))
    keys = np.array([(index + 1).to_bytes(32, "little") for index in range(num)], KEY)
    records = GroupRecords(
        keys,
        np.zeros(num, KEY),
        np.full(num, layout.tokens_per_group),
        np.full(num, layout.group_blocks),
        np.zeros((num, layout.group_blocks), KEY),
    )
    assert not tier.write(records, addresses, cause="demote").any()
    return buffer


@pytest.fixture
def root(tmp_path):
    """A store of one cleanly closed namespace."""
    root = tmp_path / "store"
    opened = open_small(root, LAYOUT, NUM_SLOTS)
    write_groups(opened.tier)
    opened.close()
    return root


def other_namespace(root):
    """Add a namespace of another geometry."""
    layout = small_layout(block_tokens=8)
    open_small(root, layout, 4).close()
    return small_identity(layout).digest().hex()[:32]


def flip(root, slot, offset):
    """Change one byte of a slot in the file."""
    with (root / DIGEST / "data.kvt").open("r+b") as file:
        at = PAGE_BYTES + slot * LAYOUT.slot_bytes + offset
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def everything(root):
    """Name, kind, size and content of all there is, links not followed."""
    return {
        str(path.relative_to(root)): path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.name != "owner.lock"
    }


# Listing


def test_ls_says_it_in_words(kvtide, root):
    code, out, err = kvtide("ls", root)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    for words in (DIGEST, "small", "bf16, 3 layers, layer_major", "4 tokens each, 2 in a group", "256 KiB",
                  "80 KiB (31%)", "5 groups, 40 tokens", " s since", "cleanly"):  # fmt: skip
        assert words in out


def test_ls_json(kvtide, root):
    os.utime(root / DIGEST / "data.kvt", (time.time() - 3700,) * 2)
    code, out, err = kvtide("ls", root, "--json")
    assert (code, err) == (0, "")
    (found,) = json.loads(out)["namespaces"]
    assert set(found) == {
        "digest", "identity", "problem", "capacity_bytes", "used_bytes", "file_bytes", "num_groups", "num_tokens",
        "age_s", "is_direct", "is_clean",
    }  # fmt: skip
    assert found["identity"] == json.loads(json.dumps(small_identity(LAYOUT).describe()))
    assert found["capacity_bytes"] == NUM_SLOTS * LAYOUT.slot_bytes
    assert found["used_bytes"] == NUM_GROUPS * LAYOUT.slot_bytes
    assert (found["num_groups"], found["num_tokens"]) == (NUM_GROUPS, NUM_GROUPS * LAYOUT.tokens_per_group)
    assert (found["digest"], found["problem"], found["is_clean"]) == (DIGEST, None, True)
    assert 3700 <= found["age_s"] < 3800


@pytest.mark.parametrize("is_clean", [True, False])
def test_ls_changes_nothing(kvtide, root, is_clean):
    if not is_clean:
        (root / DIGEST / "checkpoint.kvt").unlink()
    before = everything(root)
    for _ in range(2):
        assert kvtide("ls", root)[0] == 0
        (info,) = list_namespaces(root)
        assert (info.num_groups, info.is_clean) == (NUM_GROUPS, is_clean)
    assert everything(root) == before


def test_is_direct_where_the_file_system_refuses(root, monkeypatch):
    real_open = os.open

    def refusing(path, flags, *mode, **options):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refusing)
    (info,) = list_namespaces(root)
    assert (info.is_direct, info.num_groups) == (False, NUM_GROUPS)


def test_empty_store(kvtide, root):
    drop_namespace(root)
    (root / MARKER).write_text('{"format": "kvtide store", "version": 1}\n')
    for words in ("ls", "verify"):
        code, out, _ = kvtide(words, root)
        assert code == 0
        assert "without namespaces" in " ".join(out.split())
        assert json.loads(kvtide(words, root, "--json")[1])["namespaces"] == []
    assert kvtide("drop", root, "--yes")[0] == 0
    assert list(root.iterdir()) == []


# What is broken


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": "\x1b[31m"}', None])
def test_broken_identity(kvtide, root, text):
    file = root / DIGEST / "identity.json"
    file.unlink() if text is None else file.write_text(text)
    code, out, _ = kvtide("ls", root)
    assert code == 0
    assert "identity.json" in "".join(out.split())
    assert "\x1b" not in out
    (found,) = json.loads(kvtide("ls", root, "--json")[1])["namespaces"]
    assert found["identity"] is None
    assert "identity.json" in found["problem"]
    code, out, _ = kvtide("verify", root, "--json")
    assert code == 1
    assert "identity.json" in json.loads(out)["namespaces"][0]["problem"]
    assert kvtide("drop", root, "--yes")[0] == 0
    assert list(root.iterdir()) == []


def test_identity_of_another_namespace(root):
    other = other_namespace(root)
    (root / DIGEST / "identity.json").write_bytes((root / other / "identity.json").read_bytes())
    problems = {info.digest: info.problem for info in list_namespaces(root)}
    assert "another identity" in problems[DIGEST]
    assert problems[other] == ""


@pytest.mark.parametrize("content", [b"", b"short", bytes(8192), b"KVTFILE\0" + bytes(8184)])
def test_no_data_file(kvtide, root, content):
    (root / DIGEST / "data.kvt").write_bytes(content)
    code, out, _ = kvtide("verify", root, "--json")
    assert code == 1
    assert "data.kvt" in json.loads(out)["namespaces"][0]["problem"]
    assert kvtide("ls", root)[0] == 0


@pytest.mark.parametrize("is_clean", [True, False])
def test_truncated_data_file(kvtide, root, is_clean):
    if not is_clean:
        (root / DIGEST / "checkpoint.kvt").unlink()
    os.truncate(root / DIGEST / "data.kvt", PAGE_BYTES + 3 * LAYOUT.slot_bytes)
    (info,) = list_namespaces(root)
    assert "cut short" in info.problem
    code, out, _ = kvtide("verify", root, "--json")
    (found,) = json.loads(out)["namespaces"]
    assert code == 1
    assert (found["num_ok"], found["num_corrupt"]) == (3, 0)
    assert found["num_unreadable"] == (2 if is_clean else 0)
    assert found["num_slots_unreadable"] == NUM_SLOTS - 3
    assert list_namespaces(root)[0].is_clean == is_clean
    opened = open_small(root, LAYOUT, NUM_SLOTS)  # the owner makes it whole again
    opened.close()
    assert verify_namespace(root / DIGEST).num_corrupt == (2 if is_clean else 0)
    assert verify_namespace(root / DIGEST).is_fine


def test_verify_of_a_sound_store(kvtide, root):
    code, out, err = kvtide("verify", root)
    assert (code, err) == (0, "")
    assert DIGEST[:16] in out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    code, out, _ = kvtide("verify", root, "--json")
    (found,) = json.loads(out)["namespaces"]
    assert set(found) == {
        "digest", "model", "problem", "num_groups", "num_ok", "num_corrupt", "num_unreadable", "num_slots_unreadable",
        "read_bytes", "is_fine",
    }  # fmt: skip
    assert (code, found["num_groups"], found["num_ok"], found["is_fine"]) == (0, NUM_GROUPS, NUM_GROUPS, True)
    assert found["read_bytes"] == NUM_GROUPS * sum(LAYOUT.fragment_padded_bytes)


def test_verify_cleans_after_a_crash(root):
    (root / DIGEST / "checkpoint.kvt").unlink()
    assert verify_namespace(root / DIGEST).num_ok == NUM_GROUPS
    assert list_namespaces(root)[0].is_clean


@pytest.mark.parametrize("memory_bytes", [1, 3 * 4096, 40_000, 32 << 20])
@pytest.mark.parametrize("is_clean", [True, False])
def test_corrupt_bytes_are_found_and_forgotten(root, memory_bytes, is_clean):
    if not is_clean:
        (root / DIGEST / "checkpoint.kvt").unlink()
    flip(root, 1, LAYOUT.fragment_offset[0])
    flip(root, 1, LAYOUT.fragment_offset[2] + 5)
    flip(root, 3, LAYOUT.slot_bytes - 1)
    steps = []
    report = verify_namespace(
        root / DIGEST, memory_bytes=memory_bytes, on_progress=lambda done, total: steps.append((done, total))
    )
    assert (report.num_groups, report.num_ok, report.num_corrupt, report.num_unreadable) == (5, 3, 2, 0)
    total = NUM_GROUPS * sum(LAYOUT.fragment_padded_bytes)
    assert steps[0] == (0, total)
    assert steps[-1] == (total, total)
    assert steps == sorted(steps)
    assert verify_namespace(root / DIGEST).is_fine
    opened = open_small(root, LAYOUT, NUM_SLOTS)
    assert opened.was_clean
    keys = np.array([(index + 1).to_bytes(32, "little") for index in range(NUM_GROUPS)], KEY)
    assert opened.tier.lookup(keys).tolist() == [True, False, True, False, True]
    num_free = NUM_SLOTS - 3
    write_groups(opened.tier, num_free, seed=8)  # every slot but those of the good groups takes one
    opened.close()
    assert verify_namespace(root / DIGEST).num_ok == num_free


def test_a_header_that_differs_from_the_checkpoint_is_corrupt(kvtide, root):
    flip(root, 2, 100)
    code, out, _ = kvtide("verify", root)
    assert code == 1
    assert "1 corrupt groups were forgotten" in out
    assert kvtide("verify", root)[0] == 0
    assert list_namespaces(root)[0].num_groups == NUM_GROUPS - 1


@pytest.mark.parametrize("content", [b"", b"x" * 500])
def test_a_broken_checkpoint_is_not_believed(root, content):
    (root / DIGEST / "checkpoint.kvt").write_bytes(content)
    (info,) = list_namespaces(root)
    assert (info.is_clean, info.num_groups) == (False, NUM_GROUPS)


def test_interrupted_verify_leaves_a_whole_store(kvtide, root, monkeypatch):
    flip(root, 0, LAYOUT.fragment_offset[0])

    def interrupt(done, _total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_namespace(root / DIGEST, memory_bytes=1, on_progress=interrupt)
    assert list_namespaces(root)[0].num_groups == NUM_GROUPS - 1
    assert verify_namespace(root / DIGEST).is_fine
    monkeypatch.setattr(verify_module, "_read_all", lambda *_: signal.raise_signal(signal.SIGINT))
    assert kvtide("verify", root)[0] == 130
    monkeypatch.undo()
    assert verify_namespace(root / DIGEST).is_fine


def test_the_bar_is_for_terminals_that_wait(kvtide, root, monkeypatch):
    monkeypatch.setattr(cli_store, "BAR_AFTER_S", -1.0)
    assert kvtide("verify", root)[2] == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    code, out, err = kvtide("verify", root, "--json")
    assert code == 0
    assert f"verify {DIGEST[:8]}" in err
    json.loads(out)


# Other owners


@pytest.fixture
def owner(root):
    """Another process that has the namespace open; it does what `lock` does without the time to import it."""
    code = (
        "import fcntl, os, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(os.getpid(), file=file, flush=True); print('owned', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-S", "-c", code, str(root / DIGEST / "owner.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "owned\n"
        yield process
        process.stdin.close()


@pytest.mark.parametrize("words", ["ls", "verify", "drop --yes"])
@pytest.mark.parametrize("is_broken", [True, False])
def test_owned_by_another_process(kvtide, root, owner, words, is_broken):
    if is_broken:
        (root / DIGEST / "identity.json").write_text("{")
    before = everything(root)
    verb, *options = words.split()
    code, out, err = kvtide(verb, root, *options)
    assert (code, out) == (1, "")
    assert f"owned by process {owner.pid}" in err
    assert "Traceback" not in err
    code, _, err = kvtide(verb, root, *options, "--json")
    assert code == 1
    assert str(owner.pid) in json.loads(err)["error"]
    assert everything(root) == before


@pytest.mark.usefixtures("owner")
def test_another_namespace_can_be_used_meanwhile(kvtide, root):
    other = other_namespace(root)
    assert kvtide("verify", root, "--namespace", other[:8])[0] == 0
    assert kvtide("drop", root, "--yes")[0] == 1
    assert (root / other / "data.kvt").exists()
    assert kvtide("drop", root, "--namespace", other, "--yes")[0] == 0
    assert not (root / other).exists()
    assert (root / MARKER).exists()


# Dropping


def test_drop_asks(kvtide, root, monkeypatch):
    before = everything(root)
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    code, out, err = kvtide("drop", root)
    assert code == 1
    assert "Nothing was dropped." in out
    assert DIGEST in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert kvtide("drop", root)[0] == 1
    assert everything(root) == before
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    code, out, _ = kvtide("drop", root)
    assert code == 0
    assert "Dropped 1 namespace" in out
    assert list(root.iterdir()) == []


def test_drop_json(kvtide, root):
    code, out, err = kvtide("drop", root, "--json")
    assert (code, out) == (2, "")
    assert "--yes" in json.loads(err)["error"]
    size = list_namespaces(root)[0].file_bytes
    code, out, _ = kvtide("drop", root, "--json", "--yes")
    found = json.loads(out)
    assert (code, found["dropped"], set(found)) == (0, [DIGEST], {"directory", "dropped", "freed_bytes"})
    assert abs(found["freed_bytes"] - size) < 16  # owner.lock has our process id meanwhile
    assert kvtide("ls", root)[0] == 2


def test_drop_one_keeps_the_rest(kvtide, root):
    other = other_namespace(root)
    for prefix in ("", "zz", "../x", "0" * 33, "ffffffff"):
        assert kvtide("drop", root, "--yes", f"--namespace={prefix}")[0] == 2
    assert kvtide("drop", root, "--yes", "--namespace", DIGEST[:6])[0] == 0
    assert [path.name for path in find_namespaces(root)] == [other]
    assert (root / MARKER).exists()


def test_leftovers_of_a_crash_are_ours(root):
    for name in ("checkpoint.kvt.partial", "identity.json.partial"):
        (root / DIGEST / name).write_bytes(b"x")
    (root / f"{MARKER}.partial").write_bytes(b"x")
    drop_namespace(root)
    assert list(root.iterdir()) == []


def test_interrupted_drop_opens_as_an_empty_namespace(root, monkeypatch):
    real_unlink = os.unlink

    def interrupted(name, **options):
        if name == "identity.json":
            raise KeyboardInterrupt
        real_unlink(name, **options)

    monkeypatch.setattr(os, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drop_namespace(root)
    monkeypatch.undo()
    assert "data.kvt is missing" in list_namespaces(root)[0].problem
    opened = open_small(root, LAYOUT, NUM_SLOTS)
    assert opened.tier.stats().num_groups == 0
    opened.close()
    drop_namespace(root)


# What is not ours


@pytest.mark.parametrize("verb", ["ls", "verify", "drop"])
def test_missing_and_foreign_directories(kvtide, tmp_path, verb):
    yes = ["--yes"] if verb == "drop" else []
    foreign = tmp_path / "foreign"
    (foreign / DIGEST).mkdir(parents=True)
    (foreign / DIGEST / "data.kvt").write_text("precious")
    for place in (tmp_path / "missing", foreign, foreign / DIGEST / "data.kvt"):
        code, out, err = kvtide(verb, place, *yes)
        assert (code, out) == (2, "")
        assert err.startswith("kvtide: ")
        assert json.loads(kvtide(verb, place, *yes, "--json")[2])["kind"] == "ConfigError"
    assert everything(foreign) == {DIGEST: False, f"{DIGEST}/data.kvt": b"precious"}


def test_a_store_of_another_version(kvtide, root):
    (root / MARKER).write_text('{"format": "kvtide store", "version": 2}\n')
    before = everything(root)
    assert [kvtide(*words)[0] for words in (("ls", root), ("verify", root), ("drop", root, "--yes"))] == [1, 1, 1]
    assert everything(root) == before


@pytest.mark.parametrize("name", ["data.kvt", "identity.json", "owner.lock", "checkpoint.kvt", "notes.txt"])
def test_a_link_is_not_followed(kvtide, root, tmp_path, name):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (root / DIGEST / name).unlink(missing_ok=True)
    (root / DIGEST / name).symlink_to(precious)
    before = everything(root)
    code, _, err = kvtide("drop", root, "--yes")
    assert code == 2
    assert name in err
    assert kvtide("ls", root)[0] == 0
    assert kvtide("verify", root)[0] == (0 if name == "notes.txt" else 1)
    assert everything(root) == before
    assert precious.read_text() == "precious"
    assert (name in list_namespaces(root)[0].problem) == (name != "notes.txt")


def test_an_owner_follows_no_link_either(root, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (root / DIGEST / "owner.lock").unlink()
    (root / DIGEST / "owner.lock").symlink_to(precious)
    with pytest.raises(IoError):
        lock(root / DIGEST)
    assert precious.read_text() == "precious"


def test_a_link_to_a_namespace_is_none(kvtide, root, tmp_path):
    outside = tmp_path / "outside"
    (root / DIGEST).rename(outside)
    (root / DIGEST).symlink_to(outside)
    assert json.loads(kvtide("ls", root, "--json")[1])["namespaces"] == []
    assert kvtide("drop", root, "--yes")[0] == 0
    assert (outside / "data.kvt").exists()
    assert (root / DIGEST).is_symlink()


def test_a_linked_marker_is_not_ours(root, tmp_path):
    (root / MARKER).rename(tmp_path / MARKER)
    (root / MARKER).symlink_to(tmp_path / MARKER)
    with pytest.raises(ConfigError, match="is a link"):
        drop_namespace(root)
    with pytest.raises(ConfigError, match="is a link"):
        list_namespaces(root)
    assert len(list(root.iterdir())) == 2


def test_foreign_files_beside_ours_stop_the_drop(kvtide, root):
    (root / DIGEST / "sub").mkdir()
    assert kvtide("drop", root, "--yes")[0] == 2
    assert verify_namespace(root / DIGEST).is_fine
    (root / DIGEST / "sub").rmdir()
    (root / "notes.txt").write_text("mine")
    assert kvtide("drop", root, "--yes")[0] == 0
    assert [path.name for path in root.iterdir()] == ["notes.txt"]


def test_pipes_are_not_waited_for(root):
    (root / DIGEST / "identity.json").unlink()
    os.mkfifo(root / DIGEST / "identity.json")
    assert "not a regular file" in list_namespaces(root)[0].problem


# The command itself


@pytest.mark.parametrize("words", [(), ("ls",), ("verify",), ("drop",)])
def test_help_has_an_example(kvtide, words):
    code, out, _ = kvtide(*words, "--help")
    assert code == 0
    assert "Example: kvtide store" in out


def test_no_verb_shows_the_help(kvtide):
    code, out, _ = kvtide()
    assert code == 0
    assert "verify" in out


@pytest.mark.parametrize(("age_s", "words"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (10**6, "11 d")])
def test_format_age(age_s, words):
    assert cli_store.format_age(age_s) == words


def test_library_faces_take_paths(root):
    assert [info.digest for info in list_namespaces(Path(root), prefix=DIGEST[:4], clock=lambda: 0)] == [DIGEST]
    assert list_namespaces(root, clock=lambda: 0)[0].age_s == 0


def test_ls_tells_the_facts_of_an_engines_chunks(kvtide, tmp_path):
    facts = {"engine": "one 1.0", "kind": "kv", "salt": ""}
    ChunkStore(ChunkOptions(tmp_path, 1 << 20, 12288, "some model", facts, piece_bytes=(8192, 4096))).close()
    _, shown, _ = kvtide("ls", tmp_path)
    assert "12 KiB each in 2 pieces" in shown
    assert "one 1.0" in shown
    assert "salt" not in shown
    assert "fp8" not in shown
