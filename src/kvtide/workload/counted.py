"""Logs that know only how many tokens a prompt has: Azure LLM and BurstGPT, as CSV. Next: texts.

Decides what such prompts share: nothing, but for the turns of one session. Columns are found by their titles.
Source: READMEs of Azure/AzurePublicDataset (AzureLLMInferenceDataset2023 and 2024) and of HPMLL/BurstGPT, release 2.0.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from datetime import datetime

import numpy as np

from kvtide.spec.geometry import shown
from kvtide.workload.draft import Draft
from kvtide.workload.lines import S_NS, LineError, Lines, time_text_ns, whole_text
from kvtide.workload.prefixes import part_blocks
from kvtide.workload.requests import TIME_NS_MAX, Ids
from kvtide.workload.rows import Columns, Rows

BLOCK_TOKENS = 16  # these logs have no blocks; this is what engines use, as vLLM by default
AZURE = ("timestamp", "contexttokens", "generatedtokens")
BURST = ("timestamp", "request tokens", "response tokens")
_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII)
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - differences only; offsets are added by hand


def read_azure(lines: Lines, limit: int | None) -> Draft:
    """Read `TIMESTAMP,ContextTokens,GeneratedTokens`, the time as in 2023-11-16 18:17:03.9799600."""
    rows = Rows(limit)

    def take(number: int, cells: list[str]) -> bool:
        clock, context, generated = cells
        prompt = whole_text(context, "ContextTokens", least=1)
        rows.add(number, clock_ns(clock), prompt, whole_text(generated, "GeneratedTokens"))
        return not rows.is_full

    _each_row(lines, AZURE, (), take)
    columns = rows.columns()
    notes = [
        *columns.notes("TIMESTAMP is a clock of the day, to 100 ns"),
        "The log tells no content: every prompt is taken to be unlike all others, so nothing can hit.",
    ]
    return _draft(columns, np.arange(len(columns.line), dtype=np.int64), notes)


def read_burst(lines: Lines, limit: int | None) -> Draft:
    """Read `Timestamp,[Session ID,Elapsed time,]Model,Request tokens,Response tokens,Total tokens,Log Type`.

    Rows with no response tokens are failed requests, and left out.
    """
    rows, number_of = Rows(limit), dict[tuple[str, str], int]()
    num_failed, models = 0, set[str]()

    def take(number: int, cells: list[str]) -> bool:
        nonlocal num_failed
        clock, asked, answered, name, model = cells
        time = time_text_ns(clock, "Timestamp", S_NS)
        request = whole_text(asked, "Request tokens", least=1)
        response = whole_text(answered, "Response tokens")
        if not response:
            num_failed += 1
            return True
        models.add(model)
        session = number_of.setdefault((name, model), len(number_of)) if name else -1
        rows.add(number, time, request, response, session=session)
        return not rows.is_full

    _each_row(lines, BURST, ("session id", "model"), take)
    columns = rows.columns()
    streams, num_grown, num_anew = _histories(columns)
    notes = columns.notes("Timestamp is in s")
    if num_failed:
        notes.append(f"{num_failed:,} failed requests, which have 0 response tokens, were left out.")
    if len(models) > 1:
        notes.append(f"Requests of {len(models)} models are mixed; a session is one of one model.")
    notes.append(
        "The log tells no content: prompts share only what a session had before."
        if number_of
        else "The log tells neither content nor sessions: all prompts are taken to be unlike each other."
    )
    if num_grown + num_anew:
        notes.append(
            f"Of {num_grown + num_anew:,} later requests of sessions, {num_grown:,} are as long as the last prompt and "
            f"its answer, and are taken to begin with them; {num_anew:,} are shorter, and are taken to share nothing."
        )
    return _draft(columns, streams, notes)


def clock_ns(text: str) -> int:
    """Return ns since 1970 of `2023-11-16 18:17:03.9799600`, UTC where no offset follows. Raises: LineError."""
    match = _CLOCK.fullmatch(text)
    try:
        since = datetime.fromisoformat(f"{match[1]} {match[2]}") - _EPOCH if match else None
    except ValueError:
        since = None
    if match is None or since is None:
        raise LineError(f"TIMESTAMP is {shown(text)}, no time as in 2023-11-16 18:17:03.9799600")
    offset_s = (int(match[5]) * 3600 + int(match[6]) * 60) * (1 if match[4] == "+" else -1) if match[4] else 0
    seconds = since.days * 86_400 + since.seconds - offset_s
    found = seconds * S_NS + int(f"{match[3] or ''}{'0' * 9}"[:9])
    if not 0 <= found < TIME_NS_MAX:
        raise LineError(f"TIMESTAMP is {shown(text)}, not between 1970 and 2116")
    return found


def titles(line: str) -> list[str]:
    """Return the titles of a header line, as they are compared."""
    return [cell.strip().lower() for cell in _cells(line)]


def _each_row(
    lines: Lines, needed: tuple[str, ...], optional: tuple[str, ...], take: Callable[[int, list[str]], bool]
) -> None:
    """Give `take` those cells of each row, in this order; "" where the header lacks an optional one.

    Lines above the header are malformed.
    """
    header: list[str] = []
    places: list[int] = []

    def take_line(number: int, text: str) -> bool:
        if not header:
            found = titles(text)
            if not set(needed) <= set(found):
                raise LineError(f"no header yet: one with {', '.join(needed)} is needed")
            header.extend(found)
            places.extend(found.index(name) if name in found else len(found) for name in (*needed, *optional))
            lines.num_good -= 1  # a header is no request
            return True
        cells = _cells(text)
        if len(cells) != len(header):
            raise LineError(f"{len(cells)} cells where the header has {len(header)}")
        cells.append("")
        return take(number, [cells[place].strip() for place in places])

    lines.each(take_line)


def _cells(text: str) -> list[str]:
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text]), [])
    except csv.Error as error:
        raise LineError(f"no CSV: {error}") from None


def _histories(columns: Columns) -> tuple[Ids, int, int]:
    """Return for each request which text it is a beginning of, and how many continue one or begin anew.

    Shapes: [R].
    """
    streams = np.arange(len(columns.line), dtype=np.int64)  # the number of the request that begins the text
    last = dict[int, tuple[int, int]]()  # of each session: its text, and tokens of that so far
    num_grown = num_anew = 0
    for at in np.flatnonzero(columns.session >= 0).tolist():
        session, tokens = int(columns.session[at]), int(columns.input_tokens[at])
        stream, known = last.get(session, (at, 0))
        if tokens < known:
            stream = at
            num_anew += 1
        elif known:
            num_grown += 1
        streams[at] = stream
        last[session] = stream, tokens + int(columns.output_tokens[at])
    return streams, num_grown, num_anew


def _draft(columns: Columns, streams: Ids, notes: list[str]) -> Draft:
    start, ids = part_blocks(
        part_start=np.arange(len(streams) + 1, dtype=np.int64),
        part_keys=streams,
        part_tokens=columns.input_tokens,
        block_tokens=BLOCK_TOKENS,
    )
    notes.append(f"Prompts are cut into blocks of {BLOCK_TOKENS} tokens here; the log has none.")
    return Draft(BLOCK_TOKENS, columns, start, ids, notes)
