"""The cache inside transformers, on small random models of several families: same tokens, same logits, any budget."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvhelp import threads_since  # noqa: E402
from kvtide.cache import LostKv  # noqa: E402
from kvtide.cache.steps import next_prefill_end  # noqa: E402
from kvtide.errors import ConfigError, UnsupportedError  # noqa: E402
from kvtide.integrations.transformers import KvStore, LoadedModel, StoreOptions  # noqa: E402
from kvtide.integrations.transformers.turns import Clockwork  # noqa: E402
from kvtide.spec import Dtype, ModelSpec, Split  # noqa: E402
from kvtide.tiers.contract import FAILED  # noqa: E402

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 300}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL, **HEADS),
    "qwen2": transformers.Qwen2Config(**SMALL, **HEADS),
    "qwen3": transformers.Qwen3Config(**SMALL, **HEADS, head_dim=32),
    "mistral-sliding": transformers.MistralConfig(**SMALL, **HEADS, sliding_window=48),
    "gemma3-hybrid": transformers.Gemma3TextConfig(
        **SMALL, **HEADS, head_dim=16, sliding_window=32, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "opt": transformers.OPTConfig(
        hidden_size=64, ffn_dim=96, num_hidden_layers=4, vocab_size=300, num_attention_heads=4, word_embed_proj_dim=64
    ),
}


class NoTokenizer:
    pad_token_id = 0
    eos_token_id = None


def small_model(family: str = "llama", dtype: Dtype = Dtype.FP32) -> LoadedModel:
    torch.manual_seed(0)
    kind = torch.float32 if dtype is Dtype.FP32 else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]).to(kind).eval()
    model.generation_config.eos_token_id = None
    spec = ModelSpec.from_config(model.config.to_dict(), name=family)
    return LoadedModel(family, model, NoTokenizer(), spec, dtype, "0" * 64, "1" * 64, "")


def options(tmp_path: Path | None, **changes: object) -> StoreOptions:
    given = {"device_bytes": 512 << 10, "dram_bytes": 4 << 20, "group_blocks": 2, "block_tokens": 16} | changes
    if tmp_path is not None:
        given |= {"directory": tmp_path / "store", "disk_bytes": 64 << 20}
    return StoreOptions(**given)


def prompt(num: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, num).tolist()


def reference(loaded: LoadedModel, ids: list[int], **how: object) -> object:
    cache = transformers.DynamicCache()
    tensor, start = torch.tensor([ids]), 0
    with torch.inference_mode():
        while (end := next_prefill_end(start, len(ids))) < len(ids):
            loaded.model(input_ids=tensor[:, start:end], cache=cache, use_cache=True)
            start = end
    return loaded.model.generate(tensor, cache=cache, pad_token_id=0, return_dict_in_generate=True, **how)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_transformers_own_cache_before_and_after_a_restart(family: str, tmp_path: Path) -> None:
    loaded, ids = small_model(family), prompt(700)
    expected = reference(loaded, ids, max_new_tokens=8, do_sample=False).sequences.tolist()
    for run in range(2):
        with KvStore(loaded, options(tmp_path)) as store:
            session = store.session(ids)
            assert session.matched.num_tokens == (0 if run == 0 else 688)
            session.prefill()
            got = session.generate(max_new_tokens=8, do_sample=False)
            assert got.tolist() == expected
            session.release()


@pytest.mark.parametrize("split", ["kv", "head"])
def test_same_tokens_when_layers_are_split_and_a_store_for_each_split(split: Split, tmp_path: Path) -> None:
    loaded, ids = small_model(), prompt(300)
    expected = reference(loaded, ids, max_new_tokens=4, do_sample=False).sequences.tolist()
    with KvStore(loaded, options(tmp_path)) as store:
        store.session(ids).prefill()
        unsplit = store.namespace.path
    for matched in (0, 288):  # what was stored without a split is not found
        with KvStore(loaded, options(tmp_path, split=split)) as store:
            assert store.layout.num_fragments == 2 * 4
            assert store.namespace.path != unsplit
            session = store.session(ids)
            assert session.matched.num_tokens == matched
            session.prefill()
            assert session.generate(max_new_tokens=4, do_sample=False).tolist() == expected
            session.release()


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
def test_device_budget_of_two_layers_is_exact(dtype: Dtype, tmp_path: Path) -> None:
    loaded, ids = small_model("llama", dtype), prompt(600)
    how = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    expected = reference(loaded, ids, **how)
    layer_bytes = 2 * 2 * 16 * dtype.itemsize * 640
    with KvStore(loaded, options(tmp_path, device_bytes=2 * layer_bytes)) as store:
        session = store.session(ids)
        session.prefill(reserve_tokens=6)
        assert len(store.cache.windows.windows) == 2
        got = session.generate(return_dict_in_generate=True, **how)
        assert got.sequences.tolist() == expected.sequences.tolist()
        for ours, theirs in zip(got.logits, expected.logits, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_beam_search_and_parallel_samples(tmp_path: Path) -> None:
    loaded, ids = small_model(), prompt(200)
    beams = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    samples = {"max_new_tokens": 6, "num_return_sequences": 3, "do_sample": True}
    with KvStore(loaded, options(tmp_path, device_bytes=4 << 20, dram_bytes=16 << 20)) as store:
        for how in (beams, samples):
            torch.manual_seed(5)
            expected = reference(loaded, ids, **how).sequences.tolist()
            session = store.session(ids)
            session.prefill()
            torch.manual_seed(5)
            assert session.generate(**how).tolist() == expected
            session.release()
        store.cache.drain()
        assert store.cache.ledger.pool.num_held == 0


def test_plain_generate_and_a_second_session_share_the_prefix() -> None:
    loaded, ids = small_model(), prompt(100)
    with KvStore(loaded, options(None)) as store:
        first = store.session(ids)
        out = loaded.model.generate(
            torch.tensor([ids]), cache=first.kv, max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        second = store.session(out[0].tolist())
        assert second.matched.num_tokens == 96
        first.release()
        third = store.session(out[0].tolist())
        assert third.matched.num_tokens == 103
        assert store.session(ids, salt="someone else").matched.num_tokens == 0


def test_fork_of_a_session_leaves_the_first_unchanged() -> None:
    loaded, ids = small_model(), prompt(90)
    with KvStore(loaded, options(None)) as store:
        session = store.session(ids)
        child = session.fork()
        a = child.generate(max_new_tokens=5, do_sample=False).tolist()
        b = session.generate(max_new_tokens=5, do_sample=False).tolist()
        assert a == b == reference(loaded, ids, max_new_tokens=5, do_sample=False).sequences.tolist()


def test_kv_that_rots_on_disk_is_computed_again(tmp_path: Path) -> None:
    loaded, ids = small_model(), prompt(700)
    expected = reference(loaded, ids, max_new_tokens=4, do_sample=False).sequences.tolist()
    with KvStore(loaded, options(tmp_path)) as store:
        session = store.session(ids)
        session.prefill()
        session.generate(max_new_tokens=4, do_sample=False)
        slot_bytes = store.layout.slot_bytes
    data = next((tmp_path / "store").glob("*/data.kvt"))
    with data.open("r+b") as file:
        file.seek(4096 + 5 * slot_bytes + store.layout.fragment_offset[2] + 100)
        file.write(b"rot")
    with KvStore(loaded, options(tmp_path)) as store:
        session = store.session(ids)
        session.prefill()
        assert session.generate(max_new_tokens=4, do_sample=False).tolist() == expected
        assert session.num_lost == 1
        assert store.cache.usage()["file"].num_corrupt == 1


class Plain(NoTokenizer):
    def decode(self, tokens: list[int], **_options: object) -> str:
        return "".join(f"{token} " for token in tokens)


def test_what_is_streamed_and_drawn_does_not_change_when_kv_is_lost_on_the_way(tmp_path: Path) -> None:
    loaded, ids = small_model(), prompt(500)
    how = {"max_new_tokens": 6, "do_sample": True}
    torch.manual_seed(3)
    expected = reference(loaded, ids, **how).sequences[0].tolist()
    with KvStore(loaded, options(tmp_path)) as store:
        session, told, firsts = store.session(ids), [], []
        session.prefill()
        clock = Clockwork(Plain(), told.append, lambda: firsts.append(len(told)))
        step_layer, num_left = session.kv.step_layer, [4 + 3 * 4 + 2]  # in the middle of the fifth token's layers

        def losing(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            num_left[0] -= 1
            if num_left[0] == 0:
                raise LostKv(np.array([0]))
            return step_layer(layer, k, v)

        session.kv.step_layer = losing
        torch.manual_seed(3)
        assert session.generate(streamer=clock, **how)[0].tolist() == expected
        assert session.num_lost == 1
    assert "".join(told) == Plain().decode(expected[len(ids) :])
    assert (len(clock.times_ns), firsts) == (6, [0])


def test_a_file_that_loses_everything_ends_in_an_error_not_in_a_loop(tmp_path: Path) -> None:
    loaded, ids = small_model(), prompt(700)
    with KvStore(loaded, options(tmp_path, dram_bytes=640 << 10)) as store:
        read = store.namespace.tier.read
        store.namespace.tier.read = lambda *what, **how: np.full_like(read(*what, **how), FAILED)
        session = store.session(ids)
        session.prefill()
        with pytest.raises(LostKv):
            session.generate(max_new_tokens=4)
        session.release()
        store.cache.drain()
        assert store.cache.ledger.pool.num_held == 0


def test_only_kv_of_known_tokens_without_padding_is_kept() -> None:
    loaded, ids = small_model(), torch.tensor([prompt(40)])
    with KvStore(loaded, options(None)) as store, torch.inference_mode():
        session = store.session(ids[0].tolist())
        session.kv.expect(ids)  # of a step that never ran
        with pytest.raises(UnsupportedError, match="input_ids"):
            loaded.model(inputs_embeds=torch.zeros(1, 40, 64), cache=session.kv, use_cache=True)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        with pytest.raises(UnsupportedError, match="padded"):
            loaded.model(input_ids=ids, attention_mask=mask, cache=session.kv, use_cache=True)
        assert store.cache.match(ids[0].numpy()).num_tokens == 0
        loaded.model(ids, cache=session.kv, use_cache=True)  # by position
        assert store.cache.match(ids[0].numpy()).num_tokens == 32


def test_a_prompt_may_hold_the_padding_token() -> None:
    loaded, ids = small_model(), prompt(60)
    ids[10:13] = [0, 0, 0]
    loaded.model.generation_config.eos_token_id = 2
    with KvStore(loaded, options(None)) as store:
        session = store.session(ids)
        with torch.inference_mode():
            expected = int(loaded.model(torch.tensor([ids])).logits[0, -1].argmax())
        assert session.generate(max_new_tokens=1, do_sample=False)[0, -1].item() == expected


def test_named_errors_and_nothing_left_behind(tmp_path: Path) -> None:
    loaded = small_model()
    hooks, threads = len(loaded.model._forward_pre_hooks), set(threading.enumerate())
    with KvStore(loaded, options(tmp_path)) as store:
        with pytest.raises(ConfigError, match="empty"):
            store.session([])
        with pytest.raises(ConfigError, match="2048 positions"):
            store.session(prompt(2049))
        session = store.session(prompt(40))
        with pytest.raises(UnsupportedError, match="input_ids"):
            loaded.model(inputs_embeds=torch.zeros(1, 40, 64), cache=session.kv, use_cache=True)
        session.generate(max_new_tokens=2)
    assert len(loaded.model._forward_pre_hooks) == hooks
    assert threads_since(threads) == []
    with (
        pytest.raises(ConfigError, match="--device-memory"),
        KvStore(loaded, options(None, device_bytes=4096)) as store,
    ):
        store.session(prompt(600)).prefill()
    with pytest.raises(ConfigError, match="--dram"):
        KvStore(loaded, options(None, dram_bytes=4096))
