from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engines

engines.use("vllm")

from vllm.v1.kv_offload.base import Locality, LookupResult, OffloadingKVEventsConfig, ReqContext  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob  # noqa: E402

from kvtide.chunks import fold  # noqa: E402
from kvtide.errors import ConfigError, IoError, UnsupportedError  # noqa: E402
from kvtide.integrations import versions  # noqa: E402
from kvtide.integrations.vllm import KvtideTier  # noqa: E402
from kvtide.integrations.vllm.known import KnownChunks  # noqa: E402
from kvtide.integrations.weights import digest_of_weights  # noqa: E402
from kvtide.modelfiles import weights_digest  # noqa: E402

SIZE = 8192
REQUEST = ReqContext("request")


def spec(**changed: Any) -> Any:
    """Return what the tier reads of an `OffloadingSpec`."""
    space = types.SimpleNamespace
    model = {"name": "model", "dtype": "bfloat16"}
    parallel = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "rank": 0, "is_parallelism_agnostic": False}
    config = space(
        model=space(**{name: changed.get(name, value) for name, value in model.items()}),
        parallel=space(**{name: changed.get(name, value) for name, value in parallel.items()}),
        cache=space(tokens_per_hash=16),
        groups=[space(tokens_per_block=16, layer_names=["layer 0"], group_id=group) for group in range(2)],
        kv_cache_layout=changed.get("layout", "LBHNC"),
        extra_config=changed.get("extra_config", {}),
        canonical_layout=False,
        replicated_layout=False,
    )
    publishes = OffloadingKVEventsConfig(changed.get("publishes", False), self_describing_kv_events=False)
    return space(config=config, blocks_per_chunk=1, kv_events_config=publishes)


class Primary:
    """A primary tier of `num` chunks, `shift` bytes beyond a page."""

    def __init__(self, num: int = 32, *, seed: int | None = None, shift: int = 0) -> None:
        self.memory = engines.Memory(num, SIZE, seed=seed, shift=shift)
        self.rows = self.memory.rows
        self.view = memoryview(self.rows)  # type: ignore[arg-type]  # numpy gives its buffer


def tier(directory: Path, primary: Primary, *, capacity: str = "1MiB", salt: str = "", **changed: Any) -> KvtideTier:
    own = ("model_facts", "metrics_port", "enable_kv_events", "locality")
    told = {name: changed.pop(name) for name in own if name in changed}
    return KvtideTier(spec(**changed), primary.view, "KvtideTier", str(directory), capacity, salt, **told)


def names(num: int, group: int = 0) -> list[Any]:
    return [digest + group.to_bytes(4, "big") for digest in engines.digests(num)]


def job(number: int, keys: list[Any], chunks: list[int], *, is_promotion: bool = False) -> TransferJob:
    return TransferJob(number, keys, np.array(chunks), is_promotion, REQUEST)


def results(one: KvtideTier) -> dict[int, JobResult]:
    one.drain_jobs()
    return {found.job_id: found for found in one.get_finished_jobs()}


def hits(one: KvtideTier, keys: list[Any]) -> list[bool]:
    return [one.lookup(key, REQUEST) is LookupResult.HIT for key in keys]


@pytest.mark.parametrize("shift", [0, 512])
def test_bytes_are_right_after_a_restart(tmp_path: Path, shift: int) -> None:
    stored, wanted = Primary(seed=1, shift=shift), Primary(shift=shift)
    one = tier(tmp_path, stored)
    assert isinstance(one, SecondaryTierManager)
    one.submit_store(job(1, names(10), list(range(10))))
    done = results(one)[1]
    assert (done.success, done.successful_keys, done.transfer_bytes) == (True, None, 10 * SIZE)
    assert not results(one)
    one.shutdown()
    one = tier(tmp_path, wanted)
    assert hits(one, names(12)) == [True] * 10 + [False] * 2
    assert not any(hits(one, names(10, group=1)))
    one.submit_load(job(2, names(10), list(range(20, 30)), is_promotion=True))
    assert results(one)[2].success
    assert (wanted.rows[20:30] == stored.rows[:10]).all()
    assert not wanted.rows[:20].any()
    one.shutdown()


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "float8"},
        {"layout": "other"},
        {"tp_size": 2},
        {"rank": 1},
        {"name": "b"},
        {"salt": "tenant"},
        {"model_facts": "rope factor 4"},
        {"extra_config": {"kvtide_model_hash": "of another configuration"}},
    ],
)
def test_other_facts_find_nothing(tmp_path: Path, changed: dict[str, Any]) -> None:
    primary = Primary(seed=2)
    one = tier(tmp_path, primary)
    one.submit_store(job(1, names(4), [0, 1, 2, 3]))
    one.drain_jobs()
    one.shutdown()
    one = tier(tmp_path, primary, **changed)
    assert not any(hits(one, names(4)))
    one.shutdown()


