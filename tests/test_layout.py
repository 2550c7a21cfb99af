"""Where KV lies: the geometry of a rank, the slot, and the runs each access needs."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.spec import (
    PAGE_BYTES,
    PRESET_NAMES,
    SPLITS,
    Access,
    Dtype,
    KVShape,
    LayerShape,
    Layout,
    ModelSpec,
    Piece,
    SlotLayout,
    auto_group_blocks,
    fragments,
    preset,
    why_not_split,
)

LLAMA = KVShape.of(preset("llama-3-8b"), "bf16")
DEEPSEEK = KVShape.of(preset("deepseek-v3"), Dtype.BF16)
SHAPES = st.lists(
    st.builds(LayerShape, k_bytes=st.integers(1, 9000), v_bytes=st.integers(0, 9000), num_heads=st.just(1)),
    min_size=1,
    max_size=9,
).map(lambda layers: KVShape(Dtype.INT8, tuple(layers), tuple(range(len(layers)))))
HEADED = st.builds(
    lambda heads, dims: KVShape(
        Dtype.INT8, tuple(LayerShape(heads * k, heads * v, heads) for k, v in dims), tuple(range(len(dims)))
    ),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 600), st.integers(1, 600)), min_size=1, max_size=4),
)


def test_the_worked_case():
    shape = KVShape.of(preset("llama-3-70b"), "fp16")
    assert shape.bytes_per_token == 327_680
    assert shape.bytes_per_token * 4096 == 1_342_177_280
    assert shape.bytes_per_token * 32_000 * 32 == 335_544_320_000


def test_heads_divide_among_ranks_or_are_copied():
    model = preset("llama-3-70b")
    of_tp = {tp: KVShape.of(model, "bf16", tp, tp - 1).bytes_per_token for tp in (1, 2, 4, 8, 16, 64)}
    assert of_tp == {1: 327680, 2: 163840, 4: 81920, 8: 40960, 16: 40960, 64: 40960}
    assert KVShape.of(preset("deepseek-v3"), "bf16", 8).bytes_per_token == 70272


@pytest.mark.parametrize(
    ("name", "tp_size", "tp_rank"),
    [("llama-3-70b", 3, 0), ("smollm2-135m", 2, 0), ("qwen2.5-7b", 7, 0), ("llama-3-8b", 0, 0), ("llama-3-8b", 2, 2),
     ("llama-3-8b", 2, -1), ("llama-3-8b", True, 0), ("llama-3-8b", 1 << 20, 0)],
)  # fmt: skip
def test_ranks_that_cannot_be_are_refused(name, tp_size, tp_rank):
    with pytest.raises(ConfigError):
        KVShape.of(preset(name), "bf16", tp_size, tp_rank)


def test_layers_without_kv_have_no_entry():
    config = {
        "model_type": "jamba", "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 2048,
    }  # fmt: skip
    shape = KVShape.of(ModelSpec.from_config(config), "fp32")
    assert shape.layer_index == (4,)
    assert shape.layers == (LayerShape(256, 256, 2),)
    with pytest.raises(ConfigError, match="no layer keeps"):
        KVShape.of(ModelSpec.from_config(config | {"model_type": "mamba"}), "fp32")


def test_slot_of_llama():
    slot = SlotLayout(LLAMA, 16, 4)
    assert slot.tokens_per_group == 64
    assert slot.header_bytes == 4096
    assert slot.fragment_offset[:2] == (4096, 4096 + 262144)
    assert set(slot.fragment_bytes) == set(slot.fragment_padded_bytes) == {262144}
    assert set(slot.k_bytes) == {131072}
    assert slot.slot_bytes == 4096 + 32 * 262144


def test_slot_of_deepseek_pads_to_pages():
    slot = SlotLayout(DEEPSEEK, 16, 1)
    assert slot.fragment_bytes[0] == slot.k_bytes[0] == 18432
    assert slot.fragment_padded_bytes[0] == 20480
    assert slot.slot_bytes == 4096 + 61 * 20480


def test_slots_of_smollm2_by_split():
    shape = KVShape.of(preset("smollm2-135m"), "fp16")  # 30 layers, 3 KV heads of 64
    none, apart, heads = (SlotLayout(shape, 16, 1, split) for split in SPLITS)
    assert [slot.parts_per_layer for slot in (none, apart, heads)] == [1, 2, 3]
    assert [slot.num_fragments for slot in (none, apart, heads)] == [30, 60, 90]
    assert {slot.num_layers for slot in (none, apart, heads)} == {30}
    assert set(none.fragment_bytes) == set(none.fragment_padded_bytes) == {12288}
    assert set(apart.fragment_bytes) == {6144}
    assert set(apart.fragment_padded_bytes) == {8192}
    assert set(heads.fragment_bytes) == set(heads.fragment_padded_bytes) == {4096}
    assert [slot.layer_padded_bytes(7) for slot in (none, apart, heads)] == [12288, 16384, 12288]
    assert apart.fragment_offset[:3] == (4096, 4096 + 8192, 4096 + 16384)
    assert heads.fragment_offset[:4] == (4096, 8192, 12288, 16384)
    assert [list(slot.layer_fragments(2)) for slot in (none, apart, heads)] == [[2], [4, 5], [6, 7, 8]]
    assert {slot.k_bytes for slot in (none, apart, heads)} == {(6144,) * 30}
    assert none.pieces[5] == (Piece(0, 0, 384, 0, is_value=False), Piece(0, 6144, 384, 0, is_value=True))
    assert apart.pieces[5] == (Piece(0, 0, 384, 0, is_value=False), Piece(1, 0, 384, 0, is_value=True))
    assert heads.pieces[5] == (
        Piece(0, 0, 128, 0, is_value=False), Piece(0, 2048, 128, 0, is_value=True),
        Piece(1, 0, 128, 128, is_value=False), Piece(1, 2048, 128, 128, is_value=True),
        Piece(2, 0, 128, 256, is_value=False), Piece(2, 2048, 128, 256, is_value=True),
    )  # fmt: skip


def test_the_header_has_room_for_a_checksum_of_every_fragment():
    shape = KVShape.of(preset("opt-30b"), "fp16")  # 48 layers of 56 heads
    assert [SlotLayout(shape, 16, 1, split).header_bytes for split in SPLITS] == [4096, 4096, 24576]


def test_layers_that_cannot_be_split_are_refused():
    uneven = KVShape(Dtype.INT8, (LayerShape(8, 8, 2), LayerShape(12, 12, 3)), (0, 1))
    odd = KVShape(Dtype.INT8, (LayerShape(9, 8, 2),), (0,))
    for shape, split, says in (
        (DEEPSEEK, "kv", "MLA"),
        (DEEPSEEK, "head", "MLA"),
        (uneven, "head", r"\[2, 3\]"),
        (odd, "head", "evenly"),
        (LLAMA, "layer", "none, kv, head"),
        (LLAMA, ["kv"], "none, kv, head"),
    ):
        with pytest.raises(ConfigError, match=says):
            SlotLayout(shape, 16, 4, split)
    assert SlotLayout(uneven, 16, 4, "kv").num_fragments == SlotLayout(odd, 16, 4, "kv").num_fragments * 2 == 4


@given(
    shape=SHAPES | HEADED,
    block_tokens=st.integers(1, 64),
    group_blocks=st.integers(1, 64),
    split=st.sampled_from(SPLITS),
)
def test_slots_are_sound(shape, block_tokens, group_blocks, split):
    if why_not_split(shape, split):
        with pytest.raises(ConfigError):
            SlotLayout(shape, block_tokens, group_blocks, split)
        return
    slot = SlotLayout(shape, block_tokens, group_blocks, split)
    assert slot.header_bytes % PAGE_BYTES == 0
    assert slot.header_bytes >= 256 + 36 * group_blocks + 8 * slot.num_fragments
    end = slot.header_bytes
    for index in range(slot.num_fragments):
        assert slot.fragment_offset[index] == end
        assert end % PAGE_BYTES == 0
        assert 0 <= slot.fragment_padded_bytes[index] - slot.fragment_bytes[index] < PAGE_BYTES
        end += slot.fragment_padded_bytes[index]
    assert slot.slot_bytes == end
    for index, layer in enumerate(shape.layers):
        parts = slot.layer_fragments(index)
        assert len(parts) == slot.parts_per_layer
        assert slot.k_bytes[index] == slot.tokens_per_group * layer.k_bytes
        assert sum(slot.fragment_bytes[part] for part in parts) == slot.tokens_per_group * layer.token_bytes
        assert slot.layer_padded_bytes(index) == sum(slot.fragment_padded_bytes[part] for part in parts)
        for part, number in enumerate(parts):
            held = [
                (one.start, slot.tokens_per_group * one.row_bytes) for one in slot.pieces[index] if one.part == part
            ]
            assert tiled(held) == slot.fragment_bytes[number]
        for is_value, size in ((False, layer.k_bytes), (True, layer.v_bytes)):
            assert (
                tiled([(one.column, one.row_bytes) for one in slot.pieces[index] if one.is_value == is_value]) == size
            )


def tiled(extents: list[tuple[int, int]]) -> int:
    """Where `extents` (start, length) end, which begin at 0 and follow each other without gap."""
    end = 0
    for start, length in sorted(extents):
        assert start == end
        assert length > 0
        end += length
    return end


@pytest.mark.parametrize(
    ("block_tokens", "group_blocks"), [(0, 1), (16, 0), (16, 65), (-1, 1), (True, 1), (1 << 20, 1)]
)
def test_slots_that_cannot_be_are_refused(block_tokens, group_blocks):
    with pytest.raises(ConfigError):
        SlotLayout(LLAMA, block_tokens, group_blocks)


@pytest.mark.parametrize(
    ("name", "knee_bytes", "expected"),
    [("llama-3-8b", 4096, 1), ("llama-3-8b", 65536, 1), ("llama-3-8b", 65537, 2), ("llama-3-8b", 1 << 20, 16),
     ("smollm2-135m", 131072, 16), ("smollm2-135m", 1 << 30, 64)],
)  # fmt: skip
def test_groups_grow_to_the_knee(name, knee_bytes, expected):
    assert auto_group_blocks(KVShape.of(preset(name), "bf16"), 16, knee_bytes) == expected


# Llama-3-8B in bf16, 4,096 tokens, blocks of 16, groups of 4, k = 10: (run, runs, moved) by hand.
LLAMA_RUNS = {
    (Layout.BLOCK_FIRST, Access.WRITE_PREFIX): (2 << 20, 256, 512 << 20),
    (Layout.BLOCK_FIRST, Access.READ_PREFIX): (2 << 20, 256, 512 << 20),
    (Layout.BLOCK_FIRST, Access.READ_LAYER): (64 << 10, 256, 16 << 20),
    (Layout.BLOCK_FIRST, Access.READ_BLOCKS): (64 << 10, 10, 640 << 10),
    (Layout.BLOCK_FIRST, Access.READ_VALUES): (32 << 10, 10, 320 << 10),
    (Layout.BLOCK_FIRST, Access.READ_HEAD_TOKENS): (256, 20, 20 * 4096),
    (Layout.LAYER_MAJOR, Access.WRITE_PREFIX): (8 << 20, 64, (512 << 20) + 64 * 4096),
    (Layout.LAYER_MAJOR, Access.READ_PREFIX): (8 << 20, 64, 512 << 20),
    (Layout.LAYER_MAJOR, Access.READ_LAYER): (256 << 10, 64, 16 << 20),
    (Layout.LAYER_MAJOR, Access.READ_BLOCKS): (32 << 10, 20, 640 << 10),
    (Layout.LAYER_MAJOR, Access.READ_VALUES): (32 << 10, 10, 320 << 10),
    (Layout.LAYER_MAJOR, Access.READ_HEAD_TOKENS): (256, 20, 20 * 4096),
    (Layout.KV_APART, Access.WRITE_PREFIX): (8 << 20, 64, (512 << 20) + 64 * 4096),
    (Layout.KV_APART, Access.READ_PREFIX): (8 << 20, 64, 512 << 20),
    (Layout.KV_APART, Access.READ_LAYER): (256 << 10, 64, 16 << 20),
    (Layout.KV_APART, Access.READ_BLOCKS): (32 << 10, 20, 640 << 10),
    (Layout.KV_APART, Access.READ_VALUES): (32 << 10, 10, 320 << 10),
    (Layout.KV_APART, Access.READ_HEAD_TOKENS): (256, 20, 20 * 4096),
    (Layout.HEAD_MAJOR, Access.WRITE_PREFIX): (8 << 20, 64, (512 << 20) + 64 * 4096),
    (Layout.HEAD_MAJOR, Access.READ_PREFIX): (8 << 20, 64, 512 << 20),
    (Layout.HEAD_MAJOR, Access.READ_LAYER): (256 << 10, 64, 16 << 20),
    (Layout.HEAD_MAJOR, Access.READ_BLOCKS): (4 << 10, 160, 640 << 10),
    (Layout.HEAD_MAJOR, Access.READ_VALUES): (4 << 10, 80, 320 << 10),
    (Layout.HEAD_MAJOR, Access.READ_HEAD_TOKENS): (256, 20, 20 * 4096),
    (Layout.TOKEN_FIRST, Access.WRITE_PREFIX): (512 << 20, 1, 512 << 20),
    (Layout.TOKEN_FIRST, Access.READ_PREFIX): (512 << 20, 1, 512 << 20),
    (Layout.TOKEN_FIRST, Access.READ_LAYER): (4 << 10, 4096, 16 << 20),
    (Layout.TOKEN_FIRST, Access.READ_BLOCKS): (4 << 10, 160, 640 << 10),
    (Layout.TOKEN_FIRST, Access.READ_VALUES): (2 << 10, 160, 320 << 10),
    (Layout.TOKEN_FIRST, Access.READ_HEAD_TOKENS): (256, 20, 5120),
    (Layout.LAYER_FIRST, Access.WRITE_PREFIX): (32 << 10, 16384, 512 << 20),
    (Layout.LAYER_FIRST, Access.READ_PREFIX): (32 << 10, 16384, 512 << 20),
    (Layout.LAYER_FIRST, Access.READ_LAYER): (32 << 10, 512, 16 << 20),
    (Layout.LAYER_FIRST, Access.READ_BLOCKS): (32 << 10, 20, 640 << 10),
    (Layout.LAYER_FIRST, Access.READ_VALUES): (32 << 10, 10, 320 << 10),
    (Layout.LAYER_FIRST, Access.READ_HEAD_TOKENS): (256, 20, 5120),
    # One of 8 heads: 10 blocks of 16 tokens, or 4,096 tokens; a row of K or V has 256 bytes.
    (Layout.BLOCK_FIRST, Access.READ_HEAD_BLOCKS): (8 << 10, 10, 640 << 10),
    (Layout.BLOCK_FIRST, Access.READ_HEAD): (8 << 10, 256, 16 << 20),
    (Layout.LAYER_MAJOR, Access.READ_HEAD_BLOCKS): (4 << 10, 20, 640 << 10),
    (Layout.LAYER_MAJOR, Access.READ_HEAD): (32 << 10, 64, 16 << 20),
    (Layout.KV_APART, Access.READ_HEAD_BLOCKS): (4 << 10, 20, 640 << 10),
    (Layout.KV_APART, Access.READ_HEAD): (32 << 10, 64, 16 << 20),
    (Layout.HEAD_MAJOR, Access.READ_HEAD_BLOCKS): (4 << 10, 20, 80 << 10),
    (Layout.HEAD_MAJOR, Access.READ_HEAD): (32 << 10, 64, 2 << 20),
    (Layout.TOKEN_FIRST, Access.READ_HEAD_BLOCKS): (256, 320, 80 << 10),
    (Layout.TOKEN_FIRST, Access.READ_HEAD): (256, 8192, 2 << 20),
    (Layout.LAYER_FIRST, Access.READ_HEAD_BLOCKS): (256, 320, 80 << 10),
    (Layout.LAYER_FIRST, Access.READ_HEAD): (256, 8192, 2 << 20),
}


def test_all_runs_of_llama_are_pinned():
    assert set(LLAMA_RUNS) == {(layout, access) for layout in Layout for access in Access}


@pytest.mark.parametrize(("layout", "access"), LLAMA_RUNS, ids=lambda value: value.value)
def test_runs_of_llama(layout, access):
    found = fragments(LLAMA, layout, access, num_tokens=4096, block_tokens=16, group_blocks=4, k=10)
    assert (found.fragment_bytes, found.num_fragments, found.padded_bytes) == LLAMA_RUNS[layout, access]


def test_a_quarter_of_the_heads_makes_a_quarter_of_the_run():
    quarter = KVShape.of(preset("llama-3-70b"), "bf16", 4)
    found = fragments(quarter, Layout.LAYER_FIRST, Access.READ_LAYER, num_tokens=4096, block_tokens=16)
    assert found.fragment_bytes == 8192  # the published figure for tensor parallelism of 4


def test_mla_has_one_part_and_pays_for_pages():
    found = fragments(
        DEEPSEEK, Layout.LAYER_MAJOR, Access.READ_BLOCKS, num_tokens=64, block_tokens=16, group_blocks=4, k=2
    )
    assert (found.fragment_bytes, found.num_fragments, found.padded_bytes) == (18432, 2, 2 * 5 * 4096)
    assert found.amplification == pytest.approx(40960 / 36864)


def test_values_of_mla_are_its_rows():
    for layout in (Layout.BLOCK_FIRST, Layout.LAYER_MAJOR, Layout.TOKEN_FIRST, Layout.LAYER_FIRST):
        found = [
            fragments(DEEPSEEK, layout, access, num_tokens=64, block_tokens=16, group_blocks=4, k=2)
            for access in (Access.READ_BLOCKS, Access.READ_VALUES)
        ]
        assert found[0] == found[1]


def test_values_apart_begin_on_a_page():
    shape = KVShape.of(preset("smollm2-135m"), "fp16")
    asked = {"num_tokens": 64, "block_tokens": 8, "k": 2}  # K and V of a block: 3,072 bytes each
    behind = fragments(shape, Layout.BLOCK_FIRST, Access.READ_VALUES, **asked)
    apart = fragments(shape, Layout.KV_APART, Access.READ_VALUES, **asked)
    assert (behind.num_fragments, behind.wanted_bytes, behind.padded_bytes) == (2, 6144, 2 * 2 * 4096)
    assert (apart.num_fragments, apart.wanted_bytes, apart.padded_bytes) == (2, 6144, 2 * 4096)


def test_a_partial_tail_moves_whole_places():
    found = fragments(LLAMA, Layout.LAYER_MAJOR, Access.READ_LAYER, num_tokens=65, block_tokens=16, group_blocks=4)
    assert (found.num_fragments, found.wanted_bytes, found.padded_bytes) == (2, 65 * 4096, 2 * 262144)


@given(
    shape=SHAPES | HEADED,
    layout=st.sampled_from(Layout),
    access=st.sampled_from(Access),
    num_tokens=st.integers(1, 500),
    block_tokens=st.integers(1, 40),
    group_blocks=st.integers(1, 8),
)
def test_runs_are_sound(shape, layout, access, num_tokens, block_tokens, group_blocks):
    assume(not why_not_split(shape, layout.split))
    found = fragments(
        shape, layout, access, num_tokens=num_tokens, block_tokens=block_tokens, group_blocks=group_blocks
    )
    assert found.num_fragments >= 1
    assert 1 <= found.fragment_bytes <= found.wanted_bytes <= found.padded_bytes
    assert found.fragment_bytes * found.num_fragments >= found.wanted_bytes
    assert found.amplification >= 1
    if access in {Access.WRITE_PREFIX, Access.READ_PREFIX}:
        assert found.wanted_bytes == num_tokens * shape.bytes_per_token
    if layout.is_paged:
        assert found.padded_bytes % PAGE_BYTES == 0


@pytest.mark.parametrize(
    "change",
    [{"num_tokens": 0}, {"block_tokens": 0}, {"k": 0}, {"k": 7}, {"layer": 32}, {"layer": -1}, {"group_blocks": 0}],
)
def test_accesses_that_cannot_be_are_refused(change):
    asked = {"num_tokens": 96, "block_tokens": 16, "k": 6, "layer": 0, "group_blocks": 4} | change
    with pytest.raises(ConfigError):
        fragments(LLAMA, Layout.LAYER_MAJOR, Access.READ_BLOCKS, **asked)


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_every_preset_has_a_slot(name):
    shape = KVShape.of(preset(name), "bf16")
    slot = SlotLayout(shape, 16, auto_group_blocks(shape, 16, 128 << 10))
    assert slot.slot_bytes >= shape.bytes_per_token * slot.tokens_per_group
