"""`kvtide why`: of a prompt or a key, what a store holds, and why not the rest. Next: report.

Owns the words. What a prompt's tokens are, and which identity its KV has, is decided as `kvtide run` does.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.cli_asking import read_bounded
from kvtide.cli_choices import check_groups
from kvtide.cli_layout import is_block_first
from kvtide.cli_run import DEFAULT_DIR, cache_dir, fast_dtype
from kvtide.errors import ConfigError, UnsupportedError
from kvtide.planner.layouts import layout_for
from kvtide.probe.file import find_knee
from kvtide.spec import Identity, KVShape, SlotLayout, auto_group_blocks
from kvtide.tiers.cipher import MasterKey
from kvtide.tiers.glance import Glance, glance
from kvtide.tiers.why import NEVER, OTHER_IDENTITY, OTHER_SALT, THERE, KeyWhy, Run, Why, why_key, why_prompt
from kvtide.units import printable

if TYPE_CHECKING:
    from kvtide.integrations.transformers import LoadedModel

WHY_EXAMPLE = "Example: kvtide why @notes.txt --dir .kvtide/store"
_KEY = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
_IDS = re.compile(r"(\[\s*)?[0-9]{1,20}(\s*,\s*[0-9]{1,20})+(\s*\])?", re.ASCII)
_WORDS = {
    THERE: "there",
    NEVER: "never stored, or too long ago to know",
    OTHER_SALT: "stored for another salt",
    OTHER_IDENTITY: "stored under another identity only",
    "evicted": "evicted for newer KV",
    "replaced": "replaced by a group with more tokens",
    "corrupt": "dropped: its checksum differed",
    "unreadable": "dropped: it could not be read",
    "full": "not stored: the store was full of KV in use",
    "failed": "not stored: the write failed",
    "refused": "not stored: admission refused it",
    "dropped": "dropped on request",
}


def why(
    prompt: Annotated[
        str, typer.Argument(help="A text, @FILE of a text, token ids with commas between, or a key of 64 hex digits.")
    ],
    directory: Annotated[Path, typer.Option("--dir", help="Directory of the file tier.")] = Path(DEFAULT_DIR),
    model: Annotated[str | None, typer.Option(help="Model folder or hub id. Default: the embedded SmolLM2.")] = None,
    dtype: Annotated[str | None, typer.Option(help="As of kvtide run.")] = None,
    block_tokens: Annotated[int, typer.Option(help="As of kvtide run.")] = 16,
    group_blocks: Annotated[str, typer.Option(help="As of kvtide run.")] = "auto",
    layout: Annotated[str, typer.Option(help="As of kvtide run.")] = "auto",
    salt: Annotated[
        list[str] | None, typer.Option(help="Salt the prompt is asked with; further ones are tried. Default: none.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="As of kvtide run: the key of encrypted KV.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why a prompt is not found in a store: never stored, evicted, another identity or salt, corrupt, refused.

    Changes nothing, and works while another process has the store open. A text is one message of a user, as the first
    question of kvtide run is: the document, an empty line, the question.
    """
    check_groups(group_blocks, block_tokens)
    if is_block_first(layout, group_blocks):
        group_blocks = "1"
    salts, master = _salts(salt), MasterKey.read(key_file) if key_file is not None else None
    found = glance(directory)
    if _KEY.fullmatch(prompt):
        told = why_key(bytes.fromhex(prompt), found)
        _print_json([_plain(one) for one in told], directory) if as_json else _print_keys(told, directory)
        return
    text = _read(prompt)
    are_ids = bool(_IDS.fullmatch(text.strip()))  # without the blanks around: nothing is tried twice
    if are_ids and model is None:
        wanted = [one.identity for one in found if one.identity is not None and not one.identity.facts]
        tokens = _ids(text)
    else:
        described = _described(model, dtype)
        tokens = _ids(text) if are_ids else _tokens(described, text)
        asked = _identity(described, directory, block_tokens, group_blocks, layout)
        wanted = [asked if master is None else dataclasses.replace(asked, encryption=master.name)]
    whys = [why_prompt(tokens, found, one, salts, master) for one in wanted]
    if as_json:
        _print_json([_plain(one) for one in whys], directory)
    else:
        _print_prompts(whys, found, directory)


def _salts(given: list[str] | None) -> list[str]:
    salts = list(given or [""])
    return salts if "" in salts else [*salts, ""]


def _read(prompt: str) -> str:
    """Return the prompt's text, from a file where it begins with @.

    Raises: ConfigError if it is empty, or its file cannot be read.
    """
    if not prompt.startswith("@"):
        text = prompt.encode(errors="surrogateescape").decode(errors="replace")
    else:
        raw = read_bounded(prompt[1:], told=prompt, needs="@ and the path of a text file")
        text = raw.decode(errors="replace")
    if not text.strip():
        raise ConfigError("the prompt is empty; type a text, @FILE, token ids or a key of 64 hex digits")
    return text


