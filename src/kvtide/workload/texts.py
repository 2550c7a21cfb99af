"""Logs that have the text of prompts: agent traces of LMCache, and ShareGPT conversations. Next: formats.

Decides how text becomes blocks without a tokenizer: 4 bytes stand for a token, and a block is known by a hash of its
bytes. Sharing is then exact, and token counts are estimates.
Source: files of LMCache/lmcache-agent-trace; about 4 letters a token is what OpenAI tells of English text.
"""

from __future__ import annotations

import hashlib
from itertools import accumulate

import numpy as np

from kvtide.spec.geometry import shown
from kvtide.workload.draft import Draft
from kvtide.workload.elements import json_elements
from kvtide.workload.lines import S_NS, US_NS, LineError, Lines, json_object, time_ns
from kvtide.workload.prefixes import chained
from kvtide.workload.rows import Columns, Rows

BLOCK_TOKENS, TOKEN_BYTES = 16, 4
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
USER, MODEL = {"human", "user"}, {"gpt", "assistant", "chatgpt", "bing", "bard", "model"}
SEED, GAP_S, THINK_S = 0, 1.0, 30.0  # arrivals of ShareGPT, which has no times: round numbers of ours
TURNS_MAX = 10_000  # of a conversation: prompts repeat all turns before, so their sizes add up as its square


def read_lmcache(lines: Lines, limit: int | None) -> Draft:
    """Read `{"timestamp": us, "input": text, "output": text, "session_id"}`, one a line."""
    rows, number_of, num_silent = Rows(limit), dict[str, int](), 0

    def take(number: int, text: str) -> bool:
        nonlocal num_silent
        record = json_object(text)
        time = time_ns(record, "timestamp", US_NS)
        prompt, answer = _text(record, "input"), _text(record, "output") if "output" in record else b""
        if not prompt:
            raise LineError("input is empty")
        name = record.get("session_id")
        if name is not None and not isinstance(name, (str, int)):
            raise LineError(f"session_id is {shown(name)}, no text")
        session = -1 if name is None else number_of.setdefault(f"{name}", len(number_of))
        num_silent += "output" not in record
        rows.add(number, time, tokens(prompt), tokens(answer), session=session, hashes=_hashes(prompt, 0))
        return not rows.is_full

    lines.each(take)
    columns = rows.columns()
    notes = columns.notes("timestamp is in us")
    if num_silent:
        notes.append(f"{num_silent:,} requests have no output; their answers count 0 tokens.")
    return _draft(columns, notes)


def read_sharegpt(lines: Lines, limit: int | None) -> Draft:
    """Read `[{"id", "conversations": [{"from": "human" or "gpt", "value"}, ...]}, ...]`, or one such object a line.

    Each turn of the human is a request; its prompt is the whole conversation up to it.
    """
    rows, rng = Rows(limit), np.random.default_rng(SEED)
    begin_s, session = 0.0, 0
    for number, element in json_elements(lines):
        try:
            turns = _turns(element)
        except LineError as error:
            lines.reject(number, str(error))
            continue
        lines.num_good += 1
        at_s, text, hashes = begin_s, b"", list[int]()
        for turn, (speaker, said) in enumerate(turns):
            text += said
            if speaker not in USER or not text:
                continue
            whole = len(text) // BLOCK_BYTES
            hashes.extend(_hashes(text[: whole * BLOCK_BYTES], len(hashes)))
            answer = turns[turn + 1] if turn + 1 < len(turns) else ("", b"")
            answer_tokens = tokens(answer[1]) if answer[0] in MODEL else 0
            rest = _hashes(text, whole)
            rows.add(number, int(at_s * S_NS), tokens(text), answer_tokens, session=session, hashes=[*hashes, *rest])
            at_s += rng.exponential(THINK_S)
        begin_s, session = begin_s + rng.exponential(GAP_S), session + 1
        if rows.is_full:
            break
    columns = rows.columns()
    notes = [
        f"The log has no times: conversations begin as a Poisson process, one in {GAP_S:g} s on average; seed {SEED}.",
        f"Turns are {THINK_S:g} s apart on average (exponential), and have no marks of a chat template between them.",
    ]
    return _draft(columns, notes)


def tokens(text: bytes) -> int:
    """Return about how many tokens a text has."""
    return -(-len(text) // TOKEN_BYTES)


def _text(record: dict[str, object], name: str) -> bytes:
    value = record.get(name)
    if not isinstance(value, str):
        raise LineError(f"{name} is {shown(value)}, no text" if name in record else f"{name} is missing")
    return value.encode(errors="surrogatepass")


def _hashes(text: bytes, first: int) -> list[int]:
    """Return a hash for each block of `text`, from block `first` on."""
    found = (
        hashlib.blake2b(text[at : at + BLOCK_BYTES], digest_size=8).digest()
        for at in range(first * BLOCK_BYTES, len(text), BLOCK_BYTES)
    )
    return [int.from_bytes(digest, "little") for digest in found]


def _draft(columns: Columns, notes: list[str]) -> Draft:
    ids = chained(columns.hashes, columns.hash_start, input_tokens=columns.input_tokens, block_tokens=BLOCK_TOKENS)
    notes.append(
        f"Token counts are estimates: {TOKEN_BYTES} bytes a token. Blocks are {BLOCK_BYTES} bytes of text, equal where "
        f"the text is from the beginning on."
    )
    return Draft(BLOCK_TOKENS, columns, columns.hash_start, ids, notes)


def _turns(element: object) -> list[tuple[str, bytes]]:
    """Return who says what in a conversation. Raises: LineError if it is none, or nobody asks anything."""
    turns = element.get("conversations") if isinstance(element, dict) else None
    if not isinstance(turns, list):
        raise LineError(f"{shown(element)} has no list of conversations")
    if len(turns) > TURNS_MAX:
        raise LineError(f"{len(turns):,} turns; at most {TURNS_MAX:,} are read")
    found = []
    for turn in turns:
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(speaker, str):
            raise LineError(f"{shown(turn)} is no turn: nobody speaks it")
        found.append((speaker.lower(), _text(turn, "value")))
    texts = list(accumulate((said for _, said in found), lambda sum_bytes, said: sum_bytes + len(said), initial=0))
    if not any(speaker in USER and end for (speaker, _), end in zip(found, texts[1:], strict=True)):
        raise LineError("no turn of a human")
    return found
