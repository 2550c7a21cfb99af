"""Answers to figures: what one answer is worth, and what many say, with the interval that so few allow. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from kvtide.select.contract import Floats
from kvtide.select.replay import Replayed
from kvtide.select.tasks import RETRIEVAL

_Z = 1.959963984540054  # of the normal distribution, for 95 %


@dataclass(frozen=True, slots=True)
class Answer:
    """One question answered with one method and budget, beside attention to everything. Logarithms are natural ones."""

    task: str
    context: int
    seed: int
    method: str
    budget: int | None  # None: all tokens
    is_exact: bool  # the likeliest token is right at every place of the answer
    log_likelihood: float  # of the right answer, a token
    log_likelihood_full: float
    kl: float  # of the next token's distribution from that of attention to everything
    top1: float  # share of places where the likeliest token is that of attention to everything
    attended: float  # tokens, a query and layer
    groups: float  # that a step's queries want together, a layer
    num_failed: int
    select_ns: float  # a query and layer


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """Answers of all seeds. `low` and `high` bound the score's 95 % interval, after Wilson; prose has no score."""

    task: str
    context: int
    method: str
    budget: int | None
    num: int
    num_exact: int
    score: float | None
    low: float | None
    high: float | None
    log_likelihood: float
    log_likelihood_change: float
    kl: float
    top1: float
    attended: float
    groups: float
    num_failed: int
    select_ns: float

    @property
    def perplexity(self) -> float:
        """Of the right answer's tokens."""
        return math.exp(-self.log_likelihood)


@dataclass(frozen=True, slots=True)
class MassRow:
    """Replays of all seeds: their mean."""

    context: int
    method: str
    budget: int | None
    num: int
    replayed: Replayed


@dataclass(frozen=True, slots=True)
class Replays:
    """One replay of one method and budget."""

    context: int
    seed: int
    method: str
    budget: int | None
    replayed: Replayed


def wilson(num_right: int, num: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of which `num_right` of `num` were seen (E. B. Wilson, 1927)."""
    if num == 0:
        return 0.0, 1.0
    share, square = num_right / num, _Z * _Z
    middle = share + square / (2 * num)
    half = _Z * math.sqrt(share * (1 - share) / num + square / (4 * num * num))
    scale = 1 + square / num
    low = 0.0 if num_right == 0 else (middle - half) / scale
    high = 1.0 if num_right == num else (middle + half) / scale
    return low, high


def compare(ours: Floats, full: Floats, answer: list[int]) -> dict[str, Any]:
    """Return what an answer's distributions are worth. Shapes: ours, full [n, vocabulary], log-probabilities."""
    places = np.arange(len(answer))
    best = ours.argmax(axis=1)
    return {
        "is_exact": bool((best == np.array(answer)).all()),
        "log_likelihood": float(ours[places, answer].mean()),
        "log_likelihood_full": float(full[places, answer].mean()),
        "kl": max(0.0, float((np.exp(full) * (full - ours)).sum(axis=1).mean())),
        "top1": float((best == full.argmax(axis=1)).mean()),
    }


def answer_rows(answers: Iterable[Answer]) -> list[AnswerRow]:
    """Return one row for each task, context, method and budget, in the order they first came."""
    gathered: dict[tuple[str, int, str, int | None], list[Answer]] = {}
    for each in answers:
        gathered.setdefault((each.task, each.context, each.method, each.budget), []).append(each)
    return [_answer_row(*key, found) for key, found in gathered.items()]


def _answer_row(task: str, context: int, method: str, budget: int | None, found: list[Answer]) -> AnswerRow:
    def mean(name: str) -> float:
        return float(np.mean([getattr(each, name) for each in found]))

    num_exact = sum(each.is_exact for each in found)
    has_score = task in RETRIEVAL
    low, high = wilson(num_exact, len(found)) if has_score else (None, None)
    return AnswerRow(
        task=task,
        context=context,
        method=method,
        budget=budget,
        num=len(found),
        num_exact=num_exact,
        score=num_exact / len(found) if has_score else None,
        low=low,
        high=high,
        log_likelihood=mean("log_likelihood"),
        log_likelihood_change=mean("log_likelihood") - mean("log_likelihood_full"),
        kl=mean("kl"),
        top1=mean("top1"),
        attended=mean("attended"),
        groups=mean("groups"),
        num_failed=sum(each.num_failed for each in found),
        select_ns=mean("select_ns"),
    )


def mass_rows(replays: Iterable[Replays]) -> list[MassRow]:
    """Return one row for each context, method and budget, in the order they first came."""
    gathered: dict[tuple[int, str, int | None], list[Replayed]] = {}
    for each in replays:
        gathered.setdefault((each.context, each.method, each.budget), []).append(each.replayed)
    return [MassRow(*key, len(found), _mean(found)) for key, found in gathered.items()]


def _mean(found: list[Replayed]) -> Replayed:
    names = [field.name for field in fields(Replayed) if field.name != "by_layer"]
    means: dict[str, Any] = {name: _mean_of([getattr(each, name) for each in found]) for name in names}
    layers = found[0].by_layer
    means["by_layer"] = {
        name: [_mean_of([each.by_layer[name][layer] for each in found]) for layer in range(len(layers[name]))]
        for name in layers
    }
    return Replayed(**means | {"fast_bytes": round(means["fast_bytes"])})


def _mean_of(values: list[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return float(np.mean(measured)) if measured else None


def rows_json(answers: Iterable[Answer], replays: Iterable[Replays]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of both as JSON values."""
    masses = []
    for row in map(asdict, mass_rows(replays)):
        replayed = row.pop("replayed")
        masses.append(row | replayed)
    return {"answers": [asdict(row) for row in answer_rows(answers)], "mass": masses}
