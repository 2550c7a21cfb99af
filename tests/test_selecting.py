"""Attention to a selection inside transformers, on small random models and a real file tier."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvhelp import threads_since  # noqa: E402
from kvtide.errors import ConfigError, IoError, UnsupportedError  # noqa: E402
from kvtide.integrations.transformers import KvStore, LoadedModel  # noqa: E402
from kvtide.integrations.transformers.sparse import attend, merge  # noqa: E402
from kvtide.integrations.transformers.store import SelectOptions, Session  # noqa: E402
from kvtide.select.contract import Budget, Selection  # noqa: E402
from kvtide.select.names import METHODS  # noqa: E402
from kvtide.select.shadowkv import ShadowKv  # noqa: E402
from kvtide.spec import SPLITS, Dtype, ModelSpec, Split  # noqa: E402
from kvtide.trace.record import Recorder  # noqa: E402
from test_transformers import NoTokenizer, options, prompt, reference, small_model  # noqa: E402

METHOD_NAMES = tuple(name for name in METHODS if name != "pmr")
EVERYTHING, SMALL = Budget(share=1.0), Budget(tokens=64)
NUM_PROMPT, GROUP = 150, 8  # tokens
FRAME_BYTES = 4096  # one fragment of the small models
GREEDY = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep torch's threads, which wait busily, out of the way of numpy's: ten times as fast on two cores."""
    num = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return small_model()


def opened(
    loaded: LoadedModel,
    place: Path | None,
    name: str = "lowrank",
    budget: Budget = SMALL,
    *,
    recorder: Recorder | None = None,
    **changes: object,
) -> KvStore:
    given = {"block_tokens": 4, "group_blocks": 2, "select": SelectOptions(name, budget), "reuse": "always"} | changes
    return KvStore(loaded, options(place, **given), recorder=recorder)


def least_dram(split: Split) -> int:
    """DRAM of the fewest frames a cache works with: a quarter of them hold a few groups of one layer."""
    return (2 * 4 * (1 if split == "none" else 2) + 8) * FRAME_BYTES


def check_nothing_is_held(store: KvStore) -> None:
    store.cache.drain()
    assert not store.cache.ledger.pins.any()
    assert store.cache.ledger.pool.num_held == 0


