"""Logs that know prompts by hashes of their blocks: Mooncake and Qwen-Bailian. Next: counted.

Decides their units, the size of their blocks, and what a session is. Their hashes are chained anew, since one of them
may cover its block alone.
Source: Mooncake traces of FAST 2025, README of kvcache-ai/Mooncake; README of
alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from array import array

import numpy as np

from kvtide.spec.geometry import shown
from kvtide.workload.draft import Draft
from kvtide.workload.lines import MS_NS, S_NS, LineError, Lines, json_object, time_ns, whole
from kvtide.workload.prefixes import chained
from kvtide.workload.requests import Ids
from kvtide.workload.rows import Columns, Rows

MOONCAKE_TOKENS, BAILIAN_TOKENS = 512, 16  # of a block
OTHER_TOKENS = tuple(1 << power for power in range(13))  # block sizes that conversions of these logs use
CHAT_MAX = (1 << 62) - 1


def read_mooncake(lines: Lines, limit: int | None) -> Draft:
    """Read `{"timestamp": ms, "input_length", "output_length", "hash_ids"}`, one a line."""
    rows = Rows(limit)

    def take(number: int, text: str) -> bool:
        record = json_object(text)
        time = time_ns(record, "timestamp", MS_NS)
        rows.add(number, time, *_lengths(record), hashes=_hashes(record))
        return not rows.is_full

    lines.each(take)
    columns = rows.columns()
    return _draft(lines, columns, columns.notes("timestamp is in ms"), MOONCAKE_TOKENS)


def read_bailian(lines: Lines, limit: int | None) -> Draft:
    """Read `{"chat_id", "parent_chat_id", "timestamp": s, "input_length", "output_length", "hash_ids"}`, one a line.

    Chats with one root, by way of their parents, are a session.
    """
    rows, parent_of = Rows(limit), dict[int, int]()

    def take(number: int, text: str) -> bool:
        record = json_object(text)
        chat = whole(record, "chat_id", most=CHAT_MAX)
        parent = whole(record, "parent_chat_id", least=-1, most=CHAT_MAX) if "parent_chat_id" in record else -1
        time = time_ns(record, "timestamp", S_NS)
        rows.add(number, time, *_lengths(record), session=chat, hashes=_hashes(record))
        parent_of.setdefault(chat, parent)
        return not rows.is_full

    lines.each(take)
    columns = rows.columns()
    root_of = _roots(parent_of)
    number_of = dict[int, int]()
    sessions = [number_of.setdefault(root_of[chat], len(number_of)) for chat in columns.session.tolist()]
    notes = [*columns.notes("timestamp is in s"), "Chats that go back to one chat by parent_chat_id are one session."]
    columns.session[:] = sessions
    return _draft(lines, columns, notes, BAILIAN_TOKENS)


def _lengths(record: dict[str, object]) -> tuple[int, int]:
    return whole(record, "input_length", least=1), whole(record, "output_length")


def _hashes(record: dict[str, object]) -> array[int]:
    found = record.get("hash_ids")
    if not isinstance(found, list):
        raise LineError(f"hash_ids is {shown(found)}, no list" if "hash_ids" in record else "hash_ids is missing")
    if not set(map(type, found)) <= {int}:
        raise LineError("hash_ids are not all whole numbers")
    try:
        return array("Q", found)
    except OverflowError:
        raise LineError("hash_ids are not all of 0 to 2**64 - 1") from None


def _draft(lines: Lines, columns: Columns, notes: list[str], usual_tokens: int) -> Draft:
    """Return requests whose number of hashes fits; the others are malformed."""
    num_hashes = np.diff(columns.hash_start)
    block_tokens = _block_tokens(num_hashes, columns.input_tokens, usual_tokens)
    notes.append(
        f"hash_ids are blocks of {block_tokens} tokens."
        if block_tokens == usual_tokens
        else f"hash_ids fit blocks of {block_tokens} tokens, and not the {usual_tokens} usual in this format."
    )
    needed = -(-columns.input_tokens // block_tokens)
    fits = num_hashes == needed
    for at in np.flatnonzero(~fits).tolist():
        lines.withdraw(
            int(columns.line[at]),
            f"{num_hashes[at]:,} hash_ids for {columns.input_tokens[at]:,} tokens; {needed[at]:,} are needed",
        )
    columns = columns.only(fits)
    ids = chained(columns.hashes, columns.hash_start, input_tokens=columns.input_tokens, block_tokens=block_tokens)
    num_hashes_unique = len(np.unique(columns.hashes))
    if len(ids) and int(ids.max()) >= num_hashes_unique:
        notes.append(
            f"Some hash_ids occur behind different prefixes: {num_hashes_unique:,} hash_ids make "
            f"{int(ids.max()) + 1:,} different blocks."
        )
    return Draft(block_tokens, columns, columns.hash_start, ids, notes)


def _block_tokens(num_hashes: Ids, input_tokens: Ids, usual: int) -> int:
    """Return the size most prompts fit, the usual one if that is as good as any."""
    sizes = [usual, *OTHER_TOKENS]
    num_fit = [int(np.count_nonzero(num_hashes == -(-input_tokens // size))) for size in sizes]
    return sizes[int(np.argmax(num_fit))]


def _roots(parent_of: dict[int, int]) -> dict[int, int]:
    """Return for each chat the first of its line of parents; of a circle, any."""
    root_of = dict[int, int]()
    for chat in parent_of:
        path, at = [], chat
        while at not in root_of:
            root_of[at] = at  # ends a circle, too
            path.append(at)
            parent = parent_of.get(at, -1)
            if parent < 0:
                break
            at = parent
        for one in path:
            root_of[one] = root_of[at]
    return root_of
