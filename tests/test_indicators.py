"""Figures against cases worked out by hand, a published study recomputed from its geometry, and properties."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.roofline import Roof, Roofline
from kvtide.trace import events
from kvtide.trace.bins import NUM_BINS, TimeBins
from kvtide.trace.buckets import (
    DISTINCT_MAX,
    NUM_BUCKETS,
    SizeCounts,
    bucket_middle,
    bucket_of,
    latency_of,
)
from kvtide.trace.events import shaped
from kvtide.trace.figures import Indicators
from kvtide.trace.file import About, Device, Health, TraceFile, TraceWriter
from kvtide.trace.flow import STREAMS, Runs
from kvtide.trace.indicators import Meter, measure
from kvtide.trace.objects import Phases
from kvtide.trace.verdict import judge

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECOND = 10**9
DEVICE = 8 << 20


def block(rows: list[tuple[int, int]], **columns: object) -> pl.DataFrame:
    """Return 4 KiB reads from their issue and completion; -1 for one that was not seen."""
    frame = pl.DataFrame({"time_ns": [row[0] for row in rows], "complete_ns": [row[1] for row in rows]})
    filled = {"device": DEVICE, "offset": -1, "length": 4 * KIB, "flags": events.READ} | columns
    added = [
        pl.Series(name, value if isinstance(value, list) else [value] * len(rows)) for name, value in filled.items()
    ]
    return shaped("block", frame.with_columns(added))


def measured(about: About | None = None, roofline: Roofline | None = None, **levels: pl.DataFrame) -> Indicators:
    meter = Meter(about or About(), roofline)
    for level, frame in levels.items():
        meter.add(level, frame)
    return meter.result()


def test_depth_busy_time_and_rates_of_three_commands() -> None:
    figures = measured(About(start_ns=0, end_ns=1000), block=block([(0, 100), (50, 200), (600, 700)]))
    whole = figures.whole
    assert (whole.read.num_ops, whole.read.num_bytes, whole.write.num_ops) == (3, 12 * KIB, 0)
    assert whole.window_ns == 1000
    assert whole.depth == pytest.approx((100 + 150 + 100) / 1000)
    assert whole.busy_share == pytest.approx((200 + 100) / 1000)
    assert whole.depth_busy == pytest.approx(350 / 300)
    assert whole.read.bytes_per_s == pytest.approx(12 * KIB / 1e-6)
    assert whole.submit_gap_ratio == pytest.approx(50 / 100, rel=0.04)
    assert whole.read.device.mean_ns == pytest.approx(350 / 3)
    assert whole.read.device.max_ns == 150
    assert figures.timeline.depth.sum() * figures.timeline.bin_ns == pytest.approx(350)
    assert figures.trust.little_residual == 0


def test_queue_time_flags_errors_and_directions() -> None:
    frame = block(
        [(100, 200), (300, 400), (500, 600), (700, 800)],
        queue_ns=[60, -1, 450, 690],
        flags=[events.READ | events.READAHEAD, events.WRITE | events.META, events.FLUSH, events.DISCARD],
        length=[4096, 8192, 0, 1 << 30],
        error=[0, 5, 0, 0],
    )
    whole = measured(block=frame).whole
    assert (whole.read.num_ops, whole.write.num_ops) == (1, 1)
    assert (whole.num_flushes, whole.num_errors) == (1, 1)
    assert (whole.read.readahead_share, whole.read.meta_share) == (1.0, 0.0)
    assert (whole.write.readahead_share, whole.write.meta_share) == (0.0, 1.0)
    assert (whole.read.queue.num, whole.read.queue.mean_ns, whole.write.queue.num) == (1, 40, 0)


def test_sizes_mode_and_medians() -> None:
    lengths = [4096] * 6 + [65536] * 3 + [MIB]
    sizes = measured(block=block([(at, at + 5) for at in range(10)], length=lengths)).whole.read.sizes
    assert sizes.sizes.tolist() == [4096, 65536, MIB]
    assert sizes.counts.tolist() == [6, 3, 1]
    assert (sizes.mode_bytes, sizes.mode_share, sizes.median_bytes, sizes.median_by_bytes) == (4096, 0.6, 4096, MIB)
    assert sizes.mean_bytes == pytest.approx(sum(lengths) / 10)


def test_many_sizes_are_gathered_but_none_is_lost() -> None:
    counts = SizeCounts()
    sizes = np.arange(1, 3 * DISTINCT_MAX, dtype=np.int64) * 512
    for piece in np.array_split(np.concatenate([sizes, np.full(9999, 4096)]), 7):
        counts.add(np.zeros(len(piece), np.int64), piece)
    told = counts.sizes(np.array([0]), int(sizes.sum()) + 9999 * 4096)
    assert told.counts.sum() == len(sizes) + 9999
    assert len(told.sizes) <= DISTINCT_MAX
    assert told.mode_bytes == 4096
    assert told.counts[told.sizes == 4096] >= 9999
    assert float((told.sizes * told.counts).sum()) == pytest.approx(sizes.sum() + 9999 * 4096, rel=0.01)


def test_sequential_by_device_and_direction_also_in_parallel_streams() -> None:
    streams = np.repeat(np.arange(50), STREAMS).reshape(50, STREAMS)
    base = np.arange(STREAMS) * GIB
    offsets = (streams * 4096 + base).ravel()
    found = Runs().add(np.zeros(len(offsets), np.int64), offsets, np.full(len(offsets), 4096))
    assert found.sum() == 49 * STREAMS, "each stream goes on after its first"
    one = block([(at, at + 5) for at in range(4)], offset=[0, 4096, 8192, 0])
    assert measured(block=one).whole.read.sequential_share == 0.5
    other = block([(0, 5), (1, 6)], offset=[0, 4096], device=[1, 2])
    assert measured(block=other).whole.read.sequential_share == 0
    mixed = block([(0, 5), (1, 6)], offset=[0, 4096], flags=[events.READ, events.WRITE])
    assert measured(block=mixed).whole.write.sequential_share == 0
    assert measured(block=block([(0, 5)])).whole.read.sequential_share is None, "offsets are unknown"


def test_runs_go_on_from_piece_to_piece() -> None:
    rng = np.random.default_rng(3)
    keys, offsets = rng.integers(0, 3, 400), rng.integers(0, 40, 400) * 512
    lengths = np.full(400, 512)
    whole = Runs().add(keys, offsets, lengths)
    pieces, runs = [], Runs()
    for start, end in [(0, 1), (1, 50), (50, 51), (51, 400)]:
        pieces.append(runs.add(keys[start:end], offsets[start:end], lengths[start:end]))
    assert np.array_equal(whole, np.concatenate(pieces))


def test_phases_are_those_of_the_object_wanted_last() -> None:
    phases = Phases()
    phases.add(np.array([100, 200, 300]), np.array([2, 1, 3]))
    assert phases.at(np.array([50, 100, 150, 250, 300, 999])).tolist() == [0, 2, 2, 1, 3, 3]
    assert phases.windows_ns(0, 1000).tolist() == [100, 100, 100, 700]
    assert phases.windows_ns(150, 250).tolist() == [0, 50, 50, 0]


def kv_objects(rows: list[dict[str, object]]) -> pl.DataFrame:
    return shaped("object", pl.DataFrame(rows))


def test_kv_figures_of_a_restore_a_prefill_and_decode() -> None:
    row = {"layer": 0, "sequence_id": 0, "wanted_bytes": 0, "dram_bytes": 0, "file_bytes": 0, "wait_ns": 0}
    frame = kv_objects([
        row | {"time_ns": 0, "cause": "restore", "num_tokens": 0, "step": 0, "step_tokens": 100},
        row | {"time_ns": 1000, "cause": "restore", "num_tokens": 50, "step": 1, "step_tokens": 4,
               "wanted_bytes": 1000, "file_bytes": 600, "dram_bytes": 400, "wait_ns": 700},
        row | {"time_ns": 2000, "cause": "decode-read", "num_tokens": 54, "step": 2, "step_tokens": 1,
               "wanted_bytes": 1000, "wait_ns": 20},
        row | {"time_ns": 2300, "cause": "decode-read", "num_tokens": 55, "step": 3, "step_tokens": 1},
    ])  # fmt: skip
    figures = measured(
        About(start_ns=0, end_ns=4000), object=frame, block=block([(1100, 1500), (2100, 2150)], length=450)
    )
    kv = figures.kv
    assert kv is not None
    assert (kv.wanted_bytes, kv.dram_bytes, kv.file_bytes, kv.num_steps) == (2000, 400, 600, 4)
    assert (kv.device_hit_share, kv.dram_hit_share) == (0.5, 0.2)
    assert kv.device_bytes_ratio == pytest.approx(900 / 600)
    assert (kv.stall_ns_step, kv.stall_share) == (180, 720 / 4000)
    assert (kv.decode_step_ns, kv.load_ns) == (300, 700)
    assert kv.recompute_ns == 1000 / 100 * 50, "prefill took 1000 ns for 100 tokens; 50 were restored"
    assert {name: part.window_ns for name, part in figures.phases.items()} == {
        "prefill": 1000, "restore": 1000, "decode": 2000,
    }  # fmt: skip
    assert figures.phases["restore"].read.num_ops == figures.phases["decode"].read.num_ops == 1
    assert figures.phases["restore"].depth == pytest.approx(0.4)
    assert measured(block=block([(0, 5)])).kv is None


def test_causes_add_up_and_attribution() -> None:
    frame = block([(0, 10), (20, 30), (40, 50)], cause=["restore", "unknown", "restore"], length=[4096, 8192, 4096])
    figures = measured(block=frame)
    assert figures.causes["restore"].read.num_bytes == 8192
    assert figures.attributed_share == 0.5
    assert set(figures.timeline.by_cause) == {"restore", "unknown"}


def test_the_level_is_the_one_with_completions_nearest_the_device() -> None:
    asked = shaped(
        "op", pl.DataFrame({"time_ns": [0], "complete_ns": [9], "is_write": [True], "length": [512], "fd": [3]})
    )
    figures = measured(op=asked, block=block([(1, 5)]))
    assert (figures.level, figures.whole.read.num_ops) == ("block", 1)
    figures = measured(op=asked, block=block([(1, -1)]))
    assert (figures.level, figures.whole.write.num_ops) == ("op", 1)
    figures = measured(block=block([(1, -1)]))
    assert (figures.level, figures.trust.has_completions, figures.whole.depth) == ("block", False, None)
    assert measured().level == "block"


def test_calls_are_compared_with_what_the_device_did() -> None:
    call = pl.DataFrame({
        "time_ns": [0, 1000, 2000, 2500],
        "complete_ns": [500, 1500, 2100, 2600],
        "name": ["pread64", "io_uring:READ", "openat", "epoll_wait"],
        "length": [4096, 4096, -1, -1],
        "result": [4096, 4096, 3, 1],
    })  # fmt: skip
    figures = measured(call=shaped("call", call), block=block([(100, 200), (1100, 1200)], queue_ns=[50, 1050]))
    assert figures.call is not None
    assert figures.call.num_ops == 2
    assert figures.call.device.mean_ns == 500
    assert figures.page_cache_share == 0
    assert figures.stack_share == pytest.approx(1 - 300 / 1000)
    assert figures.meta_call_share == pytest.approx(1 / 3)
    assert figures.meta_time_share == pytest.approx(100 / 1100)
    figures = measured(call=shaped("call", call), block=block([(100, 200)]))
    assert figures.page_cache_share == 0.5


def test_unmatched_events_are_counted_but_for_the_edges() -> None:
    pairs = [(at * 100, at * 100 + 50) for at in range(1, 200)]
    about = About(start_ns=0, end_ns=20_000)
    clean = measured(about, block=block([*pairs, (19_990, -1), (-1, 20)])).trust
    assert (clean.unmatched_share, clean.little_residual) == (0, 0)
    dirty = measured(about, block=block([*pairs, *[(at, -1) for at in range(5000, 5100)]])).trust
    assert dirty.unmatched_share == pytest.approx(100 / 299)
    assert dirty.little_residual == pytest.approx(100 / 299, rel=0.02)


def test_health_of_the_recording() -> None:
    about = About(health=Health(num_lost=10, num_malformed=30))
    trust = measured(about, block=block([(at, at + 5) for at in range(90)])).trust
    assert (trust.num_events, trust.lost_share, trust.malformed_share) == (90, 0.1, 0.25)


def test_caps_capacity_and_endurance_of_the_busiest_device() -> None:
    about = About(
        end_ns=10 * SECOND,
        devices={
            "1": Device(read_ahead_bytes=4096),
            "2": Device("nvme0n1", read_ahead_bytes=131072, max_sectors_bytes=65536, capacity_bytes=MIB),
        },
    )
    frame = block([(0, 5), (1, 6)], device=[1, 2], length=[4096, 8192], flags=events.WRITE)
    figures = measured(about, block=frame)
    assert (figures.device, figures.cap_bytes) == ("2", 65536)
    assert figures.write_bytes_per_day == pytest.approx(12288 * 8640)
    assert figures.drive_writes_per_day == pytest.approx(12288 * 8640 / MIB)


def test_share_of_the_roof() -> None:
    roof = Roof(latency_ns=100_000, channel_bytes_per_s=1e12, iops_max=1e6, bytes_per_s_max=1e10)
    frame = block([(at * 200_000, at * 200_000 + 200_000) for at in range(1000)])
    figures = measured(roofline=Roofline(roof, roof), block=frame)
    assert figures.whole.read.roof_share == pytest.approx(0.5, rel=0.01), "each op takes twice what the model says"
    assert figures.whole.write.roof_share is None


def test_bursts() -> None:
    steady = block([(at * 1000, at * 1000 + 10) for at in range(10_000)], flags=events.WRITE)
    side = measured(block=steady).whole.write
    assert side.burstiness == pytest.approx(0, abs=0.05)
    assert side.active_share == 1
    times = [burst * 1_000_000 + at * 10 for burst in range(10) for at in range(1000)]
    side = measured(
        About(end_ns=10_000_000), block=block([(at, at + 5) for at in times], flags=events.WRITE)
    ).whole.write
    assert side.burstiness is not None
    assert side.burstiness > 3
    assert side.num_bursts == 10
    assert side.active_share == pytest.approx(0.05, abs=0.02)


def test_samples_of_iostat_obey_little_or_not() -> None:
    def rows(depth: float) -> pl.DataFrame:
        values = {"r/s": 1000.0, "r_await": 2.0, "w/s": 500.0, "w_await": 4.0, "aqu-sz": depth, "rkB/s": 128_000.0}
        return shaped("sample", pl.DataFrame([
            {"time_ns": at, "source": "iostat", "subject": "nvme0n1", "name": name, "value": value}
            for at in range(0, 5 * SECOND, SECOND) for name, value in values.items()
        ]))  # fmt: skip

    good = measured(sample=rows(4.0))
    assert good.level == "sample"
    assert good.trust.little_residual == 0
    assert (good.whole.depth, good.whole.read.depth) == (pytest.approx(4), pytest.approx(2))
    assert good.whole.read.ops_per_s == 1000
    assert good.whole.read.sizes.median_bytes == 128 * KIB
    assert good.whole.read.device.mean_ns == pytest.approx(2e6)
    assert good.series["iostat/nvme0n1/r_await"] == 2
    assert measured(sample=rows(0.0)).trust.little_residual == 1


def test_a_window_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with TraceWriter(path) as writer:
        writer.add("block", block([(at * 100, at * 100 + 50) for at in range(100)]))
        writer.finish(About(start_ns=0, end_ns=10_000))
    whole, part = measure(TraceFile(path)), measure(TraceFile(path), start_ns=2000, end_ns=5000)
    assert (whole.whole.read.num_ops, part.whole.read.num_ops, part.whole.window_ns) == (100, 30, 3000)
    assert part.whole.depth == whole.whole.depth == 0.5
    assert part.timeline.start_ns == 2000


def test_the_published_study_from_its_geometry() -> None:
    """CHEOPS 2025, OPT-6.7B through FlexGen: 2.09 GiB/s of reads in decode, 11.03 MiB/s of writes, a ratio of 67.

    KV of a token: 2 x 32 layers x 4096 x 2 B = 512 KiB. 64 sequences, 256 prompt tokens, 256 decode steps; the run log
    gives 21.923 s of prefill and 1463.125 s of decode. One in 64 commands is made; their size is the cap of 128 KiB.
    """
    scale, token, sequences = 64, 512 * KIB, 64
    prefill_ns, decode_ns = 21_923_000_000, 1_463_125_000_000
    cap = 128 * KIB
    steps = np.arange(1, 256)  # the first token comes from the prefill
    reads = (sequences * (256 + steps) * token / scale / cap).round().astype(np.int64)
    at = prefill_ns + (steps - 1) * decode_ns // len(steps)
    read_at = np.repeat(at, reads)
    writes_decode = int(sequences * 256 * token / scale / cap)
    writes_prefill = int(sequences * 256 * token / scale / cap)
    write_at = np.concatenate([
        np.linspace(0, prefill_ns - 1, writes_prefill),
        np.linspace(prefill_ns, prefill_ns + decode_ns - 1, writes_decode),
    ])  # fmt: skip
    times = np.concatenate([read_at, write_at.astype(np.int64)])
    is_read = np.arange(len(times)) < len(read_at)
    frame = pl.DataFrame({
        "time_ns": times,
        "device": [DEVICE] * len(times),
        "length": [cap] * len(times),
        "flags": np.where(is_read, events.READ | events.READAHEAD, events.WRITE).astype(np.int32),
    })  # fmt: skip
    wanted = kv_objects([
        {"time_ns": 0, "cause": "prefill-write", "step": 0, "step_tokens": 256},
        {"time_ns": prefill_ns, "cause": "decode-read", "step": 1, "step_tokens": 1},
    ])  # fmt: skip
    about = About(end_ns=prefill_ns + decode_ns, devices={str(DEVICE): Device(max_sectors_bytes=cap)})
    figures = measured(about, object=wanted, block=shaped("block", frame.sort("time_ns")))
    decode, prefill = figures.phases["decode"], figures.phases["prefill"]
    assert decode.read.bytes_per_s * scale / GIB == pytest.approx(2.09, abs=0.01)
    assert figures.whole.read.bytes_per_s * scale / GIB == pytest.approx(2.06, abs=0.01)
    assert figures.whole.write.bytes_per_s * scale / MIB == pytest.approx(11.03, abs=0.05)
    assert prefill.write.bytes_per_s * scale / MIB == pytest.approx(373.7, rel=0.01)
    assert prefill.write.bytes_per_s / decode.write.bytes_per_s == pytest.approx(67, rel=0.01)
    assert figures.whole.read.sizes.mode_bytes == figures.cap_bytes == cap
    assert not figures.trust.has_completions
    verdict = judge(figures, about=about)
    assert (verdict.name, verdict.is_certain) == ("cannot-say", False)
    assert "no completions" in verdict.reason
    said = " ".join(evidence.value for evidence in verdict.evidence)
    assert "128 KiB" in said
    assert "cap" in said


# Spans as (gap to the one before, duration), sizes and directions.
SPANS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**7), st.sampled_from([512, 4096, 131072]), st.booleans()),
    min_size=2,
    max_size=60,
)


def _of_spans(spans: list[tuple[int, int, int, bool]]) -> pl.DataFrame:
    start = np.cumsum([gap for gap, *_ in spans])
    rows = [(int(at), int(at) + took) for at, (_, took, *_) in zip(start, spans, strict=True)]
    ways = [events.WRITE if is_write else events.READ for *_, is_write in spans]
    return block(rows, length=[size for _, _, size, _ in spans], flags=ways, offset=[int(at) * 512 for at in start])


@given(SPANS, st.lists(st.integers(1, 59), max_size=4))
@settings(max_examples=60, deadline=None)
def test_figures_do_not_depend_on_how_a_trace_is_cut(spans: list[tuple[int, int, int, bool]], cuts: list[int]) -> None:
    frame = _of_spans(spans)
    edges = [0, *sorted({cut for cut in cuts if cut < len(frame)}), len(frame)]
    meter = Meter(About())
    for start, end in itertools.pairwise(edges):
        meter.add("block", frame[start:end])
    cut, whole = meter.result(), measured(block=frame)
    for side, other in ((cut.whole.read, whole.whole.read), (cut.whole.write, whole.whole.write)):
        assert (side.num_ops, side.num_bytes, side.device, side.sequential_share) == (
            other.num_ops, other.num_bytes, other.device, other.sequential_share,
        )  # fmt: skip
        assert side.sizes.counts.tolist() == other.sizes.counts.tolist()
    assert (cut.whole.depth, cut.whole.busy_share) == (whole.whole.depth, whole.whole.busy_share)
    assert cut.whole.submit_gap_ratio == whole.whole.submit_gap_ratio


@given(SPANS)
@settings(max_examples=60, deadline=None)
def test_busy_time_is_the_union_and_bins_hold_all_device_time(spans: list[tuple[int, int, int, bool]]) -> None:
    frame = _of_spans(spans)
    figures = measured(block=frame)
    start, end = frame["time_ns"].to_numpy(), frame["complete_ns"].to_numpy()
    edges = np.unique(np.concatenate([start, end]))
    covered = sum(int(until - at) for at, until in itertools.pairwise(edges) if ((start <= at) & (end >= until)).any())
    window = figures.whole.window_ns
    assert (figures.whole.busy_share or 0.0) * window == pytest.approx(covered, abs=1e-3)
    line = figures.timeline
    assert line.depth.sum() * line.bin_ns == pytest.approx((end - start).sum(), rel=1e-6, abs=1e-3 * NUM_BINS)
    assert line.read_bytes.sum() + line.write_bytes.sum() == frame["length"].sum()


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=300))
def test_percentiles_are_within_two_percent(values: list[int]) -> None:
    took = np.array(values)
    told = latency_of(
        np.bincount(bucket_of(took), minlength=NUM_BUCKETS), total_ns=float(took.sum()),
        least_ns=int(took.min()), most_ns=int(took.max()),
    )  # fmt: skip
    ordered = np.sort(took)
    for share, value in ((0.5, told.p50_ns), (0.9, told.p90_ns), (0.99, told.p99_ns), (0.999, told.p999_ns)):
        exact = ordered[max(0, int(np.ceil(share * len(took))) - 1)]
        assert value == pytest.approx(exact, rel=0.02, abs=1.1)
    assert (told.num, told.max_ns) == (len(took), took.max())


@given(st.integers(1, 1 << 62))
def test_the_middle_of_a_bucket_is_near_all_that_is_in_it(value: int) -> None:
    middle = bucket_middle(bucket_of(np.array([value])))[0]
    assert abs(middle - value) <= value / 64 + 1e-6 * value


@given(st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=50))
def test_bins_grow_both_ways_and_lose_nothing(times: list[int]) -> None:
    axis = TimeBins()
    rows = axis.rows(1)
    for at in times:
        axis.cover(at, at)
        rows.add(np.array([at]), is_timed=True)
    assert rows.sums.sum() == len(times)
    assert rows.integral(0).sum() == pytest.approx(sum(axis.end_ns - at for at in times))