def _ids(text: str) -> npt.NDArray[np.int64]:
    ids = [int(word) for word in text.strip().strip("[]").split(",")]
    if max(ids) >= 1 << 32:
        raise ConfigError(f"token ids must be 0 to 2**32 - 1, got {max(ids)}")
    return np.array(ids, np.int64)


def _described(model: str | None, dtype: str | None) -> LoadedModel:
    try:
        from kvtide.integrations.transformers.models import describe
    except ImportError as error:
        raise UnsupportedError(f"{error}; type pip install 'kvtide[transformers]', or give token ids") from None
    return describe(model, dtype=dtype or fast_dtype(), cache_dir=cache_dir() / "models")


def _tokens(described: LoadedModel, text: str) -> npt.NDArray[np.int64]:
    from kvtide.integrations.transformers.turns import first_prompt

    return np.array(first_prompt(described, text), np.int64)


def _identity(described: LoadedModel, directory: Path, block_tokens: int, group_blocks: str, layout: str) -> Identity:
    """Return the identity of the KV that `kvtide run` would make with these options."""
    from kvtide.integrations.transformers.store import KNEE_BYTES

    shape = KVShape.of(described.spec, described.dtype)
    picked = layout_for(layout, None)
    knee = find_knee(cache_dir(), directory, KNEE_BYTES)
    group = None if group_blocks == "auto" else int(group_blocks)
    group = group or picked.group_blocks or auto_group_blocks(shape, block_tokens, knee.num_bytes)
    return described.identity(SlotLayout(shape, block_tokens, group, picked.layout.split))


# Words


def _plain(told: Why | KeyWhy) -> dict[str, Any]:
    return dataclasses.asdict(told)


def _print_json(told: list[dict[str, Any]], directory: Path) -> None:
    typer.echo(json.dumps({"directory": str(directory), "namespaces": told}))


def _print_keys(told: list[KeyWhy], directory: Path) -> None:
    known = [one for one in told if one.why != NEVER]
    for one in known:
        when = "" if one.departure is None else _when(one.departure.time_ns, one.departure.time_ns, one.departure.pid)
        typer.echo(f"{one.digest}: {_WORDS[one.why]}{when}")
    if not known:
        where = f"{printable(str(directory))}, {len(told)} namespaces"
        typer.echo(f"{where}: never stored in any, or too long ago to know")
    for one in told:
        _print_limits(one.digest, one.owner, one.problem)


def _print_prompts(whys: list[Why], found: list[Glance], directory: Path) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not whys:
        typer.echo(f"{printable(str(directory))} is a store without namespaces; nothing was stored.")
    models = {one.digest: one.identity.model for one in found if one.identity is not None}
    for told in whys:
        name = f"{told.digest} ({printable(models[told.digest])})" if told.digest in models else told.digest
        console.print(Text(f"{told.num_tokens:,} tokens in blocks of {told.block_tokens}, namespace {name}"))
        if not told.exists:
            console.print(Text("There is no such namespace: nothing was stored for this identity in this directory."))
        _print_runs(told, console)
        rest = told.num_tokens - told.reused_tokens
        console.print(Text(f"{told.reused_tokens:,} tokens would be reused, {rest:,} computed."))
        if told.is_full:
            console.print(Text("The store is full: what is stored next evicts what was not used for longest."))
        for other in told.others:
            pairs = other.fields.items()
            differs = "; ".join(f"{name}: {ours} here, {theirs} there" for name, (ours, theirs) in pairs)
            console.print(Text(printable(f"{other.digest} has {other.num_tokens:,} of these tokens, but {differs}")))
        _print_limits(told.digest, told.owner, told.problem)


def _print_runs(told: Why, console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("blocks", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for run in told.runs:
        first, end = run.first * told.block_tokens, run.end * told.block_tokens
        table.add_row(f"{run.first}-{run.end - 1}", f"{first}-{end - 1}", Text(printable(_words(run))))
    whole = told.num_tokens // told.block_tokens * told.block_tokens
    if whole < told.num_tokens:
        table.add_row("", f"{whole}-{told.num_tokens - 1}", "fill no block")
    console.print(table)


def _words(run: Run) -> str:
    if run.why == OTHER_SALT:
        return f"{_WORDS[run.why]}: {run.who!r}" if run.who else "stored without a salt"
    if run.why == OTHER_IDENTITY:
        return f"{_WORDS[run.why]}: {run.who}"
    return _WORDS[run.why] + (_when(run.from_ns, run.to_ns, int(run.who)) if run.to_ns else "")


def _when(from_ns: int, to_ns: int, pid: int) -> str:
    first, last = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ns // 10**9)) for ns in (from_ns, to_ns))
    return f", {first}{'' if first == last else f' to {last}'}, by process {pid}"


def _print_limits(digest: str, owner: int, problem: str) -> None:
    if problem:
        typer.echo(f"{digest} cannot be read: {printable(problem)}")
    if owner:
        who = f"process {owner}" if owner > 0 else "another process"
        typer.echo(
            f"{digest} is open in {who}: what it did in the last moments, or holds in memory alone, is not seen here."
        )
