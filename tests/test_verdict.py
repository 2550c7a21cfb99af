"""What may not be judged is not judged, every verdict is documented, and rules are asked in the documented order."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.roofline import Roof, Roofline
from kvtide.trace.events import shaped
from kvtide.trace.figures import Indicators, Kv, Latency, Side, Sizes, Slice, Trust
from kvtide.trace.file import About, Device
from kvtide.trace.indicators import Meter
from kvtide.trace.thresholds import LITTLE_MAX, LOST_MAX, TABLE, UNMATCHED_MAX
from kvtide.trace.verdict import RULES, VERDICTS, judge

DOCUMENT = Path(__file__).parent.parent / "docs" / "indicators.md"
ROOF = Roof(latency_ns=80_000, channel_bytes_per_s=6e9, iops_max=500_000, bytes_per_s_max=6e9)
ROOFLINE = Roofline(ROOF, ROOF)
KIB = 1024


def figures(
    *, size: int = 4 * KIB, depth: float = 1.0, busy: float = 1.0, latency_ns: float = 80_680, way: str = "read"
) -> Indicators:
    """Return figures of ops of one size at one depth: rates follow from Little's law."""
    ops = depth / latency_ns * 1e9 * busy
    side = Side(
        num_ops=100_000,
        num_bytes=100_000 * size,
        bytes_per_s=ops * size,
        ops_per_s=ops,
        sizes=Sizes(median_bytes=size, median_by_bytes=size, mode_bytes=size, mode_share=1.0, mean_bytes=size),
        device=Latency(100_000, *[latency_ns] * 6),
        depth=depth * busy,
    )
    whole = Slice(window_ns=10**10, depth=depth * busy, depth_busy=depth, busy_share=busy, span_share=1.0)
    setattr(whole, way, side)
    return Indicators(whole=whole, num_rows={"block": 100_000}, trust=Trust(num_events=100_000))