def check_same(got: object, expected: object) -> None:
    assert got.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def kept(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[Split, Path]:
    """Stores with the KV of the prompt, one for each split."""
    places = {}
    for split in SPLITS:
        places[split] = tmp_path_factory.mktemp(split)
        with opened(loaded, places[split], split=split, select=None) as store:
            session = store.session(prompt(NUM_PROMPT))
            session.forward(0, NUM_PROMPT)
    return places


# Exact attention in parts


@pytest.mark.parametrize("seed", range(8))
def test_attention_in_parts_adds_up_to_attention_at_once(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    heads, group, num, tokens, dim = 2, 1 + seed % 3, 1 + seed % 4, 23, 8
    query = torch.randn(heads, group, num, dim, generator=draw) * 3
    keys, values = (torch.randn(heads, tokens, dim, generator=draw) for _ in range(2))
    mask = torch.rand(heads, num, tokens, generator=draw) < (0.15 if seed % 2 else 0.6)
    mask[:, :, 11], mask[:, :, 3] = True, False  # each query sees something, though not in every part
    cuts = [0, 3, 4, 11, 12, 23]
    spans = [slice(*pair) for pair in pairwise(cuts)]
    parts = [attend(query, keys[:, span], values[:, span], scaling=0.3, mask=mask[:, :, span]) for span in spans]
    assert any(torch.isinf(part.lse).any() for part in parts)
    whole = attend(query, keys, values, scaling=0.3, mask=mask)
    torch.testing.assert_close(merge(parts), whole.out)
    plain = torch.nn.functional.scaled_dot_product_attention(
        query, *(one[:, None].expand(-1, group, -1, -1) for one in (keys, values)), attn_mask=mask[:, None], scale=0.3
    )
    torch.testing.assert_close(whole.out, plain)
    everywhere = attend(query, keys, values, scaling=0.3, mask=None)
    torch.testing.assert_close(everywhere.out, attend(query, keys, values, scaling=0.3, mask=torch.ones_like(mask)).out)


# A budget of everything


@pytest.fixture(scope="module")
def exact(loaded: LoadedModel) -> object:
    with KvStore(loaded, options(None, block_tokens=4, group_blocks=2)) as store:
        return store.session(prompt(NUM_PROMPT)).generate(**GREEDY)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", METHOD_NAMES)
def test_a_budget_of_everything_changes_nothing_even_in_rounds(
    name: str, split: Split, loaded: LoadedModel, exact: object, kept: dict[Split, Path]
) -> None:
    with opened(loaded, kept[split], name, EVERYTHING, split=split, dram_bytes=least_dram(split)) as store:
        session = store.session(prompt(NUM_PROMPT))
        assert session.matched.num_tokens == 148
        check_same(session.generate(**GREEDY), exact)
        counts = store.selecting.counts
        assert (counts.num_steps, counts.num_failed) == (2, 0)
        assert counts.num_attended == 4 * (151 + 152)
        assert counts.num_read > 4 * 19  # DRAM has no room for a layer
        session.release()
        check_nothing_is_held(store)


@pytest.mark.parametrize("name", ["lowrank", "quest", "shadowkv", "infinigen"])
def test_a_budget_of_everything_changes_nothing_in_dram_alone(name: str, loaded: LoadedModel, exact: object) -> None:
    with opened(loaded, None, name, EVERYTHING) as store:
        session = store.session(prompt(NUM_PROMPT))
        check_same(session.generate(**GREEDY), exact)
        counts = store.selecting.counts
        assert (counts.num_steps, counts.num_read, counts.num_failed) == (2, 0, 0)
        session.release()
        check_nothing_is_held(store)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "opt"])
@pytest.mark.parametrize("name", ["lowrank", "quest"])
def test_other_families_with_a_budget_of_everything(family: str, name: str, tmp_path: Path) -> None:
    loaded, ids = small_model(family), prompt(100)
    expected = reference(loaded, ids, max_new_tokens=3, do_sample=False, output_logits=True)
    with opened(loaded, tmp_path, name, EVERYTHING) as store:
        check_same(store.session(ids).generate(**GREEDY), expected)
        assert store.selecting.counts.num_steps == 2


# A small budget, against a plain reference


