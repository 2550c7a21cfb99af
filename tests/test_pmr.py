"""Drafts from suffixes: what the trie predicts, and that drafted decoding is plain greedy decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtide.select.pmr import AttendedGroups, SuffixTrie

torch = pytest.importorskip("torch")

from kvtide.integrations.transformers import KvStore  # noqa: E402
from kvtide.integrations.transformers.store import SelectOptions  # noqa: E402
from kvtide.select.contract import Budget  # noqa: E402
from test_transformers import options, prompt, small_model  # noqa: E402

NUM_NEW = 24


def test_what_followed_before_is_drafted_with_where_it_was() -> None:
    trie = SuffixTrie()
    trie.observe([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    draft = trie.draft(3)
    assert draft.tokens == [4, 5, 6]
    assert draft.positions == [3, 4, 5]


def test_the_longest_suffix_decides() -> None:
    trie = SuffixTrie()
    trie.observe([7, 1, 2, 30, 0, 8, 1, 2, 40, 0, 8, 1, 2, 40, 0, 7, 1, 2])
    assert trie.draft(1).tokens == [30]  # after 1, 2 came 40 more often, but after 7, 1, 2 only 30


def test_the_most_frequent_continuation_wins_and_then_the_latest() -> None:
    trie = SuffixTrie(depth=3)
    trie.observe([1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 6, 0, 1, 2])
    assert trie.draft(1).tokens == [6]
    trie.observe([1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 6, 0, 1, 2, 5, 0, 1, 2])
    assert trie.draft(1).tokens == [5]


def test_nothing_is_drafted_without_a_match_or_where_it_is_unlikely() -> None:
    trie = SuffixTrie()
    trie.observe(list(range(50)))
    assert trie.draft(4).tokens == []
    unlikely = SuffixTrie(depth=3)
    text = [token for last in range(20) for token in (1, 2, 100 + last)]
    unlikely.observe([*text, 1, 2])
    assert unlikely.draft(4).tokens == []  # each of twenty continuations has a share of 0.05


def test_a_draft_goes_on_past_the_depth_of_the_trie() -> None:
    trie, text = SuffixTrie(depth=4), list(range(100, 130))
    trie.observe([*text, 1, *text[:5]])
    assert trie.draft(20).tokens == text[5:25]


def test_texts_are_told_apart_and_positions_go_on() -> None:
    trie = SuffixTrie()
    trie.observe([1, 2, 3])
    trie.observe([1, 2, 3, 4])  # goes on
    assert trie.num_tokens == 4
    trie.observe([9, 1, 2])  # another one
    assert trie.num_tokens == 7
    assert trie.position(0) == 4
    draft = trie.draft(2)
    assert draft.tokens == [3, 4]
    assert draft.positions == [2, 3]


def test_a_full_trie_learns_no_more_and_stays_right() -> None:
    trie = SuffixTrie(nodes_max=40)
    rng = np.random.default_rng(0)
    trie.observe([*([1, 2, 3] * 3), *rng.integers(10, 1000, 500).tolist(), 1, 2])
    assert len(trie._counts) <= 40
    assert trie.draft(1).tokens in ([3], [])


def test_attended_groups_are_bounded_and_the_latest_are_kept() -> None:
    attended = AttendedGroups(ids_max=2)
    for position in range(4):
        attended.note(position, [np.array([position])])
    assert [layers[0].tolist() for layers in attended.of([0, 1, 2, 3])] == [[2], [3]]


def repeating(seed: int) -> list[int]:
    """Return a prompt in which phrases come again, so that drafts are made."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(3, 300, 9).tolist() for _ in range(6)]
    return [token for index in rng.integers(0, 6, 22).tolist() for token in phrases[index]][:180]


@pytest.mark.parametrize(("name", "seeds"), [("lowrank", range(10)), ("quest", range(10, 20))])
def test_drafted_decoding_gives_the_tokens_of_plain_greedy_decoding_on_twenty_prompts(
    name: str, seeds: range, tmp_path: Path
) -> None:
    loaded = small_model()
    tokens: dict[str, list[list[int]]] = {}
    counts = None
    for method in (name, f"pmr+{name}"):
        select = SelectOptions(method, Budget(tokens=96))
        with KvStore(loaded, options(tmp_path / method, group_blocks=1, select=select, dram_bytes=2 << 20)) as store:
            for seed in seeds:
                session = store.session(repeating(seed))
                session.prefill(reserve_tokens=NUM_NEW)
                found = session.generate(max_new_tokens=NUM_NEW, do_sample=False, return_dict_in_generate=True)
                tokens.setdefault(method, []).append(found.sequences[0].tolist())
                session.release()
            store.cache.drain()
            assert not store.cache.ledger.pins.any()
            counts = store.drafter.counts if store.drafter else None
    assert tokens[name] == tokens[f"pmr+{name}"]
    assert counts is not None
    assert counts.num_accepted > 40, "drafts were hardly ever right, so nothing was tested"
    assert counts.num_drafted > counts.num_accepted, "no draft was ever wrong, so taking back was not tested"


def test_the_streamer_sees_every_token_once_and_an_end_token_ends() -> None:
    loaded = small_model()
    select = SelectOptions("pmr", Budget(tokens=96))
    ids = repeating(3)
    with KvStore(loaded, options(None, group_blocks=1, select=select)) as store:
        session = store.session(ids)
        plain = session.generate(max_new_tokens=NUM_NEW, do_sample=False)[0, len(ids) :].tolist()
        session.release()
        end = plain[NUM_NEW // 2]
        loaded.model.generation_config.eos_token_id = end
        seen: list[int] = []

        class Streamer:
            def put(self, value: torch.Tensor) -> None:
                if value.dim() == 1:
                    seen.extend(value.tolist())

            def end(self) -> None:
                seen.append(-1)

        session = store.session(ids)
        how = {"streamer": Streamer(), "output_logits": True, "return_dict_in_generate": True}
        found = session.generate(max_new_tokens=NUM_NEW, do_sample=False, **how)
        session.release()
    expected = plain[: plain.index(end) + 1]
    assert seen == [*expected, -1]
    assert found.sequences[0, len(ids) :].tolist() == expected
    assert [int(row.argmax()) for row in found.logits] == expected


def test_sampling_is_not_drafted() -> None:
    loaded, ids = small_model(), prompt(120)
    tokens = []
    for method in ("lowrank", "pmr"):
        select = SelectOptions(method, Budget(tokens=96))
        with KvStore(loaded, options(None, group_blocks=1, select=select)) as store:
            session = store.session(ids)
            torch.manual_seed(5)
            tokens.append(session.generate(max_new_tokens=8, do_sample=True).tolist())
            session.release()
            assert store.drafter is None or store.drafter.counts.num_steps == 0
    assert tokens[0] == tokens[1]
