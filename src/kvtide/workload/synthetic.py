"""Workloads drawn by seeded generators: multi-turn chat, agents, retrieval, a batch. Pure.

Decides what the prompts of each kind share, and says so in the notes. All lengths are in tokens. Means belong to
geometric distributions, whose least length is 1, and gaps are exponential, so arrivals are Poisson. The defaults are
round numbers of ours and stand for no measured service.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.spec.geometry import shown, whole_number
from kvtide.spec.layout import BLOCK_TOKENS_MAX
from kvtide.workload.prefixes import part_blocks, within
from kvtide.workload.requests import BLOCKS_MAX, TIME_NS_MAX, TOKENS_MAX, Ids, Workload, make_workload

REQUESTS_MAX = 10_000_000
RATE_MIN, RATE_MAX = 1e-6, 1e6  # a second
GAP_S_MAX = 1e6
MEAN_TOKENS_MAX = 1e6
S_NS = 1_000_000_000
SYSTEM_KEY = -1  # of the part that all prompts begin with; sessions, documents and questions have keys from 0 on

Floats = npt.NDArray[np.float64]
_Number = TypeVar("_Number", np.int64, np.float64)


def multi_turn(
    *,
    num_sessions: int = 200,
    turns: float = 5.0,
    system_tokens: int = 256,
    message_tokens: float = 128.0,
    answer_tokens: float = 256.0,
    context_tokens: int = 32_768,
    sessions_per_s: float = 1.0,
    think_s: float = 30.0,
    block_tokens: int = 16,
    seed: int = 0,
) -> Workload:
    """Return chats: each prompt is a system prompt all share, what the session said so far, and a new message.

    Sessions have `turns` on average and end early where a prompt would exceed `context_tokens`. A turn follows the one
    before after `think_s` on average.

    Raises: ConfigError for options that are impossible, or if no prompt fits.
    """
    _means(turns=turns, message_tokens=message_tokens, answer_tokens=answer_tokens)
    _number("think_s", think_s, 0.0, GAP_S_MAX)
    return _sessions(
        "multi-turn",
        num_sessions=num_sessions,
        turns=turns,
        system_tokens=system_tokens,
        first_tokens=message_tokens,
        more_tokens=message_tokens,
        answer_tokens=answer_tokens,
        context_tokens=context_tokens,
        sessions_per_s=sessions_per_s,
        gap_s=think_s,
        block_tokens=block_tokens,
        seed=seed,
    )


def agentic(
    *,
    num_sessions: int = 50,
    steps: float = 15.0,
    system_tokens: int = 4_096,
    task_tokens: float = 512.0,
    tool_tokens: float = 600.0,
    answer_tokens: float = 150.0,
    context_tokens: int = 131_072,
    sessions_per_s: float = 0.2,
    tool_s: float = 3.0,
    block_tokens: int = 16,
    seed: int = 0,
) -> Workload:
    """Return agents at work: instructions and tools that all share, a task, then ever more output of tools.

    Each step repeats all before it and adds what a tool returned, which took `tool_s` on average.

    Raises: as `multi_turn`.
    """
    _means(steps=steps, task_tokens=task_tokens, tool_tokens=tool_tokens, answer_tokens=answer_tokens)
    _number("tool_s", tool_s, 0.0, GAP_S_MAX)
    return _sessions(
        "agentic",
        num_sessions=num_sessions,
        turns=steps,
        system_tokens=system_tokens,
        first_tokens=task_tokens,
        more_tokens=tool_tokens,
        answer_tokens=answer_tokens,
        context_tokens=context_tokens,
        sessions_per_s=sessions_per_s,
        gap_s=tool_s,
        block_tokens=block_tokens,
        seed=seed,
    )


def rag(
    *,
    num_requests: int = 1_000,
    num_documents: int = 1_000,
    documents_each: int = 4,
    document_tokens: int = 1_024,
    system_tokens: int = 512,
    question_tokens: float = 64.0,
    answer_tokens: float = 256.0,
    zipf: float = 1.0,
    requests_per_s: float = 2.0,
    block_tokens: int = 16,
    seed: int = 0,
) -> Workload:
    """Return questions on documents: a system prompt all share, some documents of one pool, a question of its own.

    The document of rank k is drawn in proportion to 1 / k**zipf; one that a prompt has already gives way to the next
    in rank. Documents stand in the order they were drawn in, so prompts share as far as their documents are the same
    from the first on, and no further.

    Raises: ConfigError for options that are impossible.
    """
    _count("num_requests", num_requests, REQUESTS_MAX)
    _count("num_documents", num_documents, REQUESTS_MAX)
    _count("documents_each", documents_each, min(num_documents, 1_000))
    whole_number("document_tokens", document_tokens, least=1, most=TOKENS_MAX // (2 * documents_each))
    whole_number("system_tokens", system_tokens, least=0, most=TOKENS_MAX // 4)
    _number("zipf", zipf, 0.0, 10.0)
    _means(question_tokens=question_tokens, answer_tokens=answer_tokens)
    _number("requests_per_s", requests_per_s, RATE_MIN, RATE_MAX)
    rng = _generator(seed, block_tokens)
    _fits(num_requests, system_tokens + documents_each * document_tokens, block_tokens, parts=documents_each + 2)
    documents = _documents(rng, num_requests, num_documents, documents_each, zipf)
    questions = _lengths(rng, question_tokens, num_requests)
    answers = _lengths(rng, answer_tokens, num_requests)
    num_parts = documents_each + 2
    keys = np.full((num_requests, num_parts), SYSTEM_KEY, np.int64)
    keys[:, 1:-1], keys[:, -1] = documents, num_documents + np.arange(num_requests)
    sizes = np.full((num_requests, num_parts), document_tokens, np.int64)
    sizes[:, 0], sizes[:, -1] = system_tokens, questions
    notes = (
        f"All prompts begin with the same {system_tokens:,} tokens.",
        f"{documents_each:,} of {num_documents:,} documents of {document_tokens:,} tokens follow, Zipf {zipf:g}.",
        "They stand in the order drawn; two prompts share them only as far as they are the same from the first on.",
        f"Arrivals are Poisson, {requests_per_s:g} a second; seed {seed}.",
    )
    start, ids = part_blocks(
        part_start=np.arange(num_requests + 1, dtype=np.int64) * num_parts,
        part_keys=keys.ravel(),
        part_tokens=sizes.ravel(),
        block_tokens=block_tokens,
    )
    return make_workload(
        name="rag",
        source="synthetic rag",
        block_tokens=block_tokens,
        arrival_ns=_in_ns(_poisson(rng, num_requests, requests_per_s)),
        input_tokens=sizes.sum(axis=1),
        output_tokens=answers,
        block_start=start,
        block_ids=ids,
        session=np.full(num_requests, -1, np.int64),
        notes=notes,
    )


def batch(
    *,
    num_requests: int = 32,
    input_tokens: int = 32_768,
    output_tokens: int = 256,
    shared_tokens: int = 0,
    block_tokens: int = 16,
) -> Workload:
    """Return prompts of equal length that all arrive at once: the same up to `shared_tokens`, then each its own.

    Raises: ConfigError for options that are impossible.
    """
    _count("num_requests", num_requests, REQUESTS_MAX)
    _count("input_tokens", input_tokens, TOKENS_MAX)
    whole_number("output_tokens", output_tokens, least=0, most=TOKENS_MAX)
    whole_number("shared_tokens", shared_tokens, least=0, most=input_tokens)
    _count("block_tokens", block_tokens, BLOCK_TOKENS_MAX)
    _fits(num_requests, input_tokens, block_tokens)
    keys = np.column_stack([np.full(num_requests, SYSTEM_KEY), np.arange(num_requests)]).ravel()
    start, ids = part_blocks(
        part_start=np.arange(num_requests + 1, dtype=np.int64) * 2,
        part_keys=keys,
        part_tokens=np.tile(np.array([shared_tokens, input_tokens - shared_tokens]), num_requests),
        block_tokens=block_tokens,
    )
    return make_workload(
        name="batch",
        source="synthetic batch",
        block_tokens=block_tokens,
        arrival_ns=np.zeros(num_requests, np.int64),
        input_tokens=np.full(num_requests, input_tokens),
        output_tokens=np.full(num_requests, output_tokens),
        block_start=start,
        block_ids=ids,
        session=np.full(num_requests, -1),
        notes=(f"All prompts arrive at once and have their first {shared_tokens:,} tokens in common.",),
    )


_KINDS: dict[str, Callable[..., Workload]] = {
    "multi-turn": multi_turn,
    "agentic": agentic,
    "rag": rag,
    "batch": batch,
}
NAMES = tuple(_KINDS)


def make(name: str, **options: float) -> Workload:
    """Return a workload of the kind `name`, one of NAMES, with the options of its function.

    Raises: ConfigError for an unknown kind or option, or options that are impossible.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name[:64], NAMES, n=3, cutoff=0.4) if isinstance(name, str) else []
        meant = f"near it: {', '.join(near)}; all" if near else "known"
        raise ConfigError(f"no synthetic workload is called {shown(name)}; {meant}: {', '.join(NAMES)}")
    known = list(inspect.signature(_KINDS[name]).parameters)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"{name} has no option {', '.join(unknown)}; choose from {', '.join(known)}")
    return _KINDS[name](**options)