def test_the_plain_case_is_judged() -> None:
    assert judge(figures(), roofline=ROOFLINE).name == "depth-starved"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"lost_share": LOST_MAX.value * 1.1}, "lost"),
        ({"malformed_share": 0.02}, "could not be read"),
        ({"unmatched_share": UNMATCHED_MAX.value * 1.1}, "lack their"),
        ({"little_residual": LITTLE_MAX.value * 1.1}, "Little"),
        ({"has_completions": False}, "no completions"),
        ({"num_events": 99}, "only 99 events"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_figures_that_cannot_be_believed(change: dict[str, float], word: str) -> None:
    made = figures()
    made.trust = dataclasses.replace(made.trust, **change)
    verdict = judge(made, roofline=ROOFLINE)
    assert (verdict.name, verdict.is_certain, verdict.remedies) == ("cannot-say", False, [])
    assert word in verdict.reason
    assert verdict.reason in verdict.sentence
    assert any("what can be said" in evidence.name for evidence in verdict.evidence)


@pytest.mark.parametrize("name", ["lost_share", "malformed_share", "unmatched_share", "little_residual"])
def test_a_little_loss_is_forgiven(name: str) -> None:
    made = figures()
    made.trust = dataclasses.replace(made.trust, **{name: 0.0009})
    assert judge(made, roofline=ROOFLINE).name == "depth-starved"


def test_an_empty_trace() -> None:
    assert "no events" in judge(Meter(About()).result()).reason


def sampled(**values: float) -> Indicators:
    import polars as pl

    meter = Meter(About())
    rows = [
        {"time_ns": at, "source": "mlperf", "subject": "", "name": name, "value": value}
        for at in range(20)
        for name, value in values.items()
    ]
    meter.add("sample", shaped("sample", pl.DataFrame(rows)))
    return meter.result()


def test_shifted_columns_are_found_by_littles_law() -> None:
    """The first row of MLPerf Storage's published summary of the KV cache benchmark, columns as published."""
    made = sampled(
        r_s=50532.4, rMB_s=6312.8, r_await=1.167, w_s=7270.3, wMB_s=903.9, w_await=17.23, aqu_sz=0.0, util=264.9
    )
    verdict = judge(made)
    assert verdict.name == "cannot-say"
    assert "inconsistent by Little's law" in verdict.reason
    assert made.trust.num_impossible == 20
    assert any("cannot be" in evidence.name for evidence in verdict.evidence)


def test_samples_that_fit_are_judged() -> None:
    verdict = judge(sampled(r_s=1000.0, rMB_s=3.90625, r_await=1.0, aqu_sz=1.0, util=100.0), roofline=ROOFLINE)
    assert verdict.name == "depth-starved"
    assert "impossible" not in verdict.reason
    busy = sampled(r_s=1000.0, rMB_s=3.90625, r_await=1.0, aqu_sz=1.0, util=264.0)
    assert judge(busy, roofline=ROOFLINE).name == "cannot-say"


def test_samples_of_something_else_say_nothing_of_a_disk() -> None:
    assert "only samples" in judge(sampled(busy=0.5)).reason


def test_the_order_of_rules_where_several_apply() -> None:
    made = figures()
    made.kv = Kv(num_steps=10, stall_share=0.01)
    assert judge(made, roofline=ROOFLINE).name == "healthy", "nobody waits, so a shallow queue harms nobody"
    made.kv = Kv(num_steps=10, stall_share=0.9, file_bytes=1, load_ns=5 * 10**9, recompute_ns=10**9)
    assert judge(made, roofline=ROOFLINE).name == "recompute-is-cheaper"
    made.call_bytes, made.block_bytes = 10**9, 10**6
    assert judge(made, roofline=ROOFLINE).name == "page-cache"
    made.trust.lost_share = 0.5
    assert judge(made, roofline=ROOFLINE).name == "cannot-say"


def test_a_roofline_that_is_far_off_is_told() -> None:
    verdict = judge(figures(size=1 << 20, depth=1.2, latency_ns=5e6), roofline=ROOFLINE)
    assert verdict.name == "cannot-say"
    assert "probe again" in verdict.reason


def test_without_a_probe_the_user_is_told_what_to_type() -> None:
    for made in (figures(), figures(size=40 * KIB, depth=6)):
        verdict = judge(made)
        assert not verdict.is_certain
        assert "kvtide probe PATH" in verdict.sentence
    assert judge(figures(size=40 * KIB, depth=6)).name == "cannot-say"


def test_the_cap_is_no_reason_to_call_ops_small() -> None:
    small = figures(size=8 * KIB, depth=8, latency_ns=81_365)
    small.device = "1"
    assert judge(small, roofline=ROOFLINE).name == "size-bound"
    about = About(devices={"1": Device(read_ahead_bytes=8 * KIB)})
    capped = judge(small, roofline=ROOFLINE, about=about)
    assert capped.name != "size-bound"
    assert any("not" not in item.value and "cap" in item.value for item in capped.evidence)
    writes = figures(size=8 * KIB, depth=8, latency_ns=81_365, way="write")
    writes.device = "1"
    assert judge(writes, roofline=ROOFLINE, about=about).name == "size-bound", "read-ahead makes no writes"


def test_a_busy_cpu_below_the_roofs_is_the_host() -> None:
    made = figures(size=64 * KIB, depth=2.5, busy=0.6)
    made.host_cpu_share = 0.98
    assert judge(made, roofline=ROOFLINE).name == "host-bound"
    slow = dataclasses.replace(ROOF, host_ns=20_000.0)
    made = figures(size=4 * KIB, depth=16, latency_ns=320_000, busy=0.4)
    assert judge(made, roofline=Roofline(slow, slow)).name == "host-bound"


def test_the_tail_is_shown() -> None:
    made = figures()
    made.whole.read.device.p99_ns = 20 * made.whole.read.device.p50_ns
    assert any("p99 over p50" in evidence.name for evidence in judge(made, roofline=ROOFLINE).evidence)


def test_every_verdict_and_threshold_is_documented() -> None:
    text = DOCUMENT.read_text()
    for name in VERDICTS:
        assert f"`{name}`" in text, name
    assert all(limit.source and limit.meaning and limit.text for limit in TABLE.values())
    assert len(TABLE) > 30


@given(
    size=st.integers(1, 1 << 24),
    depth=st.floats(0.001, 1000),
    busy=st.floats(0.001, 1),
    latency_ns=st.floats(1, 1e10),
    way=st.sampled_from(["read", "write"]),
    is_probed=st.booleans(),
    stall=st.none() | st.floats(0, 1),
    stack=st.none() | st.floats(0, 1),
)
@settings(max_examples=300, deadline=None)
def test_there_is_always_one_verdict_with_evidence(
    size: int, depth: float, busy: float, latency_ns: float, way: str, is_probed: bool, stall: float | None,
    stack: float | None,
) -> None:  # fmt: skip
    made = figures(size=size, depth=depth, busy=busy, latency_ns=latency_ns, way=way)
    made.kv = None if stall is None else Kv(num_steps=5, stall_share=stall)
    made.stack_share = stack
    verdict = judge(made, roofline=ROOFLINE if is_probed else None)
    assert verdict.name in VERDICTS
    assert verdict.evidence
    assert verdict.is_certain or verdict.reason
    assert all(remedy.factor is None or remedy.factor > 0 for remedy in verdict.remedies)


def test_rules_are_asked_in_the_documented_order() -> None:
    names = [rule.__name__.replace("_", "-") for rule in RULES]
    order = ["distrust-figures", "page-cache", "distrust-pairs", "recompute-is-cheaper"]
    assert names[:4] == order
    text = DOCUMENT.read_text()
    at = [text.index(f"### `{name}`") for name in names if name in VERDICTS]
    assert at == sorted(at), "the document lists verdicts in the order in which they are asked"


def test_a_deep_queue_of_large_ops_is_at_the_roof_though_the_probe_says_more() -> None:
    made = figures(size=1024 * KIB, depth=16.0, latency_ns=16 * 1024 * KIB / (0.6 * ROOF.bytes_per_s_max) * 1e9)
    assert judge(made, roofline=ROOFLINE).name == "bandwidth-bound"
    slower = figures(size=1024 * KIB, depth=16.0, latency_ns=16 * 1024 * KIB / (0.3 * ROOF.bytes_per_s_max) * 1e9)
    assert judge(slower, roofline=ROOFLINE).name == "cannot-say"
