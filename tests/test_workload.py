"""Workloads: what each log's units and blocks become, that no line is lost silently, and what generators share."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.blocks import chain_keys
from kvtide.errors import ConfigError, FormatError
from kvtide.workload import (
    FORMAT_NAMES,
    SYNTHETIC_NAMES,
    Malformed,
    Workload,
    agentic,
    batch,
    elements,
    load_workload,
    make,
    make_workload,
    multi_turn,
    rag,
    tokens_of,
)
from kvtide.workload.lines import Lines
from kvtide.workload.prefixes import chained, part_blocks


def json_lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def mooncake_line(
    timestamp: object, input_length: object, hash_ids: object, output_length: object = 5
) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}


def bailian_line(chat: int, parent: int, timestamp: float, hash_ids: Sequence[int]) -> dict[str, object]:
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": 16 * len(hash_ids) - 1,
        "output_length": 3,
        "type": "text",
        "turn": 1 + (parent >= 0),
        "hash_ids": list(hash_ids),
    }


CHAT = [{"from": "human", "value": "a" * 100}, {"from": "gpt", "value": "b" * 50}, {"from": "human", "value": "c" * 10}]
SAMPLES = {
    "mooncake": json_lines(mooncake_line(0, 1000, [7, 9]), mooncake_line(1500, 1025, [7, 8, 3])),
    "bailian": json_lines(
        bailian_line(4, -1, 61.114, [11, 12]), bailian_line(5, 4, 62.5, [11, 12, 13]), bailian_line(6, -1, 63.0, [20])
    ),
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.9799600,374,44\r\n"
        "2023-11-16 18:17:04.0319600,396,109\r\n"
    ),
    "burstgpt": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,s-1,43,GPT-4,100,20,120,Conversation log\n"
        "19440111.5,,2,ChatGPT,36,29,65,API log\n"
        "19440161.0,s-1,2,GPT-4,150,29,179,Conversation log\n"
        "19440170.0,s-1,2,GPT-4,200,0,200,Conversation log\n"
        "19440180.0,s-1,2,GPT-4,40,7,47,Conversation log\n"
    ),
    "lmcache-agent": json_lines(
        {"timestamp": 1760428652866457, "input": "x" * 130, "output": "y" * 9, "session_id": "one"},
        {"timestamp": 1760428652866957, "input": "x" * 130 + "z" * 64, "output": "", "session_id": "one"},
    ),
    "sharegpt": json.dumps([{"id": "q", "conversations": CHAT}, {"id": "r", "conversations": CHAT[:2]}], indent=1),
}


def loaded(folder: Path, text: str | bytes, form: str = "auto", limit: int | None = None) -> Workload:
    path = folder / "log.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_workload(path, format=form, limit=limit)


def rebuilt(workload: Workload) -> Workload:
    """Put a workload through all checks again."""
    names = ("arrival_ns", "input_tokens", "output_tokens", "block_start", "block_ids", "session")
    again = make_workload(
        name=workload.name,
        source=workload.source,
        block_tokens=workload.block_tokens,
        **{name: getattr(workload, name) for name in names},
    )
    assert np.array_equal(again.block_ids, workload.block_ids), "ids are numbered by appearance"
    return again


@pytest.mark.parametrize("name", SAMPLES)
def test_a_format_is_recognised_by_what_it_holds(name: str, tmp_path: Path) -> None:
    workload = loaded(tmp_path, SAMPLES[name])
    assert workload.source == name
    assert workload.malformed == Malformed()
    assert workload.arrival_ns[0] == 0
    rebuilt(workload)
    packed = loaded(tmp_path, gzip.compress(SAMPLES[name].encode()))
    assert np.array_equal(packed.block_ids, workload.block_ids)


def test_mooncake_is_ms_and_512_tokens(tmp_path: Path) -> None:
    workload = loaded(tmp_path, SAMPLES["mooncake"])
    assert workload.block_tokens == 512
    assert workload.arrival_ns.tolist() == [0, 1_500_000_000]
    assert workload.block_ids.tolist() == [0, 1, 0, 2, 3]
    assert workload.session.tolist() == [-1, -1]
    assert any("in ms" in note for note in workload.notes)
    assert workload.blocks_of(1).tolist() == [0, 2, 3]


def test_bailian_is_s_and_16_tokens_and_chats_of_one_root_are_a_session(tmp_path: Path) -> None:
    workload = loaded(tmp_path, SAMPLES["bailian"])
    assert workload.block_tokens == 16
    assert workload.arrival_ns.tolist() == [0, 1_386_000_000, 1_886_000_000]
    assert workload.session.tolist() == [0, 0, 1]
    assert workload.input_tokens.tolist() == [31, 47, 15]
    blocks, tokens = workload.ideal_hits()
    assert blocks.tolist() == [0, 1, 0], "12 is filled in part the first time, and full the second"
    assert tokens.tolist() == [0, 16, 0]


def test_parents_in_a_circle_or_unknown_end_in_a_session(tmp_path: Path) -> None:
    text = json_lines(
        bailian_line(1, 2, 0, [1]), bailian_line(2, 1, 1, [1]), bailian_line(3, 9, 2, [1]), bailian_line(4, 9, 3, [1])
    )
    assert loaded(tmp_path, text).session.tolist() == [0, 0, 1, 1]


def test_other_block_sizes_of_a_format_are_found_and_told(tmp_path: Path) -> None:
    text = json_lines(*(mooncake_line(time, 640 + time, list(range(11))) for time in range(1, 20)))
    workload = loaded(tmp_path, text)
    assert workload.block_tokens == 64
    assert any("64 tokens, and not the 512" in note for note in workload.notes)


def test_hashes_that_do_not_cover_their_prefix_are_chained(tmp_path: Path) -> None:
    text = json_lines(mooncake_line(0, 1024, [1, 2]), mooncake_line(1, 1024, [3, 2]), mooncake_line(2, 1024, [1, 2]))
    workload = loaded(tmp_path, text)
    assert workload.block_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert any("3 hash_ids make 4 different blocks" in note for note in workload.notes)


def test_azure_keeps_100_ns_and_shares_nothing(tmp_path: Path) -> None:
    workload = loaded(tmp_path, SAMPLES["azure"])
    assert workload.arrival_ns.tolist() == [0, 52_000_000]
    assert workload.input_tokens.tolist() == [374, 396]
    assert workload.num_unique == workload.num_blocks == 24 + 25
    assert any("no content" in note for note in workload.notes)
    later = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-05-12 00:00:00.000001+00:00,2,9,1\n"
    later += "2024-05-12T01:00:00.0000011+01:00,2,9,1\n"
    assert loaded(tmp_path, later).arrival_ns.tolist() == [0, 100]


def test_burstgpt_sessions_grow_and_failed_requests_are_left_out(tmp_path: Path) -> None:
    workload = loaded(tmp_path, SAMPLES["burstgpt"])
    assert workload.arrival_ns.tolist() == [0, 1_500_000_000, 51_000_000_000, 70_000_000_000]
    assert workload.input_tokens.tolist() == [100, 36, 150, 40]
    assert workload.session.tolist() == [0, -1, 0, 0]
    blocks, tokens = workload.ideal_hits()
    assert blocks.tolist() == [0, 0, 6, 0], "the full blocks of the first prompt; the last one is too short"
    assert tokens.tolist() == [0, 0, 96, 0]
    assert any("1 failed requests" in note for note in workload.notes)
    assert any("1 are shorter" in note for note in workload.notes)
    old = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,47,18,65,Conversation log\n"
    assert loaded(tmp_path, old).session.tolist() == [-1]


def test_text_is_cut_at_4_bytes_a_token_and_shared_from_the_beginning(tmp_path: Path) -> None:
    workload = loaded(tmp_path, SAMPLES["lmcache-agent"])
    assert workload.arrival_ns.tolist() == [0, 500_000]
    assert workload.input_tokens.tolist() == [33, 49]
    assert workload.output_tokens.tolist() == [3, 0]
    assert workload.ideal_hits()[0].tolist() == [0, 2]
    assert workload.session.tolist() == [0, 0]
    assert any("4 bytes a token" in note for note in workload.notes)


def test_each_human_turn_of_sharegpt_is_a_request_with_the_history(tmp_path: Path) -> None:
    workload = loaded(tmp_path, SAMPLES["sharegpt"])
    assert sorted(workload.input_tokens.tolist()) == [25, 25, 40]
    assert workload.output_tokens[workload.input_tokens == 25].tolist() == [13, 13]
    assert workload.output_tokens[workload.input_tokens == 40].tolist() == [0]
    assert sorted(workload.session.tolist()) == [0, 0, 1]
    assert workload.ideal_hits()[0].sum() == 1 + 2, "a full block of its own session; both of the other session"
    assert any("seed 0" in note for note in workload.notes)
    lines = loaded(tmp_path, json_lines({"conversations": CHAT}, {"conversations": CHAT[:2]}))
    assert np.array_equal(lines.block_ids, workload.block_ids)


def test_reading_of_a_json_list_goes_on_behind_damage(tmp_path: Path) -> None:
    whole = json.dumps({"id": "w", "conversations": CHAT})
    text = f"[{whole},\n{whole[:60]},\n{whole},\n{{}},\n{json.dumps({'id': 'n', 'conversations': []})}, {whole}]"
    workload = loaded(tmp_path, text)
    assert workload.num_requests == 6
    assert [line for line, _ in workload.malformed.first] == [2, 4, 5]
    long = ",".join([whole] * 4000)
    workload = loaded(tmp_path, f"[{long}]")
    assert workload.num_requests == 8000
    assert workload.num_unique == 2 + 2


def test_a_json_list_is_the_same_however_it_is_cut_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [{"id": text, "n": [-1.5e-7, float("-inf"), False, None]} for text in ("é\u20ac", "\U0001f600", 'q"\\')]
    path = tmp_path / "list.json"
    monkeypatch.setattr(elements, "PIECE_BYTES", 1)
    for is_ascii in (True, False):
        path.write_text(json.dumps(values * 30, ensure_ascii=is_ascii, indent=1), encoding="utf-8")
        lines = Lines(path)
        found = list(elements.json_elements(lines))
        lines.close()
        assert [value for _, value in found] == values * 30
        assert [number for number, _ in found[:3]] == [2, 11, 20]
        assert lines.malformed.num == 0


def test_malformed_lines_are_counted_with_number_and_reason(tmp_path: Path) -> None:
    good = [mooncake_line(time, 600, [1, 2]) for time in range(20)]
    bad = [
        mooncake_line(-1, 600, [1, 2]),
        mooncake_line(1e300, 600, [1, 2]),
        mooncake_line(float("nan"), 600, [1, 2]),
        mooncake_line(timestamp=True, input_length=600, hash_ids=[1, 2]),
        mooncake_line(0, 0, []),
        mooncake_line(0, 600, [1, 2, 3]),
        mooncake_line(0, 600, [[1], 2]),
        mooncake_line(0, 600, [True, 2]),
        mooncake_line(0, 600, [-1, 2]),
        mooncake_line(0, 600, [1 << 64, 2]),
        mooncake_line(0, 1 << 40, [1, 2]),
        mooncake_line(0, 600, "\x1b[31m"),
        [1, 2],
        None,
        {"timestamp": 0},
    ]
    text = json_lines(*good, *bad) + "\n{\n" + "[" * 5000 + "\n"
    workload = loaded(tmp_path, text, form="mooncake")
    assert workload.num_requests == 20
    assert workload.malformed.num == len(bad) + 2
    assert [line for line, _ in workload.malformed.first] == [21, 22, 23, 24, 25]
    assert "-1, no time" in workload.malformed.first[0][1]
    with pytest.raises(FormatError, match="malformed") as found:
        loaded(tmp_path, json_lines(*good[:3], bad[-4]) + "x\n" * 5)
    assert all(name in str(found.value) for name in FORMAT_NAMES)
    with pytest.raises(FormatError) as found:
        loaded(tmp_path, json_lines(bad[11]), form="mooncake")
    assert "\x1b" not in str(found.value)


def test_a_line_too_long_is_one_malformed_line(tmp_path: Path) -> None:
    text = SAMPLES["mooncake"] + '{"timestamp": ' + "1" * (9 << 20) + "}\n" + SAMPLES["mooncake"]
    workload = loaded(tmp_path, text)
    assert workload.num_requests == 4
    assert workload.malformed == Malformed(1, ((3, "longer than 8 MiB"),))


@pytest.mark.parametrize(
    "text", [b"", b"\n\n", b"\0" * 5000, b"hello\n", b"[1, 2]", b'{"a": 1}\n', b"\x1f\x8b\x08junk"]
)
def test_what_is_no_log_of_requests_is_refused(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        loaded(tmp_path, text)
    for name in FORMAT_NAMES:
        with pytest.raises(FormatError):
            loaded(tmp_path, text, form=name)


def test_wrong_names_and_paths_say_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="near it: mooncake"):
        loaded(tmp_path, SAMPLES["mooncake"], form="moncake")
    with pytest.raises(ConfigError, match="limit"):
        loaded(tmp_path, SAMPLES["mooncake"], limit=0)
    with pytest.raises(ConfigError, match="directory"):
        load_workload(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        load_workload(tmp_path / "none")
    with pytest.raises(FormatError, match="expected a header TIMESTAMP"):
        loaded(tmp_path, SAMPLES["mooncake"], form="azure")


@pytest.mark.parametrize("name", SAMPLES)
def test_a_limit_ends_reading(name: str, tmp_path: Path) -> None:
    whole, one = loaded(tmp_path, SAMPLES[name]), loaded(tmp_path, SAMPLES[name], limit=1)
    assert one.num_requests == 1
    assert one.input_tokens[0] == whole.input_tokens[0]
    first = whole.take(1)
    assert np.array_equal(first.block_ids, one.block_ids)
    assert first.num_unique == one.num_unique
    assert whole.take(10**6) is whole
    with pytest.raises(ConfigError):
        whole.take(0)


def test_lines_out_of_order_are_sorted_and_told(tmp_path: Path) -> None:
    text = json_lines(mooncake_line(9, 600, [4, 5]), mooncake_line(2, 100, [4]), mooncake_line(3, 600, [4, 5]))
    workload = loaded(tmp_path, text)
    assert workload.arrival_ns.tolist() == [0, 1_000_000, 7_000_000]
    assert workload.input_tokens.tolist() == [100, 600, 600]
    assert workload.ideal_hits()[0].tolist() == [0, 0, 2]
    assert any("sorted" in note for note in workload.notes)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 66) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "chat_id",
    "parent_chat_id",
    "input",
    "conversations",
)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    form=st.sampled_from(["auto", *FORMAT_NAMES]),
    cut=st.integers(0, 400),
    junk=st.binary(max_size=60),
    records=st.lists(st.dictionaries(st.sampled_from(FIELDS), VALUES), max_size=2),
)
def test_any_bytes_are_a_workload_or_a_named_error(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    form: str,
    cut: int,
    junk: bytes,
    records: list[dict[str, object]],
) -> None:
    raw = SAMPLES[name].encode()
    text = raw[:cut] + junk + raw[cut:] + json_lines(*records).encode(errors="surrogatepass")
    try:
        workload = loaded(tmp_path_factory.mktemp("fuzz"), text, form)
    except (FormatError, ConfigError):
        return
    rebuilt(workload)
    assert workload.malformed.num >= len(workload.malformed.first)
    assert all(line >= 1 and reason.isprintable() for line, reason in workload.malformed.first)


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


def workload_of(prompts: list[list[int]], last_fill: int = 4) -> Workload:
    """Return prompts whose blocks of 4 tokens have these hashes."""
    counts = np.array([len(prompt) for prompt in prompts])
    start = np.concatenate([[0], np.cumsum(counts)])
    tokens = (counts - 1) * 4 + last_fill
    hashes = np.array([number for prompt in prompts for number in prompt], np.uint64)
    return make_workload(
        name="drawn",
        source="test",
        block_tokens=4,
        arrival_ns=np.arange(len(prompts)),
        input_tokens=tokens,
        output_tokens=np.zeros(len(prompts), np.int64),
        block_start=start,
        block_ids=chained(hashes, start, input_tokens=tokens, block_tokens=4),
        session=np.full(len(prompts), -1),
    )


@settings(deadline=None)
@given(prompts=PROMPTS, last_fill=st.integers(1, 4))
def test_next_use_and_ideal_hits_match_a_search_by_hand(prompts: list[list[int]], last_fill: int) -> None:
    workload = workload_of(prompts, last_fill)
    ids, seen = workload.block_ids.tolist(), set[tuple[object, ...]]()
    place, num = 0, len(ids)
    for request, prompt in enumerate(prompts):
        names = [(*prompt[: at + 1], at == len(prompt) - 1 and last_fill < 4) for at in range(len(prompt))]
        hits = next((at for at, name in enumerate(names) if name not in seen), len(names))
        assert workload.ideal_hits()[0][request] == hits
        assert workload.ideal_hits()[1][request] == min(4 * hits, workload.input_tokens[request])
        seen.update(names)
        for at in range(place, place + len(prompt)):
            later = ids[place + len(prompt) :]
            expected = place + len(prompt) + later.index(ids[at]) if ids[at] in later else num
            assert workload.next_use()[at] == expected
        place += len(prompt)
    assert workload.num_unique == len(seen) == len(set(ids))


PARTS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=4), min_size=1, max_size=6
)


@settings(deadline=None)
@given(prompts=PARTS, block_tokens=st.integers(1, 5))
def test_blocks_of_parts_are_equal_where_their_tokens_are(
    prompts: list[list[tuple[int, int]]], block_tokens: int
) -> None:
    """A part of key k at place p has tokens (k, p, 0), (k, p, 1), ..., so texts can be compared token by token."""
    prompts = [parts if any(size for _, size in parts) else [*parts, (0, 1)] for parts in prompts]
    start, ids = part_blocks(
        part_start=np.concatenate([[0], np.cumsum([len(parts) for parts in prompts])]),
        part_keys=np.array([key for parts in prompts for key, _ in parts]),
        part_tokens=np.array([size for parts in prompts for _, size in parts]),
        block_tokens=block_tokens,
    )
    known: dict[tuple[object, ...], int] = {}
    for request, parts in enumerate(prompts):
        text: list[object] = []
        for place, (key, size) in enumerate(part for part in parts if part[1]):
            text += [(key, place, at) for at in range(size)]
        own = ids[start[request] : start[request + 1]].tolist()
        assert len(own) == -(-len(text) // block_tokens)
        for at, block in enumerate(own):
            assert known.setdefault(tuple(text[: (at + 1) * block_tokens]), block) == block
    assert len(set(known.values())) == len(known), "different texts have different ids"
    assert sorted(set(ids.tolist())) == list(range(len(known))), "ids are dense"


def test_a_workload_that_breaks_a_rule_is_refused() -> None:
    good = {
        "name": "n",
        "source": "s",
        "block_tokens": 4,
        "arrival_ns": [0, 5],
        "input_tokens": [7, 8],
        "output_tokens": [0, 1],
        "block_start": [0, 2, 4],
        "block_ids": [1, 0, 1, 2],
        "session": [-1, 0],
    }
    workload = make_workload(**good)
    assert workload.block_ids.tolist() == [0, 1, 0, 2]
    with pytest.raises(ValueError, match="read-only"):
        workload.block_ids[0] = 3
    breaks = {
        "arrival_ns": ([1, 5], [0, -1], [0], [0.0, 1.5], []),
        "input_tokens": ([0, 8], [7, 9], [7, 1 << 40]),
        "output_tokens": ([0, -1], [0]),
        "block_start": ([0, 1, 4], [0, 2], [0, 2, 5]),
        "block_ids": ([1, 0, 1, 0], [0, 1, 2, 1], [0, 1, 0, 3], [0, 1, 0, -1], [0, 0, 1, 2], [0, 1, 0], [[0, 1, 0, 2]]),
        "session": ([-2, 0], [0]),
        "block_tokens": (0, True, 1 << 30),
    }
    for name, values in breaks.items():
        for value in values:
            with pytest.raises(ConfigError):
                make_workload(**(good | {name: value}))


@pytest.mark.parametrize("name", SYNTHETIC_NAMES)
def test_generators_give_the_same_for_a_seed_and_another_for_another(name: str) -> None:
    first, again = make(name), make(name)
    rebuilt(first)
    for column in ("arrival_ns", "input_tokens", "output_tokens", "block_ids", "session"):
        assert np.array_equal(getattr(first, column), getattr(again, column))
    assert first.source == f"synthetic {name}"
    assert first.notes
    if name != "batch":
        assert not np.array_equal(make(name, seed=1).output_tokens, first.output_tokens)


@pytest.mark.parametrize("make_sessions", [multi_turn, agentic])
def test_sessions_repeat_their_history_and_share_the_system_prompt(make_sessions: object) -> None:
    assert callable(make_sessions)
    workload = make_sessions(num_sessions=30, system_tokens=100, sessions_per_s=0.5, context_tokens=4096)
    hits = workload.ideal_hits()[0]
    last: dict[int, int] = {}
    for request in range(workload.num_requests):
        session, size = int(workload.session[request]), int(workload.input_tokens[request])
        known = last.get(session)
        if known is None:
            assert hits[request] == (100 // 16 if request else 0)
        else:
            said_before = known + int(workload.output_tokens[:request][workload.session[:request] == session][-1])
            assert size > said_before, "the answer is part of the history"
            assert hits[request] == known // 16
        last[session] = size
    assert workload.input_tokens.max() <= 4096


def test_documents_are_shared_only_in_the_same_order() -> None:
    workload = rag(num_requests=300, num_documents=5, documents_each=2, document_tokens=100, system_tokens=60, seed=3)
    parts = [tuple(workload.blocks_of(at)[[60 // 16, 160 // 16 - 1]].tolist()) for at in range(300)]
    assert len(set(parts)) <= 5 * 2, "the first document decides"
    hits = workload.ideal_hits()[0]
    assert set(hits.tolist()) == {0, 60 // 16, 160 // 16, 260 // 16}
    first = np.bincount([workload.blocks_of(at)[4] for at in range(300)])
    assert np.sort(first)[-1] > 300 / 5, "the popular document is first more often than others"
    flat = rag(num_requests=2_000, num_documents=4, documents_each=4, zipf=0.0, document_tokens=16, system_tokens=16)
    assert len({tuple(flat.blocks_of(at)[:5].tolist()) for at in range(2_000)}) == 24, (
        "each document once, in any order"
    )


def test_a_batch_arrives_at_once() -> None:
    workload = batch(num_requests=4, input_tokens=100, shared_tokens=40, output_tokens=7)
    assert not workload.arrival_ns.any()
    assert workload.ideal_hits()[0].tolist() == [0, 2, 2, 2]
    same = batch(num_requests=3, input_tokens=100, shared_tokens=100)
    assert same.ideal_hits()[1].tolist() == [0, 100, 100]


def test_arrivals_are_poisson_and_many_requests_are_quick() -> None:
    workload = rag(num_requests=100_000, requests_per_s=4.0, document_tokens=16, block_tokens=64)
    gaps = np.diff(workload.arrival_ns) / 1e9
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() == pytest.approx(0.25, rel=0.02)
    chats = multi_turn(num_sessions=20_000, message_tokens=32, answer_tokens=64)
    assert chats.num_requests == pytest.approx(100_000, rel=0.05)


def test_impossible_options_say_what_is_possible() -> None:
    for name, options in (
        ("multi-trun", {}),
        ("rag", {"colour": 1}),
        ("rag", {"num_documents": 3}),
        ("rag", {"zipf": float("nan")}),
        ("rag", {"num_requests": 10**7}),
        ("batch", {"shared_tokens": 1 << 20}),
        ("batch", {"num_requests": 1.5}),
        ("multi-turn", {"num_sessions": 0}),
        ("multi-turn", {"turns": 0.5}),
        ("multi-turn", {"sessions_per_s": 0}),
        ("multi-turn", {"context_tokens": 257, "message_tokens": 10**6}),
        ("agentic", {"seed": -1}),
        ("agentic", {"num_sessions": 10**7}),
    ):
        with pytest.raises(ConfigError):
            make(name, **options)


def test_tokens_follow_block_ids() -> None:
    workload = workload_of([[1, 2, 3], [1, 2, 4], [2, 1]], last_fill=3)
    first, second, third = (tokens_of(workload, request, vocab=50_000) for request in range(3))
    assert len(first) == 11
    assert np.array_equal(first[:8], second[:8])
    assert not np.array_equal(first[8:], second[8:])
    assert not np.array_equal(first[:4], third[:4])
    assert np.array_equal(first, tokens_of(workload, 0, vocab=50_000))
    assert first.min() >= 0
    assert first.max() < 50_000
    keys = [chain_keys(tokens, block_tokens=4, parent=b"") for tokens in (first, second)]
    assert (keys[0] == keys[1]).all(), "both full blocks, and nothing of the unfilled one"
    chats = multi_turn(num_sessions=20)
    blocks = {tuple(tokens_of(chats, at)[:16].tolist()) for at in range(chats.num_requests)}
    assert len(blocks) == 1, "the system prompt"
    for vocab in (1, 1 << 40, 2.5):
        with pytest.raises(ConfigError):
            tokens_of(workload, 0, vocab=vocab)


DATA = Path(__file__).parent.parent.parent / "shared" / "data" / "requests"
real = pytest.mark.skipif(not DATA.exists(), reason="the collection of real logs is not here")


@real
def test_the_real_mooncake_conversations_have_their_known_figures() -> None:
    tracemalloc.start()
    workload = load_workload(DATA / "mooncake_conversation.jsonl")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    assert (workload.source, workload.block_tokens, workload.malformed.num) == ("mooncake", 512, 0)
    assert (workload.num_requests, workload.num_blocks, workload.num_unique) == (12_031, 288_500, 182_790)
    blocks, tokens = workload.ideal_hits()
    assert blocks.sum() == 105_710
    assert blocks.sum() / workload.num_blocks == pytest.approx(0.366, abs=5e-4)
    assert tokens.sum() / workload.input_tokens.sum() == pytest.approx(0.374, abs=5e-4)
    assert np.count_nonzero(workload.next_use() < workload.num_blocks) == 105_710
    assert workload.arrival_ns[-1] == 3_536_999_000_000
    assert workload.take(1000).num_unique == load_workload(DATA / "mooncake_conversation.jsonl", limit=1000).num_unique


@real
def test_the_real_azure_conversations_load() -> None:
    workload = load_workload(DATA / "azure_2023_conv.csv")
    assert workload.source == "azure"
    assert workload.num_requests == 19_366
    assert workload.input_tokens.mean() == pytest.approx(1154.7, abs=0.1)
    assert not workload.ideal_hits()[0].any()


@real
def test_the_real_agent_trace_loads() -> None:
    workload = load_workload(DATA / "lmcache_agent_miniswe.jsonl")
    assert workload.source == "lmcache-agent"
    assert workload.num_requests == 13
    assert set(workload.session.tolist()) == {0}
    assert 0.85 < workload.ideal_hits()[0].sum() / workload.num_blocks < 0.95