def _sessions(
    kind: str,
    *,
    num_sessions: int,
    turns: float,
    system_tokens: int,
    first_tokens: float,
    more_tokens: float,
    answer_tokens: float,
    context_tokens: int,
    sessions_per_s: float,
    gap_s: float,
    block_tokens: int,
    seed: int,
) -> Workload:
    """Return sessions whose prompts repeat all that was said before."""
    _count("num_sessions", num_sessions, REQUESTS_MAX)
    _number("requests of all sessions on average", num_sessions * turns, 1.0, REQUESTS_MAX)
    _count("context_tokens", context_tokens, TOKENS_MAX)
    whole_number("system_tokens", system_tokens, least=0, most=context_tokens - 1)
    _number("sessions_per_s", sessions_per_s, RATE_MIN, RATE_MAX)
    rng = _generator(seed, block_tokens)
    counts = rng.geometric(1 / turns, num_sessions).astype(np.int64)
    num = int(counts.sum())
    session, turn = np.repeat(np.arange(num_sessions, dtype=np.int64), counts), within(counts)
    messages = np.where(turn == 0, _lengths(rng, first_tokens, num), _lengths(rng, more_tokens, num))
    answers = _lengths(rng, answer_tokens, num)
    said = _sums_within(messages + answers, counts) - answers
    begins = np.repeat(_poisson(rng, num_sessions, sessions_per_s), counts)
    times = begins + _sums_within(np.where(turn == 0, 0.0, rng.exponential(gap_s, num)), counts)
    fits = said + system_tokens <= context_tokens
    if not fits.any():
        raise ConfigError(
            f"no prompt fits context_tokens of {context_tokens:,}; make it larger, or the prompts shorter"
        )
    notes = (
        f"All prompts begin with the same {system_tokens:,} tokens, and repeat all their session said.",
        f"A session ends where a prompt would exceed {context_tokens:,} tokens.",
        f"Sessions begin as a Poisson process, {sessions_per_s:g} a second; seed {seed}.",
        f"They have {turns:g} turns on average, {gap_s:g} s apart on average whatever the answers take.",
    )
    kept = np.flatnonzero(fits)
    kept = kept[np.argsort(times[kept], kind="stable")]
    sizes = np.column_stack([np.full(len(kept), system_tokens), said[kept]])
    keys = np.column_stack([np.full(len(kept), SYSTEM_KEY), session[kept]])
    start, ids = part_blocks(
        part_start=np.arange(len(kept) + 1, dtype=np.int64) * 2,
        part_keys=keys.ravel(),
        part_tokens=sizes.ravel(),
        block_tokens=block_tokens,
    )
    return make_workload(
        name=kind,
        source=f"synthetic {kind}",
        block_tokens=block_tokens,
        arrival_ns=_in_ns(times[kept] - times[kept[0]]),
        input_tokens=sizes.sum(axis=1),
        output_tokens=answers[kept],
        block_start=start,
        block_ids=ids,
        session=session[kept],
        notes=notes,
    )


