"""Sizes and costs against numbers worked out by hand, and against a count pair by pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.sizing import _causal_pairs, size_report
from kvtide.spec import PRESET_NAMES, Access, Dtype, Layout, preset

LLAMA_70B = preset("llama-3-70b")


def test_a_prompt_of_4096_tokens():
    report = size_report(LLAMA_70B, num_tokens=4096)
    assert report.bytes_per_token == 327_680
    assert report.total_bytes == 1_342_177_280
    assert report.block_bytes == 5_242_880


def test_the_worked_case_is_335_gigabytes():
    report = size_report(LLAMA_70B, num_tokens=32_000, batch=32, dtype=Dtype.FP16)
    assert report.total_bytes == 335_544_320_000
    assert report.decode.kv_read_bytes == 335_544_320_000
    assert report.prefill.kv_written_bytes == 335_544_320_000


def test_the_published_offload_run():
    """OPT-6.7B in fp16 keeps 512 KiB a token; 64 sequences of 512 tokens read 16 GiB a step."""
    report = size_report(preset("opt-6.7b"), num_tokens=512, batch=64)
    assert report.bytes_per_token == 512 << 10
    assert report.decode.kv_read_bytes == 16 << 30


def test_work_of_llama_8b():
    report = size_report(preset("llama-3-8b"), num_tokens=1000)
    table = 128_256 * 4096
    multiplied = 8_030_261_248 - 2 * table
    pair = 2 * 32 * 256  # two FLOP, 32 heads, 128 for the key and 128 for the value
    assert report.prefill.weight_flop == 2 * (multiplied * 1000 + table)
    assert report.prefill.attention_flop == 32 * pair * 500_500
    assert report.decode.weight_flop == 2 * (multiplied + table)
    assert report.decode.attention_flop == 32 * pair * 1001
    assert report.decode.weight_bytes == 2 * (8_030_261_248 - table)
    assert report.decode.kv_read_bytes == 1000 * 131_072
    assert report.decode.kv_written_bytes == 131_072


def test_prefill_is_dense_in_arithmetic_and_decode_is_not():
    report = size_report(LLAMA_70B, num_tokens=4096)
    assert report.prefill.intensity > 1000
    assert 1 < report.decode.intensity < 2


def test_mla_decodes_on_the_compressed_row():
    report = size_report(preset("deepseek-v3"), num_tokens=100)
    assert report.prefill.attention_flop == 61 * 2 * 128 * (128 + 64 + 128) * 5050
    assert report.decode.attention_flop == 61 * 2 * 128 * (512 + 64 + 512) * 101
    assert report.bytes_per_token == 70_272


def test_more_tokens_touch_more_experts():
    model = preset("deepseek-v3")
    always = model.num_params - model.routed_params - model.lookup_params
    one, many = (size_report(model, num_tokens=1, batch=batch).decode.weight_bytes for batch in (1, 4096))
    assert one == always + round(model.routed_params * 8 / 256)
    assert many == model.num_params - model.lookup_params


def test_windows_bound_what_is_read_and_not_what_is_counted():
    report = size_report(preset("gemma-3-27b"), num_tokens=32_000)
    per_layer = 507_904 // 62
    assert report.total_bytes == 32_000 * 507_904
    assert report.windowed_bytes == per_layer * (52 * 1024 + 10 * 32_000) == report.decode.kv_read_bytes


@given(num_tokens=st.integers(1, 300), window=st.none() | st.integers(1, 400))
def test_pairs_are_counted(num_tokens, window):
    counted = sum(min(seen, window or seen) for seen in range(1, num_tokens + 1))
    assert _causal_pairs(num_tokens, window) == counted


@given(
    name=st.sampled_from(PRESET_NAMES),
    num_tokens=st.integers(1, 50_000),
    batch=st.integers(1, 100),
    block_tokens=st.sampled_from([1, 8, 16, 32, 100]),
)
def test_paging_wastes_less_than_a_block_a_sequence(name, num_tokens, batch, block_tokens):
    report = size_report(preset(name), num_tokens=num_tokens, batch=batch, block_tokens=block_tokens)
    assert 0 <= report.paged.wasted_bytes < batch * report.block_bytes
    assert report.paged.used_bytes == report.contiguous.used_bytes == report.total_bytes
    assert report.contiguous.reserved_tokens == max(report.model.max_positions, num_tokens)
    assert 0 < report.contiguous.utilisation <= 1
    assert report.contiguous.utilisation + report.contiguous.internal_fragmentation == pytest.approx(1)
    assert report.prefill.intensity > 0
    assert report.decode.intensity > 0


def test_the_contiguous_allocator_is_poorly_used():
    report = size_report(preset("llama-3.1-405b"), num_tokens=4096, batch=8)
    assert report.contiguous.utilisation == 4096 / 131_072
    assert report.paged.wasted_bytes == 0


def test_ranks_share_heads_and_keep_all_of_mla():
    shared = size_report(LLAMA_70B, num_tokens=4096, tp_size=8)
    assert shared.total_bytes * 8 == shared.total_bytes_all_ranks == 1_342_177_280
    copied = size_report(LLAMA_70B, num_tokens=4096, tp_size=16)
    assert copied.total_bytes_all_ranks == 2 * 1_342_177_280
    latent = size_report(preset("deepseek-v3"), num_tokens=1, tp_size=8)
    assert latent.total_bytes_all_ranks == 8 * 70_272


def test_every_layout_and_access_has_a_row():
    rows = size_report(LLAMA_70B, num_tokens=32_000).fragments
    assert [(row.layout, row.access) for row in rows] == [(layout, access) for layout in Layout for access in Access]
    one_percent = next(row for row in rows if (row.layout, row.access) == (Layout.LAYER_FIRST, Access.READ_BLOCKS))
    assert (one_percent.k, one_percent.found.fragment_bytes, one_percent.found.num_fragments) == (20, 32 << 10, 40)


def test_mla_has_no_rows_of_layouts_that_split_layers():
    rows = size_report(preset("deepseek-v3"), num_tokens=4096).fragments
    layouts = [layout for layout in Layout if layout not in {Layout.KV_APART, Layout.HEAD_MAJOR}]
    assert [(row.layout, row.access) for row in rows] == [(layout, access) for layout in layouts for access in Access]


@pytest.mark.parametrize(
    "change",
    [{"num_tokens": 0}, {"num_tokens": -5}, {"num_tokens": 1 << 40}, {"batch": 0}, {"batch": 1 << 30}, {"tp_size": 3},
     {"tp_size": 0}, {"block_tokens": 0}, {"block_tokens": True}, {"dtype": "fp7"}],
)  # fmt: skip
def test_what_cannot_be_is_refused(change):
    with pytest.raises(ConfigError):
        size_report(LLAMA_70B, **{"num_tokens": 100} | change)
