"""`kvtide bench select`: replay with figures worked out by hand, tasks by seed, intervals, and the command itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from kvtide.errors import ConfigError
from kvtide.select.compared import check_budgets, check_methods, default_methods, make_compared
from kvtide.select.contract import Budget, Heads
from kvtide.select.floors import Oracle, RandomUnits, WindowOnly
from kvtide.select.full import Full
from kvtide.select.replay import LayerTrace, Replay, Replayed, Trace
from kvtide.select.rope import Rope
from kvtide.select.scoring import Answer, Replays, answer_rows, compare, mass_rows, wilson
from kvtide.select.shadowkv import ShadowKv
from kvtide.select.tasks import PROSE_TOKENS, TASKS, check_tasks, make_case

HEADS = Heads(num_layers=2, num_q=2, num_kv=1, dim=2, scaling=1.0)
PREFILL, STEPS = 128, 3
PLANTED = 40  # in the third group of 16


def planted(logit: float, *, steps: int = STEPS) -> Trace:
    """Return a trace where key 40 alone has a dot product with each query: `logit`; its value is the only one not 0."""
    num = PREFILL + steps
    keys, values = np.zeros((num, 1, 2), np.float32), np.zeros((num, 1, 2), np.float32)
    keys[PLANTED, 0, 0] = logit
    values[PLANTED, 0] = 3.0, 4.0
    queries = np.zeros((steps, 2, 2), np.float32)
    queries[:, :, 0] = 1.0
    layer = LayerTrace(keys, values, queries, None, queries[:1])
    return Trace(HEADS, [layer, LayerTrace(keys, values, queries, queries, queries[:1])])


def replayed(trace: Trace, selector: object, budget: int) -> Replayed:
    replay = Replay(trace)
    replay.summarise(selector)
    return replay.run(selector, Budget(tokens=budget))


def test_the_oracle_holds_all_the_mass_that_lies_in_one_group() -> None:
    found = replayed(planted(40.0), Oracle(HEADS, unit=16, sharing="all"), 64)
    assert found.mass == pytest.approx(1.0)
    assert found.middle == pytest.approx(1.0)
    assert found.error == pytest.approx(0.0, abs=1e-5)
    assert found.groups == 4  # the first, the chosen one, the last summarised and the one being filled


def test_a_window_holds_what_its_tokens_weigh() -> None:
    """Every other key has logit 0, so weighs 1 of (e^2 + tokens - 1); the planted one is not in the window."""
    found = replayed(planted(2.0), WindowOnly(HEADS), 64)
    totals = [math.exp(2) + PREFILL + step for step in range(STEPS)]
    assert found.mass == pytest.approx(np.mean([64 / total for total in totals]), rel=1e-5)
    middle = [(64 - 4 - 16) / (total - 4 - 16) for total in totals]
    assert found.middle == pytest.approx(np.mean(middle), rel=1e-5)
    assert found.error == pytest.approx(1.0)  # the only value that is not 0 is left out
    assert found.index_recall is None
    assert found.attended == 64


def test_output_error_is_what_is_left_out_of_the_softmax() -> None:
    """Attending to fewer keys of logit 0 makes the planted value count for more."""
    found = replayed(planted(2.0, steps=1), Oracle(HEADS, unit=16, sharing="all"), 64)
    total, kept = math.exp(2) + PREFILL, math.exp(2) + found.attended - 1
    assert found.mass == pytest.approx(kept / total, rel=1e-5)
    assert found.error == pytest.approx(total / kept - 1, rel=1e-4)


def test_full_reads_everything_and_loses_nothing() -> None:
    found = replayed(planted(2.0, steps=17), Full(HEADS), 1)
    assert (found.mass, found.mass_p5) == (pytest.approx(1.0), pytest.approx(1.0))
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.attended == PREFILL + 9
    assert found.touched_bytes == pytest.approx((16 * 9 + 10) / 17 * 2 * 16 * 1 * 4 * 4)  # layers, tokens, heads, K+V
    assert found.new_groups == pytest.approx(1 / 16)  # one group begins in 16 steps
    assert found.reuse == pytest.approx(1 - (1 / 10) / 16)


def test_random_units_rarely_meet_the_oracles_and_the_oracle_always_does() -> None:
    trace = planted(4.0)
    rng = np.random.default_rng(0)
    for layer in trace.layers:
        layer.keys[:, 0, 1] = rng.standard_normal(len(layer.keys))
        layer.queries[:, :, 1] = 1.0
    oracle = replayed(trace, Oracle(HEADS, unit=1), 40)
    assert oracle.index_recall == pytest.approx(1.0)
    chance = replayed(trace, RandomUnits(HEADS), 40)
    assert chance.index_recall < 0.4
    assert oracle.mass > chance.mass


def test_rebuilt_keys_count_in_the_error_and_not_in_the_mass() -> None:
    rng = np.random.default_rng(1)
    heads = Heads(num_layers=1, num_q=2, num_kv=1, dim=8, scaling=1.0)
    num = PREFILL + 1
    keys, values = (rng.standard_normal((num, 1, 8)).astype(np.float32) for _ in range(2))
    queries = rng.standard_normal((1, 2, 8)).astype(np.float32)
    angles = np.arange(256)[:, None] * np.array([1, 0.1, 0.01, 0.001] * 2)[None]
    rope = Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    trace = Trace(heads, [LayerTrace(keys, values, queries, None, queries)], rope)
    whole = replayed(trace, ShadowKv(heads, rank_ratio=1.0), 64)
    exact = replayed(trace, ShadowKv(heads, is_exact_keys=True), 64)
    poor = replayed(trace, ShadowKv(heads, rank_ratio=1 / 8), 64)
    assert whole.mass == exact.mass == poor.mass
    assert whole.error == pytest.approx(exact.error, rel=1e-3)
    assert poor.error != pytest.approx(exact.error, rel=1e-2)
    assert whole.touched_bytes == exact.touched_bytes / 2


@pytest.mark.parametrize(
    ("num_right", "num", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_intervals_known_from_the_literature(num_right: int, num: int, low: float, high: float) -> None:
    """81 of 263 is the example of R. G. Newcombe, Statistics in Medicine 17 (1998)."""
    assert wilson(num_right, num) == pytest.approx((low, high), abs=1e-4)


def test_answers_are_compared_place_by_place() -> None:
    full = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], np.float32))
    ours = np.log(np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]], np.float32))
    found = compare(ours, full, [0, 1])
    assert found["is_exact"] is False
    assert found["top1"] == 0.5
    assert found["kl"] == pytest.approx(0.25 * math.log(2) / 2)
    assert found["log_likelihood"] == pytest.approx(-1.5 * math.log(2))
    assert found["log_likelihood_full"] == pytest.approx(-math.log(2))
    assert compare(full, full, [0, 1])["is_exact"] is True


def test_rows_gather_seeds() -> None:
    common = {"context": 1024, "method": "quest", "budget": 64, "log_likelihood_full": -1.0, "kl": 0.5, "top1": 1.0,
              "attended": 60.0, "groups": 4.0, "num_failed": 0, "select_ns": 10.0}  # fmt: skip
    answers = [
        Answer(task=task, seed=seed, is_exact=seed == 0, log_likelihood=-2.0 - seed, **common)
        for task in ("needles", "perplexity")
        for seed in (0, 1)
    ]
    needles, prose = answer_rows(answers)
    assert (needles.num, needles.num_exact, needles.score) == (2, 1, 0.5)
    assert (needles.low, needles.high) == wilson(1, 2)
    assert needles.log_likelihood_change == -1.5
    assert prose.score is None
    assert prose.perplexity == pytest.approx(math.exp(2.5))
    one = replayed(planted(2.0), WindowOnly(HEADS), 64)
    (row,) = mass_rows([Replays(1024, seed, "window", 64, one) for seed in range(2)])
    assert (row.num, row.replayed.mass, row.replayed.index_recall) == (2, pytest.approx(one.mass), None)


def letters(text: str) -> list[int]:
    return list(text.encode())


def test_cases_depend_on_their_seed_alone_and_have_the_length_asked_for() -> None:
    made = [make_case(letters, list(TASKS), context=2048, seed=seed, group_tokens=16) for seed in (0, 0, 1)]
    assert made[0] == made[1]
    assert made[0].text != made[2].text
    for case in made:
        assert len(case.text) % 16 == 0
        longest = max(len(each.tokens) + len(each.answer) for each in case.questions)
        assert 2048 - 16 < len(case.text) + longest <= 2048
        text = bytes(case.text).decode()
        asked = {each.task: each for each in case.questions}
        assert set(asked) == {"passkey", "needles", "variables", "perplexity"}
        assert f"The pass key is{bytes(asked['passkey'].answer).decode()}." in text
        needles = asked["needles"]
        assert bytes(needles.tokens + needles.answer).decode() + "." in text
        assert text.count("The special number of the") == 4
        assert len(asked["perplexity"].answer) == PROSE_TOKENS
        one, two, three = (text.index(f"Variable {word} has") for word in chain(text, asked["variables"].tokens))
        assert one < two < three


def chain(text: str, question: list[int]) -> list[str]:
    """Return the variables of the chain, the one that has a number first."""
    found = [bytes(question).decode().split()[1]]
    for _ in range(2):
        found.insert(0, text.split(f"Variable {found[0]} has the value of ")[1].split(".", maxsplit=1)[0])
    return found


@pytest.mark.parametrize(
    ("check", "says"),
    [
        (lambda: check_methods(["full", "best"]), "'best'"),
        (lambda: check_tasks(["riddles"]), "'riddles'"),
        (lambda: check_budgets({"lowrank": make_compared("lowrank", HEADS, group_tokens=16)}, [256, 32]), "lowrank: "),
        (lambda: make_case(letters, ["needles"], context=256, seed=0, group_tokens=16), "too short"),
    ],
)
def test_what_cannot_be_compared_is_refused(check: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check()


def test_the_default_methods_all_exist() -> None:
    check_methods(default_methods())
    assert {"full", "lowrank", "window", "random", "oracle", "oracle-head", "oracle-token"} <= set(default_methods())


# The command, on a tiny random model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a random model of bytes."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, vocab_size=256, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters_of = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({each: index for index, each in enumerate(letters_of)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=letters_of[0]).save_pretrained(folder)
    return str(folder)


def kvtide(*args: str) -> tuple[int, str, str]:
    from typer.testing import CliRunner

    from kvtide.cli import app

    found = CliRunner().invoke(app, list(args))
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, found.stdout, found.stderr


def test_bench_select_writes_json_and_a_page(tiny: str, tmp_path: Path) -> None:
    page, result = tmp_path / "page.html", tmp_path / "result.json"
    methods = "full,quest,shadowkv,infinigen,kvswap,lowrank,clo,window,random,oracle,oracle-head,oracle-token"
    code, out, _ = kvtide(
        *["bench", "select", "--model", tiny, "--dtype", "fp32", "--contexts", "1k", "--seeds", "1", "--json"],
        *["--methods", methods, "--budgets", "96", "--html", str(page), "-o", str(result)],
    )
    assert code == 0
    found = json.loads(out)
    assert found == json.loads(result.read_text())
    assert (found["label"], found["is_partial"], found["done"]) == ("measured", False, found["total"])
    answers = {(row["task"], row["method"]): row for row in found["answers"]}
    assert len(answers) == 4 * 12
    for (task, method), row in answers.items():
        assert row["num"] == 1
        assert row["num_failed"] == 0, method
        if method == "full":
            assert (row["budget"], row["top1"]) == (None, 1.0)
            assert row["kl"] < 1e-6
        else:
            assert row["attended"] <= 96 + 16 or method == "quest", (task, method)  # whose first layers attend to all
    mass = {row["method"]: row for row in found["mass"]}
    assert len(mass) == 12
    assert mass["full"]["mass"] == pytest.approx(1.0)
    assert mass["oracle-token"]["mass"] > mass["oracle"]["mass"] > mass["random"]["mass"]
    assert mass["oracle-token"]["index_recall"] > 0.9
    text = page.read_text()
    assert text.count("Plotly.newPlot(") == 4
    assert "measured" in text
    assert "<script src=" not in text


def test_a_query_ahead_is_what_the_layer_before_predicts(tiny: str) -> None:
    from kvtide.integrations.transformers import load
    from kvtide.integrations.transformers.recording import Recording
    from kvtide.integrations.transformers.wiring import Wiring

    torch = pytest.importorskip("torch")
    loaded = load(tiny, dtype="fp32", cache_dir=Path("unused"))
    wiring = Wiring(loaded)
    seen: dict[int, np.ndarray] = {}
    hooks = [
        module.q_proj.register_forward_hook(lambda _m, _a, out, layer=layer: seen.update({layer: out[0].numpy()}))
        for layer, module in enumerate(wiring.modules)
    ]
    ids = torch.arange(1, 25)[None] + 20
    with Recording(wiring) as recording, torch.inference_mode():
        loaded.model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    rope = wiring.rope()
    for layer in range(3):
        (query,) = recording.queries[layer]
        shaped = seen[layer].reshape(24, 4, 16)
        # the hooks ran for the predictions too: the last call of a layer is its own
        np.testing.assert_allclose(query, rope.apply(shaped, 0), atol=1e-5)
    assert recording.ahead[0] == []
    assert all(np.isfinite(recording.ahead[layer][0]).all() for layer in (1, 2))


def test_a_trace_has_the_keys_and_values_of_transformers_own_cache(tiny: str) -> None:
    from kvtide.integrations.transformers import KvStore, StoreOptions, load
    from kvtide.integrations.transformers.recording import Recording, make_trace
    from kvtide.integrations.transformers.wiring import Wiring

    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    loaded = load(tiny, dtype="fp32", cache_dir=Path("unused"))
    wiring, ids = Wiring(loaded), np.random.default_rng(0).integers(1, 256, 72).tolist()
    expected = transformers.DynamicCache()
    with KvStore(loaded, StoreOptions(1 << 20, 4 << 20, group_blocks=1)) as store, torch.inference_mode():
        loaded.model(input_ids=torch.tensor([ids]), cache=expected, use_cache=True)
        session = store.session(ids)
        with Recording(wiring) as earlier:
            session.forward(0, 64)
        with Recording(wiring) as latest:
            session.forward(64, 72)
        trace = make_trace(earlier, latest, wiring, store.cache, session.kv.sequences[0], num_queries=5)
        session.release()
    assert (trace.num_tokens, trace.num_queries, trace.num_prefill) == (69, 5, 64)
    for layer, ours in zip(expected.layers, trace.layers, strict=True):
        np.testing.assert_allclose(ours.keys, layer.keys[0, :, :69].transpose(0, 1).numpy(), atol=1e-5)
        np.testing.assert_allclose(ours.values, layer.values[0, :, :69].transpose(0, 1).numpy(), atol=1e-5)
        assert ours.earlier.shape == (64, 4, 16)


def test_the_order_of_methods_changes_nothing(tiny: str) -> None:
    from dataclasses import replace

    from kvtide.integrations.transformers import load
    from kvtide.integrations.transformers.comparing import CompareOptions, Comparison

    pytest.importorskip("torch")
    loaded = load(tiny, dtype="fp32", cache_dir=Path("unused"))
    methods = ["clo", "random", "lowrank", "clo", "random", "lowrank"]
    options = CompareOptions(methods, [512], [96], ["perplexity"], num_seeds=1)
    answers = [replace(each, select_ns=0.0) for each in Comparison(loaded, options, on_progress=print).run().answers]
    assert answers[:3] == answers[3:]
    assert all(each.attended <= 96 for each in answers)


def test_an_interrupted_run_gives_what_it_got_to(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtide.integrations.transformers.comparing import Comparison

    ticks = []

    def tick(self: Comparison, what: str, num: int = 1) -> None:
        self.found.done += num
        ticks.append(what)
        if len(ticks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Comparison, "tick", tick)
    code, out, _ = kvtide(
        *["bench", "select", "--model", tiny, "--contexts", "512", "--tasks", "perplexity", "--json"],
        *["--methods", "full,window,oracle", "--budgets", "96"],
    )
    assert code == 130
    found = json.loads(out)
    assert found["is_partial"] is True
    assert [row["method"] for row in found["answers"]] == ["full", "window"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--methods", "best"], "'best'"),
        (["--tasks", "riddles"], "'riddles'"),
        (["--budgets", "32"], "too small"),
        (["--budgets", "many"], "--budgets"),
        (["--contexts", "2k"], "positions"),
        (["--contexts", "64"], "256 or more"),
        (["--html", "/nowhere/at/all.html"], "no directory"),
    ],
)
def test_bad_input_is_a_config_error(args: list[str], says: str, tiny: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kvtide("bench", "select", "--model", tiny, "--contexts", "512", *args)