def _generator(seed: int, block_tokens: int) -> np.random.Generator:
    whole_number("seed", seed, least=0, most=(1 << 63) - 1)
    _count("block_tokens", block_tokens, BLOCK_TOKENS_MAX)
    return np.random.default_rng(seed)


def _poisson(rng: np.random.Generator, num: int, rate_per_s: float) -> Floats:
    """Return times of arrival in s, from 0 on. Shapes: [num]."""
    gaps = rng.exponential(1 / rate_per_s, num)
    gaps[0] = 0.0
    return np.cumsum(gaps)


def _in_ns(times_s: Floats) -> Ids:
    if times_s[-1] * S_NS >= TIME_NS_MAX:
        raise ConfigError(
            f"the last request would arrive after {times_s[-1]:g} s; type a higher rate or fewer requests"
        )
    return np.rint(times_s * S_NS).astype(np.int64)


def _lengths(rng: np.random.Generator, mean: float, num: int) -> Ids:
    """Return lengths of at least 1, and `mean` on average. Shapes: [num]."""
    return np.minimum(rng.geometric(1 / mean, num), TOKENS_MAX // 4).astype(np.int64)


def _sums_within(values: npt.NDArray[_Number], counts: Ids) -> npt.NDArray[_Number]:
    """Return sums from the beginning of each of `counts` to each place in it. Shapes: [sum of counts], [n]."""
    sums = np.cumsum(values)
    starts = np.cumsum(counts) - counts
    return sums - np.repeat(sums[starts] - values[starts], counts)


def _documents(rng: np.random.Generator, num: int, num_documents: int, each: int, zipf: float) -> Ids:
    """Return documents, 0 the most popular, no two of one prompt alike. Shapes: [num, each]."""
    odds = np.cumsum(np.arange(1, num_documents + 1, dtype=np.float64) ** -zipf)
    found = np.minimum(np.searchsorted(odds, rng.random((num, each)) * odds[-1], side="right"), num_documents - 1)
    for place in range(1, each):
        for _ in range(place):  # as many steps as there may be documents in the way
            is_taken = (found[:, :place] == found[:, place : place + 1]).any(axis=1)
            found[is_taken, place] = (found[is_taken, place] + 1) % num_documents
    return found.astype(np.int64)


def _fits(num_requests: int, tokens_each: int, block_tokens: int, *, parts: int = 2) -> None:
    """Refuse early what would not fit memory. Raises: ConfigError."""
    num = num_requests * max(-(-tokens_each // block_tokens), parts)
    if num > BLOCKS_MAX:
        raise ConfigError(f"the prompts would have {num:,} blocks; at most {BLOCKS_MAX:,} fit: type fewer requests")


def _count(name: str, value: int, most: int) -> None:
    whole_number(name, value, least=1, most=most)


def _means(**values: float) -> None:
    for name, value in values.items():
        _number(name, value, 1.0, MEAN_TOKENS_MAX)


def _number(name: str, value: float, least: float, most: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most:
        raise ConfigError(f"{name} must be a number in {least:g}..{most:g}, got {shown(value)}")
