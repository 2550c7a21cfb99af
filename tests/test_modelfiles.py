"""Models, weights and tokenizers as they lie on disk."""

from __future__ import annotations

import itertools
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.modelfiles import _sample_offsets, load_model, tokenizer_digest, weights_digest
from kvtide.spec import preset

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "tiny-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    (model / "tokenizer.json").write_text("{}")
    return model


def test_a_preset_a_file_and_a_folder_are_models(folder):
    assert load_model("llama-3-8b") == preset("llama-3-8b")
    assert load_model(" Llama-3-8B ") == preset("llama-3-8b")
    assert load_model(str(folder)) == load_model(str(folder / "config.json"))
    assert load_model(str(folder)).name == "tiny-model"


def test_a_config_under_another_name_is_a_model(folder):
    (folder / "config.json").rename(folder / "mine.json")
    assert load_model(str(folder / "mine.json")).name == "mine"


@pytest.mark.parametrize(
    "ref", ["", " ", "\0", "no-such-model", "no/such", "nothing.json", "x" * 5000, "/" + "x/" * 3000]
)
def test_what_is_not_there_says_what_to_type(ref):
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(ref)


@pytest.mark.parametrize(
    "content",
    [b"", b"  \n", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"{}", b'{"model_type": "llama"}',
     b'{"hidden_size": ' + b"9" * 5000 + b"}", json.dumps(CONFIG | {"num_hidden_layers": -3}).encode()],
    ids=range(11),
)  # fmt: skip
def test_a_bad_config_names_the_file(folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tiny-model/config\.json"):
        load_model(str(folder))


@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_model_or_a_config_error(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("any") / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError):
        load_model(str(file))


def test_a_folder_without_config_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"no config|regular"):
        load_model(str(tmp_path))


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="regular"):
        load_model(str(tmp_path))


def test_an_oversized_config_is_not_read(folder):
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(ConfigError, match="more than"):
        load_model(str(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_config_is_named(folder):
    (folder / "config.json").chmod(0)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(str(folder))


def test_weights_are_told_apart_by_content_size_and_name(folder):
    file = folder / "model.safetensors"
    before = weights_digest(folder)
    assert before == weights_digest(folder)
    assert len(before) == 64
    seen = {before}
    content = bytearray(file.read_bytes())
    file.write_bytes(content[:-1])
    seen.add(weights_digest(folder))
    file.write_bytes(content[::-1])
    seen.add(weights_digest(folder))
    file.write_bytes(content)
    assert weights_digest(folder) == before
    file.rename(folder / "other.safetensors")
    seen.add(weights_digest(folder))
    (folder / "part.bin").write_bytes(b"1")
    seen.add(weights_digest(folder))
    assert len(seen) == 5


def test_a_changed_stretch_of_a_large_file_is_seen(tmp_path):
    file = tmp_path / "model.gguf"
    with file.open("wb") as out:
        out.truncate(40 << 20)
    before = weights_digest(tmp_path)
    with file.open("r+b") as out:  # two strata of 40 MiB / 64
        out.seek(11 << 20)
        out.write(b"x" * (2 * (40 << 20) // 64))
    assert weights_digest(tmp_path) != before
    assert weights_digest(file) == weights_digest(tmp_path)


@given(size=st.integers(0, 1 << 36))
def test_samples_lie_in_the_file_and_in_every_stratum(size):
    offsets = _sample_offsets("model.safetensors", size)
    assert offsets == _sample_offsets("model.safetensors", size)
    assert all(0 <= offset < size for offset in offsets)
    if size > 1 << 20:
        assert offsets[0] == 0
        assert offsets[-1] == size - 4096
        assert len(offsets) >= 66
        assert max(after - before for before, after in itertools.pairwise(offsets)) <= 16 << 20


def test_samples_are_the_same_on_every_machine():
    assert _sample_offsets("model.safetensors", 1 << 30)[:4] == [0, 5251157, 11751321, 19549533]


def test_tokenizers_are_told_apart(folder):
    before = tokenizer_digest(folder)
    assert before == tokenizer_digest(folder) != weights_digest(folder)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    changed = tokenizer_digest(folder)
    (folder / "merges.txt").write_text("a b")
    assert len({before, changed, tokenizer_digest(folder)}) == 3


def test_a_gguf_file_holds_its_tokenizer(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" * 100)
    assert tokenizer_digest(tmp_path) == tokenizer_digest(tmp_path / "model.gguf") == weights_digest(tmp_path)


@pytest.mark.parametrize("digest", [weights_digest, tokenizer_digest])
def test_a_folder_without_them_is_named(tmp_path, digest):
    with pytest.raises(ConfigError, match=r"no (weights|tokenizer)"):
        digest(tmp_path)
    with pytest.raises(ConfigError, match="cannot be listed"):
        digest(tmp_path / "missing")