class Watched:
    """Follows one session: all K and V so far, and what each selected layer was asked, chose and returned."""

    def __init__(self, session: Session) -> None:
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.chosen: dict[int, list[Selection]] = {}
        self.num_checked = 0
        self.selecting = selecting = session._store.selecting
        self.split, self.heads = session._store.layout.split, selecting._heads
        self._step_layer, self._choose, self._attend = session.kv.step_layer, selecting._choose, selecting.attend
        session.kv.step_layer, selecting._choose, selecting.attend = self.step_layer, self.choose, self.attend

    def step_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new, found = (k.clone(), v.clone()), self._step_layer(layer, k, v)
        if not self.selecting.is_sparse and layer not in self.kv:
            new = tuple(one.clone() for one in found)  # with all that was kept
        old = self.kv.get(layer)
        self.kv[layer] = new if old is None else tuple(torch.cat(pair, dim=2) for pair in zip(old, new, strict=True))
        return found

    def choose(self, layer: int, queries: np.ndarray) -> list[Selection]:
        self.chosen[layer] = self._choose(layer, queries)
        return self.chosen[layer]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        out = self._attend(layer, query, key)
        keys, values = (one[0] for one in self.kv[layer])
        selections, heads = self.chosen[layer], self.heads
        assert [one.num_tokens for one in selections] == [
            keys.shape[1] - query.shape[2] + 1 + i for i in range(query.shape[2])
        ]
        for index, selection in enumerate(selections):
            seen = np.zeros((heads.num_kv, keys.shape[1]), np.bool_)
            seen[:, : selection.num_tokens] = selection.mask()
            used = self.rebuilt(layer, selection, keys) if len(selections) == 1 else keys
            logits = torch.einsum("hgd,htd->hgt", query[0, :, index].view(heads.num_kv, heads.group, -1), used)
            logits = (logits * heads.scaling).masked_fill(~torch.from_numpy(seen)[:, None], -torch.inf)
            want = torch.einsum("hgt,htd->hgd", logits.softmax(dim=2), values)
            torch.testing.assert_close(out[0, index].view_as(want), want, rtol=1e-4, atol=1e-5)
            self.num_checked += not selection.is_everything
        return out

    def rebuilt(self, layer: int, selection: Selection, keys: torch.Tensor) -> torch.Tensor:
        """The keys that attention is to use: where values alone are read, those of whole groups that may be chosen."""
        if selection.need != "v" or self.split != "kv":
            return keys
        first, last = (
            -(-selection.first * selection.unit // GROUP) * GROUP,
            selection.last * selection.unit // GROUP * GROUP,
        )
        keys = keys.clone()
        tokens = np.arange(first, last)
        keys[:, first:last] = torch.from_numpy(self.selecting.selector.keys(layer, tokens)).transpose(0, 1)
        return keys


def steps(session: Session, widths: list[int], tokens: list[int]) -> None:
    """Run the rest of the prompt, then steps of some tokens each."""
    start, session.tokens = NUM_PROMPT, tokens
    session._start_selecting()
    session.forward(session.kv.num_tokens, start)
    for width in widths:
        session.forward(start, start + width)
        start += width


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", [*METHOD_NAMES[1:], "window", "clo+quest"])
def test_attention_is_that_of_the_selectors_mask_over_all_keys(
    name: str, split: Split, loaded: LoadedModel, kept: dict[Split, Path]
) -> None:
    with opened(loaded, kept[split], name, split=split, dram_bytes=least_dram(split)) as store:
        session = store.session(prompt(NUM_PROMPT))
        watched = Watched(session)
        steps(session, [1, 3, 9, 1], prompt(NUM_PROMPT) + prompt(14, seed=9))
        assert watched.num_checked == 14 * (2 if "quest" in name else 4)
        assert store.selecting.counts.num_failed == 0
        session.release()
        check_nothing_is_held(store)


# What is read


def read_by(
    loaded: LoadedModel, place: Path, name: str, split: Split, change: Callable[[KvStore], None]
) -> tuple[int, Watched]:
    """Run some steps; return the bytes that attention to selections wanted, and what it did."""
    recorder = Recorder()
    with opened(loaded, place, name, split=split, recorder=recorder) as store:
        change(store)
        session = store.session(prompt(NUM_PROMPT))
        watched = Watched(session)
        steps(session, [1, 1, 1], prompt(NUM_PROMPT) + prompt(3, seed=9))
        assert watched.num_checked == 3 * 4
        rows = recorder.objects.rows()
        assert len(rows) == 4 * 4
        session.release()
        return int(rows["wanted_bytes"][rows["step"] >= 1].sum()), watched


def test_keys_that_are_rebuilt_are_not_read(loaded: LoadedModel, kept: dict[Split, Path]) -> None:
    def exactly(store: KvStore) -> None:
        store.selecting.selector = ShadowKv(store.selecting._heads, is_exact_keys=True)

    least, watched = read_by(loaded, kept["kv"], "shadowkv", "kv", lambda _store: None)
    most, _ = read_by(loaded, kept["kv"], "shadowkv", "kv", exactly)
    assert all(one.need == "v" for one in watched.chosen[3])
    assert FRAME_BYTES * 12 < least < 0.75 * most


@pytest.mark.parametrize("name", ["quest", "infinigen", "retrieval", "shadowkv"])
def test_a_head_reads_only_its_own_groups_where_heads_lie_apart(
    name: str, loaded: LoadedModel, kept: dict[Split, Path]
) -> None:
    def wholly(store: KvStore) -> None:
        store.selecting._wanted = lambda _selections, groups: np.ones((len(groups), 2), np.bool_)

    def sparsely(store: KvStore) -> None:
        store.selecting.selector._dense_layers = 0

    changes = [sparsely, lambda store: (sparsely(store), wholly(store))]
    least, most = (read_by(loaded, kept["head"], name, "head", change)[0] for change in changes)
    assert FRAME_BYTES * 12 < least < most


def test_nobody_else_finds_kv_that_attention_to_a_selection_made(loaded: LoadedModel, tmp_path: Path) -> None:
    tokens = prompt(NUM_PROMPT) + prompt(32, seed=9)
    for run in range(2):  # the same again finds what was kept of the prompt, and no more
        for name in ("window", "infinigen"):
            with opened(loaded, tmp_path, name, dram_bytes=4 << 20 if run == 0 else least_dram("none")) as store:
                session = store.session(prompt(NUM_PROMPT))
                watched = Watched(session)
                steps(session, [8, 8, 8, 8], tokens)
                assert watched.num_checked == 32 * 4
                child = session.fork()
                session.release()
                child.release()
                assert store.session(tokens).matched.num_tokens == 148
    with opened(loaded, tmp_path, select=None) as store:
        session = store.session(tokens)
        assert session.matched.num_tokens == 148
        session.forward(148, len(tokens))
        assert store.session([*tokens, 1]).matched.num_tokens == 180


# When something goes wrong


def test_a_selector_that_fails_is_counted_and_everything_is_attended(
    loaded: LoadedModel, exact: object, kept: dict[Split, Path]
) -> None:
    def failing(*_what: object) -> Selection:
        raise ZeroDivisionError

    for name in ("lowrank", "quest"):
        with opened(loaded, kept["none"], name, dram_bytes=least_dram("none")) as store:
            store.selecting.selector.select = failing
            session = store.session(prompt(NUM_PROMPT))
            check_same(session.generate(**GREEDY), exact)
            assert store.selecting.counts.num_failed == 2 * 4
            session.release()
            check_nothing_is_held(store)


def test_a_selection_that_finds_no_room_is_attended_in_halves(loaded: LoadedModel, kept: dict[Split, Path]) -> None:
    tokens, parts = [], []
    for most in (1000, 3):
        with opened(loaded, kept["none"], "quest", SMALL) as store:
            picker = store.cache.picker
            finish = picker.finish

            def refuse(pick: object, finish: object = finish, most: int = most) -> object:
                parts.append(len(pick.fragments))
                if len(pick.fragments) > most:
                    raise IoError(errno.ENOSPC, "no room")
                return finish(pick)

            picker.finish = refuse
            session = store.session(prompt(NUM_PROMPT))
            found = session.generate(**GREEDY)
            tokens.append(found)
            session.release()
            check_nothing_is_held(store)
    check_same(tokens[1], tokens[0])
    assert max(parts) > 3, "nothing had to be halved"


@pytest.mark.parametrize("method", ["on_prefill", "on_append"])
def test_a_selector_that_cannot_summarise_is_counted_and_everything_is_attended(
    method: str, loaded: LoadedModel, exact: object, kept: dict[Split, Path]
) -> None:
    def failing(*_what: object) -> None:
        raise ZeroDivisionError

    with opened(loaded, kept["none"], "lowrank", EVERYTHING, dram_bytes=least_dram("none")) as store:
        setattr(store.selecting.selector, method, failing)
        session = store.session(prompt(NUM_PROMPT))
        how = GREEDY | {"max_new_tokens": 40} if method == "on_append" else GREEDY
        found = session.generate(**how)
        if method == "on_prefill":
            check_same(found, exact)
            assert store.selecting.counts.num_steps == 0
        assert store.selecting.counts.num_failed > 0
        session.release()
        check_nothing_is_held(store)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["lowrank", "quest"])
