"""Methods of selected attention side by side on one model: the same texts and questions, each method and budget.

A text is computed once, with attention to everything; all methods summarise it in its last step. Then each question
runs through the sparse path of decoding, is taken back, and is asked with the next method. Its right answer is given
token by token: the likeliest token is right at every place exactly if greedy decoding would have given the answer.
Next: kvtide.report.select.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtide.errors import ConfigError
from kvtide.integrations.transformers.models import LoadedModel
from kvtide.integrations.transformers.recording import Recording, make_trace
from kvtide.integrations.transformers.selecting import Selecting
from kvtide.integrations.transformers.store import KvStore, SelectOptions, Session, StoreOptions
from kvtide.integrations.transformers.wiring import Wiring
from kvtide.select.compared import check_budgets, check_methods, make_compared
from kvtide.select.contract import Budget, Floats, Keys, Reach, Selection, Selector
from kvtide.select.replay import GROUP_TOKENS, Replay
from kvtide.select.scoring import Answer, Replays, compare
from kvtide.select.tasks import CONTEXT_MIN, PROSE_TOKENS, Case, Question, check_tasks, make_case
from kvtide.spec import KVShape

SUMMARY_TOKENS = 64  # of the text, in the step that summarises: whose queries the methods get to see
STEP_TOKENS = 16  # of a question: what a step adds is attended beside the budget, up to the recent window in it
MASS_QUERIES = 16  # that are replayed
_ROOM = 2  # DRAM, in texts: what was taken back stays until it is overwritten

OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What is compared. Every seed is one text."""

    methods: list[str]
    contexts: list[int]
    budgets: list[int]
    tasks: list[str]
    num_seeds: int = 3
    seed: int = 0  # the first one

    def check(self, max_positions: int) -> None:
        """Refuse what cannot be run.

        Raises: ConfigError that says what.
        """
        check_methods(self.methods)
        check_tasks(self.tasks)
        for context in self.contexts:
            if context > max_positions:
                raise ConfigError(
                    f"--contexts has {context}, and the model has {max_positions} positions; type {max_positions} or "
                    f"less, or --model with one for longer contexts"
                )
            if context < CONTEXT_MIN:
                raise ConfigError(f"--contexts has {context}; type {CONTEXT_MIN} or more")


@dataclass(slots=True)
class Compared:
    """What was found so far; `done` of `total` units of work."""

    answers: list[Answer] = field(default_factory=list)
    replays: list[Replays] = field(default_factory=list)
    done: int = 0
    total: int = 0

    @property
    def is_partial(self) -> bool:
        """Whether it was interrupted."""
        return self.done < self.total


class Several:
    """Selectors that summarise in one step. It selects nothing itself."""

    unit = 1
    is_ahead = False

    def __init__(self, selectors: list[Selector]) -> None:
        self._selectors = selectors

    def on_prefill(self, layer: int, keys: Keys, queries: Floats) -> None:
        for selector in self._selectors:
            selector.on_prefill(layer, keys, queries)

    def on_append(self, layer: int, keys: Keys) -> None:
        for selector in self._selectors:
            selector.on_append(layer, keys)

    def select(self, layer: int, query: Floats, reach: Reach) -> Selection:
        del layer, query
        return Selection.everything(reach.num_tokens)

    def fast_bytes(self) -> int:
        return sum(selector.fast_bytes() for selector in self._selectors)


class Comparison:
    """Runs all cases; `found` grows as it goes, so that an interrupted run has what it got to.

    Raises: ConfigError for options that cannot be run; UnsupportedError for models whose attention cannot be met.
    """

    def __init__(self, loaded: LoadedModel, options: CompareOptions, *, on_progress: OnProgress) -> None:
        options.check(loaded.max_positions)
        self._loaded, self._options, self._on_progress = loaded, options, on_progress
        self._wiring = Wiring(loaded)
        check_budgets(self._selectors(), options.budgets)
        self._pairs: list[tuple[str, int | None]] = [
            (name, budget) for name in options.methods for budget in ([None] if name == "full" else options.budgets)
        ]
        self.found = Compared(total=sum(self._units(context) for context in options.contexts))

    def run(self) -> Compared:
        """Run everything."""
        options = self._options
        for context in options.contexts:
            with KvStore(self._loaded, self._store_options(context)) as store:
                for seed in range(options.seed, options.seed + options.num_seeds):
                    case = make_case(self._encode, options.tasks, context=context, seed=seed, group_tokens=GROUP_TOKENS)
                    _Run(store, case, self._wiring, self._selectors(), self._pairs, self._asked(case), self).run()
        return self.found

    def tick(self, what: str, num: int = 1) -> None:
        """Note that `num` units of work are done, and that `what` comes next."""
        self.found.done += num
        self._on_progress(self.found.done, self.found.total, what)

    @property
    def has_mass(self) -> bool:
        """Whether attention mass is asked for."""
        return "mass" in self._options.tasks

    def _asked(self, case: Case) -> list[Question]:
        return [question for question in case.questions if question.task in self._options.tasks]

    def _selectors(self) -> dict[str, Selector]:
        heads = self._wiring.heads
        return {name: make_compared(name, heads, group_tokens=GROUP_TOKENS) for name in self._options.methods}

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._loaded.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _units(self, context: int) -> int:
        """Return the units of work of a context: a text is about as much as a question is for each 64 tokens."""
        return self._options.num_seeds * (prefill_units(context) + len(self._options.tasks) * len(self._pairs))

    def _store_options(self, context: int) -> StoreOptions:
        shape = KVShape.of(self._loaded.spec, self._loaded.dtype)
        text_bytes = (context + PROSE_TOKENS + 4 * GROUP_TOKENS) * shape.bytes_per_token
        return StoreOptions(
            device_bytes=text_bytes,
            dram_bytes=_ROOM * text_bytes + (64 << 20),
            block_tokens=GROUP_TOKENS,
            group_blocks=1,
            is_prefetching=False,
            select=SelectOptions("full", Budget(share=1.0)),
        )