def test_another_config_json_finds_nothing_and_what_is_not_seen_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, primary = tmp_path / "model", Primary(seed=2)
    folder.mkdir()
    found = []
    for config, told in (("{}", {}), ("{}", {"model_facts": "a"}), ('{"rope_theta": 1}', {"model_facts": "a"})):
        (folder / "config.json").write_text(config)
        one = tier(tmp_path / "store", primary, name=str(folder), **told)
        found.append(any(hits(one, names(1))))
        one.submit_store(job(1, names(1), [0]))
        one.drain_jobs()
        one.shutdown()
    assert not any(found)
    assert caplog.text.count('"model_facts"') == 1


def test_the_hub_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    hub: Any = types.ModuleType("huggingface_hub")
    hub.snapshot_download = lambda name, revision, **_local: asked.append((name, revision)) or tmp_path / "no"
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    tier(tmp_path / "kv", Primary(), name="some/model", extra_config={"kvtide_model_revision": "a"}).shutdown()
    assert asked == [("some/model", "a")]


def test_a_revision_is_not_taken_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for revision in ("a", "b"):
        (tmp_path / revision).mkdir()
        (tmp_path / revision / "model.bin").write_bytes(revision.encode())
    hub: Any = types.ModuleType("huggingface_hub")
    hub.snapshot_download = lambda _, revision, **_local: tmp_path / (revision or "a")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert digest_of_weights("no/such", "b") == weights_digest(tmp_path / "b")
    assert not caplog.text
    assert digest_of_weights("no/such") == weights_digest(tmp_path / "a")
    assert "several revisions of no/such" in caplog.text


def test_it_is_bounded_and_the_oldest_give_way(tmp_path: Path) -> None:
    primary = Primary(60, seed=3)
    one = tier(tmp_path, primary, capacity="256KiB")
    room = one._store.num_chunks_max
    for row in range(60):
        one.submit_store(job(row, names(60)[row : row + 1], [row]))
        one.drain_jobs()
        one.touch(names(1), REQUEST)
    assert all(found.success for found in results(one).values())
    assert hits(one, names(60)) == [True] + [False] * (60 - room) + [True] * (room - 1)
    assert sum(file.stat().st_size for file in tmp_path.glob("*/data.kvt")) <= 256 << 10
    stats = one.get_stats()
    assert not stats.is_empty()
    assert one._store.counts.evicted == 60 - room
    assert set(stats.data.get("data", stats.data)) <= set(one.build_metric_definitions({}))
    one.shutdown()


def test_a_load_tells_which_keys_arrived_and_forgets_corrupt_ones(tmp_path: Path) -> None:
    stored, wanted = Primary(seed=4), Primary()
    one = tier(tmp_path, stored)
    one.submit_store(job(1, names(5), list(range(5))))
    one.drain_jobs()
    path = one._store.path
    one.shutdown()
    engines.flip_bytes(path, stored.rows[2].tobytes()[:64])
    one = tier(tmp_path, wanted)
    one.submit_load(job(2, names(6), list(range(6)), is_promotion=True))
    done = results(one)[2]
    assert not done.success
    assert list(done.successful_keys or ()) == [names(6)[row] for row in (0, 1, 3, 4)]
    assert done.transfer_bytes == 4 * SIZE
    assert hits(one, names(6)) == [True, True, False, True, True, False]
    one.submit_load(job(3, names(6)[5:], [5], is_promotion=True))
    assert (results(one)[3].success, results(one)) == (False, {})
    one.shutdown()


def test_what_comes_and_goes_is_told_as_kv_events(tmp_path: Path) -> None:
    primary = Primary(60, seed=3)
    one = tier(tmp_path, primary, capacity="256KiB", publishes=True, enable_kv_events=True, locality="LOCAL")
    named = names(59) + names(1, group=1)
    one.submit_store(job(0, [named[59], *named[:4]], [59, 0, 1, 2, 3]))
    one.submit_store(job(1, named[:2], [0, 1]))
    one.drain_jobs()
    (first,) = one.take_events()
    assert (first.keys, first.medium, first.removed) == ([named[59], *named[:4]], one.medium, False)
    assert (first.locality, first.ownership, first.removal_expected) == (Locality.LOCAL, "kvtide", True)
    for row in range(4, 59):
        one.submit_store(job(row, [named[row]], [row]))
    one.drain_jobs()
    there: set[bytes] = set(first.keys)
    for event in one.take_events():
        assert there.isdisjoint(event.keys) is not event.removed
        (there.difference_update if event.removed else there.update)(event.keys)
    assert there == {key for key in named if hits(one, [key]) == [True]}
    assert 0 < len(there) < 60
    assert not list(one.take_events())
    one.shutdown()


