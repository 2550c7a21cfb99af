"""Questions about a long text whose answers are known: what selected attention must still find. Pure. Next: scoring.

The text is running prose, the reference texts that ship with Python; facts are hidden in it at random depths. All
questions are asked of the same text, each of it alone. The prose that follows the text is a question, too: its tokens
are the answer. Sources: passkey, arXiv 2305.16300; several keys and chains of variables, RULER, arXiv 2404.06654.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from kvtide.errors import ConfigError
from kvtide.units import printable

RETRIEVAL = ("passkey", "needles", "variables")
TASKS = (*RETRIEVAL, "perplexity", "mass")
PROSE_TOKENS = 32  # that are predicted after the text
NUM_KEYS = 4
CONTEXT_MIN = 256
_PROSE_MIN = 64
_WORDS = (
    "harbour", "lantern", "meadow", "pepper", "violin", "glacier", "saddle", "orchard", "candle", "falcon", "bridge",
    "copper", "velvet", "island", "thunder", "basket", "marble", "kettle", "forest", "anchor",
)  # fmt: skip

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Question:
    """Tokens that are asked after the text, and those of the right answer."""

    task: str
    tokens: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Case:
    """A text of whole groups of tokens, and questions about it. Text, question and answer have `context` tokens."""

    context: int
    seed: int
    text: list[int]
    questions: list[Question]


def check_tasks(names: list[str]) -> None:
    """Refuse tasks that do not exist.

    Raises: ConfigError that names the first.
    """
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"--tasks has {printable(name)[:40]!r}; type any of {', '.join(TASKS)}")


def make_case(encode: Encode, tasks: list[str], *, context: int, seed: int, group_tokens: int) -> Case:
    """Return the text and questions that `seed` gives. `encode` turns text to tokens, without special ones.

    Raises: ConfigError for a context too short for them.
    """
    rng = np.random.default_rng([seed, context])
    facts, asked = _facts(rng, [task for task in tasks if task in RETRIEVAL])
    questions = [Question(task, encode(ask), encode(answer)) for task, ask, answer in asked]
    has_prose = "perplexity" in tasks or "mass" in tasks
    longest = max([len(each.tokens) + len(each.answer) for each in questions] + [PROSE_TOKENS + 1] * has_prose)
    num_text = (context - longest) // group_tokens * group_tokens
    hidden = [encode(fact) for fact in facts]
    num_prose = num_text - sum(map(len, hidden))
    if num_prose < _PROSE_MIN:
        raise ConfigError(f"a context of {context} tokens is too short for these tasks; type --contexts with more")
    sentences, rest = _prose(encode, rng, num_prose)
    if has_prose:
        questions.append(Question("perplexity", rest[:1], rest[1:]))
    return Case(context, seed, _hide(rng, sentences, hidden), questions)


def _facts(rng: np.random.Generator, tasks: list[str]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Return sentences to hide, chains in order, and (task, question, answer) for each task."""
    facts: list[str] = []
    asked: list[tuple[str, str, str]] = []
    words = [str(word) for word in rng.permutation(_WORDS)]
    numbers = [str(number) for number in rng.choice(np.arange(10000, 100000), NUM_KEYS + 2, replace=False)]
    if "passkey" in tasks:
        facts.append(f" The pass key is {numbers[0]}. Remember it.")
        asked.append(("passkey", " What is the pass key? The pass key is", f" {numbers[0]}"))
    if "needles" in tasks:
        keys = dict(zip(words[:NUM_KEYS], numbers[1 : NUM_KEYS + 1], strict=True))
        facts += [f" The special number of the {word} is {number}." for word, number in keys.items()]
        word = words[int(rng.integers(NUM_KEYS))]
        asked.append(("needles", f" The special number of the {word} is", f" {keys[word]}"))
    if "variables" in tasks:
        one, two, three = words[NUM_KEYS : NUM_KEYS + 3]
        facts.append(f" Variable {one} has the value {numbers[-1]}.")
        facts += [f" Variable {later} has the value of {earlier}." for earlier, later in ((one, two), (two, three))]
        asked.append(("variables", f" Variable {three} has the number", f" {numbers[-1]}"))
    return facts, asked


def _hide(rng: np.random.Generator, sentences: list[list[int]], hidden: list[list[int]]) -> list[int]:
    """Return the sentences as one text with each of `hidden`, in order, before one of them or at the end."""
    places = np.sort(rng.integers(1, len(sentences) + 1, len(hidden))).tolist()
    text: list[int] = []
    for index, sentence in enumerate([*sentences, []]):
        while places and places[0] == index:
            places.pop(0)
            text += hidden[len(hidden) - len(places) - 1]
        text += sentence
    return text


def _prose(encode: Encode, rng: np.random.Generator, num_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Return sentences of exactly `num_tokens`, from a place drawn at random, and the tokens that follow them."""
    lines = _sentences()
    place = int(rng.integers(len(lines)))
    found: list[list[int]] = []
    num_found, rest = 0, list[int]()
    while len(rest) <= PROSE_TOKENS:
        tokens = encode(f" {lines[place % len(lines)]}")
        place += 1
        if num_found < num_tokens:
            found.append(tokens)
            num_found += len(tokens)
        else:
            rest += tokens
    excess = num_found - num_tokens
    while excess >= len(found[0]):
        excess -= len(found.pop(0))
    found[0] = found[0][excess:]
    return found, rest[: PROSE_TOKENS + 1]


@cache
def _sentences() -> tuple[str, ...]:
    """Return the sentences of the prose in Python's reference texts: no code, no tables, no grammar."""
    from pydoc_data import topics

    found: list[str] = []
    for name in sorted(topics.topics):
        for paragraph in topics.topics[name].split("\n\n"):
            is_prose = paragraph[:1].isalpha() and paragraph.rstrip().endswith(".") and "**" not in paragraph
            if is_prose:
                line = " ".join(paragraph.split())
                found += [each for each in re.split(r"(?<=[.!?])\s+(?=[A-Z])", line) if each.count(" ") > 3]
    return tuple(found)