def test_kv_that_rots_while_it_is_decoded_is_computed_again(
    name: str, split: Split, loaded: LoadedModel, exact: object, tmp_path: Path
) -> None:
    with opened(loaded, tmp_path, split=split, select=None) as store:
        store.session(prompt(NUM_PROMPT)).forward(0, NUM_PROMPT)
        store.cache.drain()  # in the order of the groups; closing would begin with the latest
        slot_bytes, offsets = store.layout.slot_bytes, store.layout.fragment_offset
    with opened(loaded, tmp_path, name, EVERYTHING, split=split, dram_bytes=least_dram(split)) as store:
        session, selecting, begins = store.session(prompt(NUM_PROMPT)), store.selecting, []
        begin = selecting.begin

        def rotting(num_new: int) -> None:
            begins.append(selecting.is_sparse)
            if begins == [False, True]:  # between two steps
                data = next((tmp_path / "store").glob("*/data.kvt"))
                unit = session.kv.sequences[0].table.units[17]  # near the end: DRAM has no room for many tokens anew
                slot = int(store.namespace.tier.slots_of(store.cache.ledger.stored_key[[unit]])[0])
                with data.open("r+b") as file:
                    file.seek(4096 + slot * slot_bytes + offsets[len(offsets) // 2] + 100)
                    file.write(b"rot")
            begin(num_new)

        selecting.begin = rotting
        check_same(session.generate(**GREEDY), exact)
        assert session.num_lost == 1
        assert begins[:3] == [False, True, False], "what is computed again attends to everything"
        assert selecting.counts.num_failed == 0
        session.release()
        check_nothing_is_held(store)


@pytest.mark.parametrize("name", ["lowrank", "quest"])
def test_nothing_is_held_after_a_step_that_broke_off(
    name: str, loaded: LoadedModel, exact: object, kept: dict[Split, Path]
) -> None:
    with opened(loaded, kept["none"], name, dram_bytes=least_dram("none")) as store:
        session, selecting = store.session(prompt(NUM_PROMPT)), store.selecting
        attended = selecting.attend

        def breaking(layer: int, *what: torch.Tensor) -> torch.Tensor:
            if layer == 2:
                raise KeyboardInterrupt
            return attended(layer, *what)

        selecting.attend = breaking
        with pytest.raises(KeyboardInterrupt):
            session.generate(**GREEDY)
        selecting.attend = attended
        session.release()
        check_nothing_is_held(store)
        selecting.budget = EVERYTHING
        check_same(store.session(prompt(NUM_PROMPT)).generate(**GREEDY), exact)


# More than one row


def test_several_rows_attend_to_everything(loaded: LoadedModel) -> None:
    ids, how = prompt(NUM_PROMPT), {"max_new_tokens": 4, "num_return_sequences": 3, "do_sample": True}
    torch.manual_seed(5)
    expected = reference(loaded, ids, **how).sequences.tolist()
    with opened(loaded, None, device_bytes=4 << 20) as store:
        session = store.session(ids)
        torch.manual_seed(5)
        assert session.generate(**how).tolist() == expected
        assert store.selecting.counts.num_queries == 0
        session.release()
        session = store.session(ids)  # one row again
        session.generate(**GREEDY)
        assert store.selecting.counts.num_steps == 2
        session.release()
        check_nothing_is_held(store)


def test_a_session_that_was_forked_goes_on_attending_to_everything(loaded: LoadedModel, exact: object) -> None:
    ids = prompt(NUM_PROMPT)
    with opened(loaded, None) as store:
        session = store.session(ids)
        session.prefill()
        child = session.fork()
        selected = child.generate(**GREEDY)
        num_steps = store.selecting.counts.num_steps
        assert num_steps == 2
        assert child.kv.selecting is store.selecting
        plain = loaded.model.generate(torch.tensor([ids]), cache=session.kv, pad_token_id=0, **GREEDY)
        check_same(plain, exact)
        assert store.selecting.counts.num_steps == num_steps
        again = child.kv
        with torch.inference_mode():  # the one that was followed is still followed
            loaded.model(input_ids=selected.sequences[:, -1:], cache=again, use_cache=True)
        assert store.selecting.counts.num_steps == num_steps + 1
        for each in (child, session):
            each.release()
        check_nothing_is_held(store)


# Opening and closing


def test_the_models_own_attention_is_back_when_the_store_is_closed(loaded: LoadedModel) -> None:
    own, ids = loaded.model.config._attn_implementation, torch.tensor([prompt(30)])
    hooks = [len(module._forward_pre_hooks) for module in loaded.model.modules()]
    with torch.inference_mode():
        before = loaded.model(ids).logits
        with opened(loaded, None) as store:
            assert loaded.model.config._attn_implementation != own
            torch.testing.assert_close(loaded.model(ids).logits, before)  # without a cache of the store
            store.session(prompt(30)).generate(**GREEDY)
        assert loaded.model.config._attn_implementation == own
        assert [len(module._forward_pre_hooks) for module in loaded.model.modules()] == hooks
        torch.testing.assert_close(loaded.model(ids).logits, before, rtol=0, atol=0)
        store.close()


def without_projection() -> LoadedModel:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
    config = transformers.Phi3Config(**shape, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    spec = ModelSpec.from_config(model.config.to_dict(), name="phi3")
    return LoadedModel("phi3", model, NoTokenizer(), spec, Dtype.FP32, "0" * 64, "1" * 64, "")


@pytest.mark.parametrize(
    "make", [lambda: small_model("mistral-sliding"), lambda: small_model("gemma3-hybrid"), without_projection]
)
def test_models_whose_attention_cannot_be_met_are_refused_and_nothing_stays_open(
    make: Callable[[], LoadedModel], tmp_path: Path
) -> None:
    other, threads = make(), set(threading.enumerate())
    own = other.model.config._attn_implementation
    with pytest.raises(
        UnsupportedError, match=r"full attention with a query projection in every layer.*leave --select out"
    ):
        opened(other, tmp_path)
    assert threads_since(threads) == []
    assert other.model.config._attn_implementation == own
    opened(other, tmp_path, select=None).close()  # no other process owns the store


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("lowrank", 8 + 16 + 7 + 8),
        ("quest", 16 + 16 + 15 + 16),
        ("infinigen", 4 + 16 + 1),
        ("retrieval", 4 + 16 + 1),
        ("window", 21),
    ],
)
def test_a_budget_with_nothing_to_choose_is_refused_when_the_store_opens(
    name: str, least: int, loaded: LoadedModel, tmp_path: Path
) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match=f"type --budget {least} or more"):
        opened(loaded, tmp_path, name, Budget(tokens=least - 1))
    assert threads_since(threads) == []
    with opened(loaded, tmp_path, name, Budget(tokens=least)) as store:
        store.session(prompt(NUM_PROMPT)).generate(**GREEDY)
        assert store.selecting.counts.num_failed == 0
        assert store.selecting.counts.num_attended <= 2 * 4 * (least if name != "quest" else 152)
    opened(loaded, tmp_path, "full", Budget(tokens=1)).close()


def test_what_is_not_summarised_yet_counts_as_kept_always(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="44 are kept always"):
        opened(loaded, None, "infinigen", Budget(tokens=44), group_blocks=8)


def test_a_share_with_nothing_to_choose_is_refused_before_the_first_step(loaded: LoadedModel) -> None:
    with opened(loaded, None, "lowrank", Budget(share=0.2)) as store:
        session = store.session(prompt(NUM_PROMPT))
        with pytest.raises(ConfigError, match="a budget of 30 tokens is too small: 31 are kept always"):
            session.generate(**GREEDY)
        assert session.kv.num_tokens == 0
        store.session(prompt(200)).generate(**GREEDY)
    with opened(loaded, None, "lowrank", Budget(share=1.0)) as store:
        store.session(prompt(5)).generate(**GREEDY)


def test_unknown_selections_are_refused_when_the_store_opens(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="unknown selection"):
        opened(loaded, None, "qest")
