"""What `kvtide run` is asked: the document, the default one, and the questions, given, default or typed.

Owns the default text and questions. Next: cli_run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtide.errors import ConfigError
from kvtide.units import format_bytes

if TYPE_CHECKING:
    from kvtide.integrations.transformers import LoadedModel

DOCUMENT_TOKENS = 4000  # of the default text: enough that computing it again hurts, few enough for two cores
DEFAULT_QUESTIONS = (
    ("What does the assert statement do?", "How can it be switched off?"),
    ("What is the difference between break and continue?", "Give one line of code for each."),
)
TEXT_BYTES_MAX = 64 << 20  # no model has positions for more


def check_questions(ask: list[str] | None, document: str | None, *, chat: bool) -> None:
    """Refuse questions that cannot be asked.

    Raises: ConfigError that says which.
    """
    if chat and ask:
        raise ConfigError("--chat asks from the keyboard, --ask from the command line; type one of them")
    if chat and document == "-":
        raise ConfigError("--chat and --document - both read standard input; type the path of a text file")
    if any(not question.strip() for question in ask or ()):
        raise ConfigError("--ask is empty; type a question")


def read_document(name: str | None) -> str | None:
    """Return the document's text, None for the default one.

    Raises: ConfigError if it cannot be read, is empty, no text or too long.
    """
    if name is None:
        return None
    raw = read_bounded(None if name == "-" else name, told=f"--document {name}", needs="the path of a text file, or -")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--document {name} is no UTF-8 text: byte {error.start}; convert it first") from None
    if not text.strip():
        raise ConfigError(f"--document {name} is empty: there is nothing to ask about")
    return text


def read_bounded(name: str | None, *, told: str, needs: str) -> bytes:
    """Return the bytes of a text file, of standard input for None. `told` is what it is called, `needs` what to type.

    Raises: ConfigError if it cannot be read, or is too long.
    """
    try:
        if name is None:
            raw = sys.stdin.buffer.read(TEXT_BYTES_MAX + 1) if sys.stdin is not None else b""
        else:
            with Path(name).open("rb") as file:
                raw = file.read(TEXT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{told}: {error.strerror}; type {needs}") from None
    if len(raw) > TEXT_BYTES_MAX:
        raise ConfigError(f"{told} is larger than {format_bytes(TEXT_BYTES_MAX)}; give a shorter text")
    return raw


def default_document(loaded: LoadedModel) -> str:
    """Return the beginning of the reference texts that ship with Python, cut to a number of tokens."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    limit = min(DOCUMENT_TOKENS, loaded.max_positions // 2)
    ids = loaded.tokenizer(text[: limit * 8], add_special_tokens=False).input_ids[:limit]
    return str(loaded.tokenizer.decode(ids))


def questions(ask: list[str] | None, *, chat: bool, has_document: bool) -> list[Any]:
    """Return the questions, a list or an iterator of them for each conversation."""
    if chat:
        return [_lines()]
    if ask:  # bytes that are no UTF-8 come as surrogates, which no tokenizer takes
        return [[question.encode(errors="surrogateescape").decode(errors="replace") for question in ask]]
    if has_document:
        return [["Summarise this text in two sentences."]]
    return [list(questions) for questions in DEFAULT_QUESTIONS]


def _lines() -> Iterator[str]:
    """Yield what is typed, a line a turn, until end of file or an empty line."""
    while sys.stdin is not None:
        if sys.stdin.isatty():
            print("\nAsk (an empty line ends): ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline().decode(errors="replace")
        if not line.strip():
            return
        yield line.strip()
