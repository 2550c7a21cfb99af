"""`kvtide run --memory DIR`: what was said in earlier conversations comes back in later ones. Next: cli_run.

Decides what is kept of a turn, what is recalled for a question, and how that stands before it in the prompt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
import typer

from kvtide.recall import Memory
from kvtide.trace.events import CAUSES, MEMORY_CAUSES
from kvtide.trace.record import Recorder
from kvtide.units import format_bytes, printable

if TYPE_CHECKING:
    from kvtide.integrations.transformers import LoadedModel
    from kvtide.integrations.transformers.turns import Turn

RECALLED_MAX = 3
SCORE_MIN = 0.2  # of SmolLM2: right facts scored 0.24 and more, 95 % of the others less than 0.17
TEXT_CHARS_MAX = 600  # of a recalled text in a prompt
HEAD, TAIL = "[Recalled from earlier conversations]", "[End of what was recalled]"

MemoryDir = Annotated[
    Path | None,
    typer.Option(
        "--memory",
        metavar="DIR",
        help="Keep every turn in this directory, and recall what fits a question from earlier conversations.",
    ),
]


class Remembering:
    """A memory beside a run; without a directory it keeps and recalls nothing."""

    def __init__(self, directory: Path | None, loaded: LoadedModel, recorder: Recorder) -> None:
        self._recorder, self._memory = recorder, None
        self._said: dict[int, set[int]] = {}  # by conversation: what it has itself kept
        self._turns: list[dict[str, Any]] = []
        if directory is not None:
            from kvtide.integrations.transformers.embedding import Embedder

            self._embedder = Embedder(loaded)
            of = f"{printable(Path(loaded.name).name)[:80]}, weights {loaded.weights_digest[:32]}"
            self._memory = Memory.open(directory, self._embedder.dim, of=of, recorder=recorder)
        self._directory = directory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._memory is not None:
            self._memory.close()

    def turn(self, run: Callable[[str], Turn], question: str, conversation: int) -> Turn:
        """Run a turn with what is recalled before its question, and keep what was said."""
        if self._memory is None:
            return run(question)
        started_ns = time.perf_counter_ns()
        vector = self._embedder.embed(question)
        recalled = self._recall(vector, conversation)
        prompt = prompt_of(question, [one["text"] for one in recalled])
        recall_ns = time.perf_counter_ns() - started_ns
        turn = run(prompt)
        turn.question = question
        started_ns = time.perf_counter_ns()
        self._keep(conversation, [("user", question, vector), ("assistant", turn.answer, None)])
        keep_ns = time.perf_counter_ns() - started_ns
        self._turns.append({"recalled": recalled, "prompt": prompt, "recall_ns": recall_ns, "keep_ns": keep_ns})
        return turn

    def _recall(self, vector: np.ndarray[Any, np.dtype[np.float32]], conversation: int) -> list[dict[str, Any]]:
        """Return what was said in other conversations and is like the question, best first."""
        assert self._memory is not None, "asked only with a memory"
        own = np.array(sorted(self._said.get(conversation, ())), np.int64)
        ids, scores = self._memory.search(vector, RECALLED_MAX, lambda asked: ~np.isin(asked, own))
        good = (ids[0] >= 0) & (scores[0] >= SCORE_MIN)
        recalled = []
        for one, score, payload in zip(ids[0], scores[0], self._memory.get(ids[0][good]), strict=False):
            if said := _said(payload):
                recalled.append({"id": int(one), "score": round(float(score), 4), **said})
        return recalled

    def _keep(self, conversation: int, said: list[tuple[str, str, Any]]) -> None:
        assert self._memory is not None, "asked only with a memory"
        said = [one for one in said if one[1].strip()]
        now_ns = time.time_ns()
        ids = now_ns + np.arange(len(said))
        vectors = [self._embedder.embed(text) if vector is None else vector for _, text, vector in said]
        payloads = [json.dumps({"role": role, "text": text[: 1 << 16], "time_ns": now_ns}) for role, text, _ in said]
        self._memory.add(ids, np.stack(vectors), [payload.encode() for payload in payloads])
        self._said.setdefault(conversation, set()).update(ids.tolist())

    def report(self) -> dict[str, Any]:
        """Return what was recalled for each turn, and the I/O of the memory beside that of the KV."""
        if self._memory is None:
            return {}
        return {
            "memory": {
                "directory": str(self._directory),
                "rows": len(self._memory),
                "dim": self._memory.dim,
                "turns": self._turns,
                "io": self._io(),
            }
        }

    def _io(self) -> dict[str, dict[str, Any]]:
        ops = self._recorder.ops_between(0, self._recorder.counts()[1])
        is_memory = np.isin(ops["cause"], [CAUSES.index(cause) for cause in MEMORY_CAUSES])
        found = {"kv": _figures(ops[~is_memory]), "memory": _figures(ops[is_memory])}
        return found | {cause: _figures(ops[ops["cause"] == CAUSES.index(cause)]) for cause in MEMORY_CAUSES}

    def lines(self) -> list[str]:
        """Return what a person is told of it."""
        if self._memory is None:
            return []
        kv, memory = self._io()["kv"], self._io()["memory"]
        told = [
            f"Recalled for [{number + 1}]: {printable(one['text'][:200])} (score {one['score']:.2f})"
            for number, turn in enumerate(self._turns)
            for one in turn["recalled"]
        ]
        return [*told, f"Memory of {len(self._memory)} texts: {_told(memory)}. KV: {_told(kv)}."]


def prompt_of(question: str, recalled: list[str]) -> str:
    """Return a question behind what was recalled for it, which is marked as such."""
    if not recalled:
        return question
    texts = [" ".join(text[:TEXT_CHARS_MAX].split()).replace(TAIL, "").replace(HEAD, "") for text in recalled]
    return "\n".join([HEAD, *(f"- {text}" for text in texts), TAIL, "", question])


def _said(payload: bytes | None) -> dict[str, Any] | None:
    """Return what a payload says, None if it is none of ours."""
    try:
        said = json.loads(payload or b"")
        return {"role": str(said["role"]), "text": str(said["text"]), "time_ns": int(said["time_ns"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _figures(ops: np.ndarray[Any, np.dtype[np.void]]) -> dict[str, Any]:
    writes, length = ops["is_write"], ops["length"].astype(np.int64)
    return {
        "num_reads": int((~writes).sum()),
        "num_writes": int(writes.sum()),
        "read_bytes": int(length[~writes].sum()),
        "written_bytes": int(length[writes].sum()),
        "op_bytes_mean": float(length.mean()) if len(ops) else 0.0,
    }


def _told(figures: dict[str, Any]) -> str:
    read, written = format_bytes(figures["read_bytes"]), format_bytes(figures["written_bytes"])
    return f"{figures['num_writes']} writes of {written}, {figures['num_reads']} reads of {read}"