def prefill_units(context: int) -> int:
    """Return how many questions' work the computing of a text is, roughly: only the progress bar counts in these."""
    return max(1, context // 64)


class _Run:
    """One case: its text is computed, then every question is asked with every method and budget."""

    def __init__(
        self,
        store: KvStore,
        case: Case,
        wiring: Wiring,
        selectors: dict[str, Selector],
        pairs: list[tuple[str, int | None]],
        questions: list[Question],
        owner: Comparison,
    ) -> None:
        assert store.selecting is not None, "the store was opened to select"
        self._store, self._case, self._wiring, self._selectors = store, case, wiring, selectors
        self._pairs, self._questions, self._owner = pairs, questions, owner
        self._selecting: Selecting = store.selecting
        self._session: Session = store.session(case.text)

    def run(self) -> None:
        """Run the case."""
        case, session = self._case, self._session
        where = f"{case.context} tokens, seed {case.seed}"
        try:
            self._owner.tick(f"{where}: the text", 0)
            earlier = self._summarise()
            self._owner.tick(where, prefill_units(case.context))
            for question in self._questions:
                full = self._ask(question, is_full=True)
                for name, budget in self._pairs:
                    self._answer(question, full, name, budget)
                    self._owner.tick(f"{where}: {question.task}")
            if self._owner.has_mass:
                self._replay(earlier, where)
        finally:
            session.release()

    def _summarise(self) -> Recording:
        """Compute the text; have all methods summarise it in the last step, and return that step's queries."""
        session, num = self._session, len(self._case.text)
        session.prefill()
        if session.kv.num_tokens > num - SUMMARY_TOKENS:
            self._take_back(num - SUMMARY_TOKENS)
        elif session.kv.num_tokens < num - SUMMARY_TOKENS:
            session.forward(session.kv.num_tokens, num - SUMMARY_TOKENS)
        self._selecting.selector = Several(list(self._selectors.values()))
        self._selecting.start(session.kv.sequences[0])
        session.kv.selecting = self._selecting
        with Recording(self._wiring) as earlier:
            session.forward(num - SUMMARY_TOKENS, num)
        assert self._selecting.is_sparse, "the step summarised"
        return earlier

    def _answer(self, question: Question, full: Floats, name: str, budget: int | None) -> None:
        """Ask with one method and budget, and note what came of it."""
        selecting = self._selecting
        selecting.swap(copy.deepcopy(self._selectors[name]), _budget(budget))  # as it was after the text
        ours = self._ask(question, is_full=False)
        counts = selecting.counts
        num_queries, parts = max(1, counts.num_queries), self._store.layout.parts_per_layer
        num_layers = len(self._wiring.modules)
        answer = Answer(
            task=question.task,
            context=self._case.context,
            seed=self._case.seed,
            method=name,
            budget=budget,
            **compare(ours, full, question.answer),
            attended=counts.num_attended / num_queries,
            groups=counts.num_wanted / parts / num_layers / max(1, counts.num_steps),
            num_failed=counts.num_failed,
            select_ns=counts.select_ns / num_queries,
        )
        self._owner.found.answers.append(answer)

    def _ask(self, question: Question, *, is_full: bool, is_kept: bool = False) -> Floats:
        """Run a question with its answer; return the log-probabilities at the answer. Shapes: [answer, vocabulary]."""
        kv, model = self._session.kv, self._store.loaded.model
        kv.selecting = None if is_full else self._selecting
        ids = [*question.tokens, *question.answer[:-1]]
        begin, logits = len(question.tokens) - 1, []
        with torch.inference_mode():
            for start in range(0, len(ids), STEP_TOKENS):
                step = torch.tensor([ids[start : start + STEP_TOKENS]], device=model.device)
                num = min(step.shape[1], max(1, start + step.shape[1] - begin))
                out: Any = model(input_ids=step, cache=kv, use_cache=True, logits_to_keep=num)
                if start + step.shape[1] > begin:
                    logits.append(out.logits[0].float())
            found = torch.log_softmax(torch.cat(logits), dim=-1).cpu().numpy()
        if not is_kept:
            self._take_back(len(self._case.text))
        rows: Floats = found
        return rows

    def _replay(self, earlier: Recording, where: str) -> None:
        """Record the prose after the text with attention to everything, and replay it to every method and budget."""
        prose = next(question for question in self._case.questions if question.task == "perplexity")
        with Recording(self._wiring) as latest:
            self._ask(prose, is_full=True, is_kept=True)
        sequence = self._session.kv.sequences[0]
        trace = make_trace(earlier, latest, self._wiring, self._store.cache, sequence, num_queries=MASS_QUERIES)
        replay = Replay(trace)
        for name, budget in self._pairs:
            found = replay.run(self._selectors[name], _budget(budget))
            case = self._case
            self._owner.found.replays.append(Replays(case.context, case.seed, name, budget, found))
            self._owner.tick(f"{where}: mass")

    def _take_back(self, num_tokens: int) -> None:
        self._store.cache.truncate(self._session.kv.sequences[0], num_tokens)


def _budget(tokens: int | None) -> Budget:
    return Budget(share=1.0) if tokens is None else Budget(tokens=tokens)
