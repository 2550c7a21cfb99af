"""The logs of requests kvtide reads: how each is called, told apart and loaded. Next: synthetic.

Decides which format a file has, by what its first lines hold and never by its name, and when a file is too damaged.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtide.errors import ConfigError, FormatError
from kvtide.spec.geometry import shown, whole_number
from kvtide.units import printable
from kvtide.workload.counted import AZURE, BURST, read_azure, read_burst, titles
from kvtide.workload.draft import Draft
from kvtide.workload.hashed import read_bailian, read_mooncake
from kvtide.workload.lines import LineError, Lines
from kvtide.workload.requests import Workload, make_workload
from kvtide.workload.texts import read_lmcache, read_sharegpt

AUTO = "auto"
_KEY = re.compile(r'(?<!\\)"(\w{1,40})"\s*+:', re.ASCII)  # a quote in a text has a backslash before it


@dataclass(frozen=True, slots=True)
class Format:
    """A format. `keys` are those of its JSON objects, or `titles` those of its CSV."""

    name: str
    title: str
    expected: str  # what a line looks like
    read: Callable[[Lines, int | None], Draft]
    keys: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()


FORMATS = (  # of two that fit a line, the one with more keys has it
    Format(
        "mooncake",
        "a Mooncake trace",
        '{"timestamp": ms, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ...]}',
        read_mooncake,
        keys=("timestamp", "input_length", "output_length", "hash_ids"),
    ),
    Format(
        "bailian",
        "a Qwen-Bailian trace",
        '{"chat_id": 1, "parent_chat_id": -1, "timestamp": s, "input_length": 521, ..., "hash_ids": [0, 1, ...]}',
        read_bailian,
        keys=("chat_id", "timestamp", "input_length", "output_length", "hash_ids"),
    ),
    Format("azure", "an Azure LLM trace", "a header TIMESTAMP,ContextTokens,GeneratedTokens", read_azure, titles=AZURE),
    Format(
        "burstgpt",
        "a BurstGPT trace",
        "a header Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        read_burst,
        titles=BURST,
    ),
    Format(
        "lmcache-agent",
        "an LMCache agent trace",
        '{"timestamp": us, "input": "...", "output": "...", "session_id": "..."}',
        read_lmcache,
        keys=("timestamp", "input"),
    ),
    Format(
        "sharegpt",
        "ShareGPT conversations",
        '[{"id": "...", "conversations": [{"from": "human", "value": "..."}, ...]}, ...]',
        read_sharegpt,
        keys=("conversations",),
    ),
)
NAMES = tuple(form.name for form in FORMATS)


def load_workload(path: Path, *, format: str = AUTO, limit: int | None = None) -> Workload:  # noqa: A002
    """Return the requests of the log at `path`, sorted by arrival.

    `limit` ends reading after that many requests, in the order of the file. Lines that cannot be read are counted, and
    the first of them are kept with their reasons.

    Raises: ConfigError for an unknown format, a path that cannot be used, or more blocks than fit; FormatError if
    nothing can be read, or more lines are malformed than not; IoError if reading fails.
    """
    if limit is not None:
        whole_number("limit", limit, least=1, most=1 << 62)
    if format not in {AUTO, *NAMES}:
        near = difflib.get_close_matches(format[:64], NAMES, n=3, cutoff=0.4)
        meant = f"near it: {', '.join(near)}; all" if near else "known"
        raise ConfigError(f"unknown format {shown(format)}; {meant}: {AUTO}, {', '.join(NAMES)}")
    lines = Lines(path)
    try:
        form = recognise(lines) if format == AUTO else next(form for form in FORMATS if form.name == format)
        draft = form.read(lines, limit)
        _check(form, lines, num_requests=len(draft.columns.line))
    finally:
        lines.close()
    columns = draft.columns
    return make_workload(
        name=printable(path.name),
        source=form.name,
        block_tokens=draft.block_tokens,
        arrival_ns=columns.time_ns,
        input_tokens=columns.input_tokens,
        output_tokens=columns.output_tokens,
        block_start=draft.block_start,
        block_ids=draft.block_ids,
        session=columns.session,
        notes=(*draft.notes, *lines.notes),
        malformed=lines.malformed,
    )


def recognise(lines: Lines) -> Format:
    """Return the format of a file, from its first lines. Raises: FormatError if it is none that is known."""
    head = [line.strip() for line in lines.head.removeprefix("\ufeff").splitlines()]
    votes = dict.fromkeys(NAMES, 0)
    for line in head:
        form = _looks_like(line)
        if form:
            votes[form.name] += 1
    best = max(FORMATS, key=lambda form: votes[form.name])
    if not votes[best.name]:
        first = next((line for line in head if line), "")
        raise FormatError(
            f"{lines.path} is no known log of requests; it begins with {printable(first[:80])!r}. "
            f"Known: {', '.join(NAMES)}; type --format to choose one"
        )
    return best


def _looks_like(line: str) -> Format | None:
    """Return the format a line is of, if any. A line that is cut off tells by the keys that are left."""
    if line.startswith(("{", "[", '"')):
        found = set(_KEY.findall(line))
        fit = [form for form in FORMATS if form.keys and set(form.keys) <= found]
        return max(fit, key=lambda form: len(form.keys), default=None)
    try:
        columns = set(titles(line))
    except LineError:
        return None
    return next((form for form in FORMATS if form.titles and set(form.titles) <= columns), None)


def _check(form: Format, lines: Lines, *, num_requests: int) -> None:
    """Raise FormatError if too little of a file could be used."""
    num_bad = lines.malformed.num
    if num_requests and num_bad <= lines.num_good:
        return
    where = "it has no requests"
    if num_bad:
        number, reason = lines.malformed.first[0]
        where = f"{num_bad:,} of {num_bad + lines.num_good:,} lines are malformed, first line {number}: {reason}"
    raise FormatError(
        f"{lines.path} is not {form.title}: {where}; expected {form.expected}. "
        f"Known formats: {', '.join(NAMES)}; type --format to choose one"
    )