def test_events_that_nobody_takes_do_not_pile_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = tier(tmp_path, Primary(), enable_kv_events=True)
    assert "enable_kv_cache_events" in caplog.text
    one.submit_store(job(1, names(4), [0, 1, 2, 3]))
    assert results(one)[1].success
    assert not list(one.take_events())
    one.shutdown()
    with pytest.raises(ConfigError, match="type one of LOCAL, REMOTE"):
        tier(tmp_path, Primary(), locality="here")


@pytest.mark.parametrize("cut", [lambda name: name, lambda name: name[:16] + name[32:]], ids=["sha256", "16 bytes"])
def test_names_of_any_form_are_found_and_lost(tmp_path: Path, cut: Any) -> None:
    named = [cut(name) for group in range(2) for name in names(30, group)]
    one = tier(tmp_path, Primary(60, seed=3), capacity="256KiB", publishes=True, enable_kv_events=True)
    for row in range(60):
        one.submit_store(job(row, named[row : row + 1], [row]))
        one.drain_jobs()
    there = hits(one, named)
    assert there == hits(one, named) == one._store.has(fold(named)).tolist()
    assert 0 < sum(there) < 60
    removed = [key for event in one.take_events() if event.removed for key in event.keys]
    assert removed == [name for name, is_there in zip(named, there, strict=True) if not is_there]
    one.shutdown()
    again = tier(tmp_path, Primary(60), capacity="256KiB")
    assert hits(again, named) == hits(again, named) == there
    again.shutdown()


def test_a_chunk_that_leaves_while_it_is_looked_up_is_not_found_for_ever() -> None:
    (name,) = names(1)
    known = KnownChunks([0], has_events=False)

    class Leaving(set[bytes]):
        def __contains__(self, key: object) -> bool:
            is_there = super().__contains__(key)
            if is_there:
                self.discard(key)  # type: ignore[arg-type]
                known.gone(fold([name]))
            return is_there

    known.start(Leaving())  # type: ignore[arg-type]
    known._held.add(name[:32])  # type: ignore[attr-defined]
    assert not known.find(name)
    assert not known.names


def test_a_failing_disk_ends_every_job_and_later_recovers(tmp_path: Path) -> None:
    primary = Primary(seed=5)
    one = tier(tmp_path, primary)
    disk = engines.break_disk(one._store)
    for row in range(16):
        one.submit_store(job(row, names(16)[row : row + 1], [row]))
    failed = results(one)
    assert len(failed) == 16
    assert not any(found.success for found in failed.values())
    assert not any(hits(one, names(16)))
    disk.fails = False
    one.submit_store(job(99, names(16), list(range(16))))
    assert results(one)[99].success
    assert all(hits(one, names(16)))
    one.shutdown()


def test_many_jobs_at_once_and_what_was_begun_is_finished(tmp_path: Path) -> None:
    primary = Primary(60, seed=6)
    one = tier(tmp_path, primary)
    for row in range(60):
        one.submit_store(job(row, names(60)[row : row + 1], [row]))
    one.shutdown()
    again = tier(tmp_path, Primary(60))
    assert all(hits(again, names(60)))
    again.shutdown()


def test_an_owned_directory_is_refused_with_the_reason(tmp_path: Path) -> None:
    one = tier(tmp_path, Primary())
    with pytest.raises(IoError, match="owned by process"):
        tier(tmp_path, Primary())
    one.shutdown()


def test_versions_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"is not installed: pip install 'no-such==1.2'"):
        versions.engine_version(("no-such",), "Engine", "1.2", (0, 1))
    monkeypatch.setattr(versions.metadata, "version", lambda _: "0.9.5rc1")
    assert versions.engine_version(("engine",), "Engine", "1.2", (0, 9)) == "0.9.5rc1"
    with pytest.raises(UnsupportedError, match=r"0.9.5rc1 has no interface .* tested is 1.2"):
        versions.engine_version(("engine",), "Engine", "1.2", (1, 0))
