"""The fingerprint of stored KV: changes with everything it stands for, reads back, and trusts no file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import ConfigError, FormatError
from kvtide.spec import Dtype, Identity, KVShape, Layout, preset

MODEL = preset("gemma-3-27b")
IDENTITY = Identity.of(
    MODEL,
    KVShape.of(MODEL, "bf16", 4, 1),
    block_tokens=16,
    group_blocks=4,
    weights_digest="0" * 64,
    tokenizer_digest="a" * 64,
    revision="main",
)
CHANGES = {
    "model": "other",
    "weights_digest": "1" * 64,
    "tokenizer_digest": "b" * 64,
    "revision": "v2",
    "adapter": "lora",
    "rope": (("rope_theta", 10000.0),),
    "dtype": Dtype.FP16,
    "layout": Layout.BLOCK_FIRST,
    "block_tokens": 32,
    "group_blocks": 8,
    "tp_rank": 2,
    "tp_size": 8,
    "layers": IDENTITY.layers[:-1],
    "format_version": 2,
    "split": "kv",
    "facts": (("engine", "one 1.0"),),
    "encryption": "aes-256-gcm key 0123456789abcdef",
}


def test_digest_is_pinned():
    """Stores on disk are named by it: another digest for the same identity would lose them."""
    small = Identity(
        "m", "0" * 64, "0" * 64, "", "", (("rope_theta", 1e6), ("rope_scaling", (("factor", 8.0),))), Dtype.BF16,
        Layout.LAYER_MAJOR, 16, 4, 0, 1, ((0, 2, 2, 1, 0),), 1,
    )  # fmt: skip
    zeros = "0" * 64
    text = (
        '{"adapter":"","block_tokens":16,"dtype":"bf16","format_version":1,"group_blocks":4,"layers":[[0,2,2,1,0]],'
        '"layout":"layer_major","model":"m","revision":"","rope":{"rope_scaling":[["factor",8.0]],'
        f'"rope_theta":1000000.0}},"tokenizer_digest":"{zeros}","tp_rank":0,"tp_size":1,"weights_digest":"{zeros}"}}'
    )
    assert small.digest() == hashlib.sha256(text.encode()).digest()
    assert small.digest().hex() == "3713576f71bedde961c39affe3a69c55e5fc473bb84b005ccef311ec90e27a0f"


def test_every_field_changes_the_digest():
    assert set(CHANGES) == {field.name for field in fields(Identity)}
    digests = {IDENTITY.digest()} | {replace(IDENTITY, **{name: value}).digest() for name, value in CHANGES.items()}
    assert len(digests) == 1 + len(CHANGES)


def test_a_split_is_told_only_where_there_is_one():
    """Stores made before there were splits keep their names, and open."""
    assert "split" not in IDENTITY.describe()
    for split in ("kv", "head"):
        cut = replace(IDENTITY, split=split)
        assert cut.describe() == IDENTITY.describe() | {"split": split}
        found = Identity.from_json(json.dumps(cut.describe()))
        assert found == cut
        assert found.slot().parts_per_layer == {"kv": 2, "head": 4}[split]  # 16 heads among 4 ranks
    assert IDENTITY.slot().parts_per_layer == 1


@pytest.mark.parametrize("name", ["llama-3.1-405b", "deepseek-v3", "gemma-3-27b", "opt-30b"])
def test_it_reads_back_what_it_wrote(name):
    model = preset(name)
    shape = KVShape.of(model, "fp8_e4m3", 8, 3)
    written = Identity.of(
        model, shape, block_tokens=32, group_blocks=1, weights_digest="c" * 64, tokenizer_digest="d" * 64, adapter="x"
    )
    found = Identity.from_json(json.dumps(written.describe(), indent=1))
    assert found == written
    assert found.digest() == written.digest()
    assert found.shape() == shape


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", "3", b"\xff\xfe\x00", "[" * 100_000, "9" * 5000],
    ids=range(9),
)
def test_what_is_no_identity_is_a_format_error(text):
    with pytest.raises(FormatError, match=r"elsewhere\.json"):
        Identity.from_json(text, where="elsewhere.json")


BAD = [
    ("model", ""), ("model", 3), ("model", "x" * 300), ("weights_digest", "0"), ("weights_digest", "G" * 64),
    ("tokenizer_digest", None), ("rope", []), ("rope", {"a": float("nan")}), ("dtype", "fp7"), ("dtype", []),
    ("layout", "spiral"), ("block_tokens", 0), ("block_tokens", True), ("block_tokens", 1.5), ("group_blocks", 65),
    ("tp_size", 0), ("tp_rank", 4), ("layers", []), ("layers", [[1]]), ("layers", [1]), ("layers", "x"),
    ("layers", [[0, 0, 0, 1, 0]]), ("layers", [[1, 2, 2, 1, 0], [0, 2, 2, 1, 0]]), ("layers", [[0, "2", 2, 1, 0]]),
    ("format_version", 0), ("revision", ["a"]), ("split", "spiral"), ("split", None), ("split", ["kv"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_strange_fields_are_format_errors(name, value):
    with pytest.raises(FormatError):
        Identity.from_json(json.dumps(IDENTITY.describe() | {name: value}))


def test_missing_and_unknown_fields_are_named():
    text = IDENTITY.describe()
    del text["adapter"]
    with pytest.raises(FormatError, match="adapter"):
        Identity.from_json(json.dumps(text))
    with pytest.raises(FormatError, match="unknown"):
        Identity.from_json(json.dumps(IDENTITY.describe() | {"colour": 1}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(name=st.sampled_from(sorted(CHANGES)), value=JSON)
def test_any_value_is_an_identity_or_a_format_error(name, value):
    text = json.dumps(IDENTITY.describe() | {name: value})
    try:
        found = Identity.from_json(text)
    except FormatError:
        return
    assert Identity.from_json(json.dumps(found.describe())) == found


def test_impossible_values_are_config_errors():
    with pytest.raises(ConfigError, match="weights_digest"):
        replace(IDENTITY, weights_digest="")
