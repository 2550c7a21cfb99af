"""`kvtide run`: answer questions about a long document with the KV cache in tiers, and show what its I/O cost.

Owns the defaults: the embedded model, a text that ships with Python, budgets small enough that every tier is used.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvtide.cli_asking import check_questions, default_document, read_document
from kvtide.cli_choices import check_choices, option_size
from kvtide.cli_handing import Handing, check_role
from kvtide.cli_layout import is_block_first, lay_out
from kvtide.cli_memory import MemoryDir, Remembering
from kvtide.cli_metrics import MetricsAddress, serving
from kvtide.cli_places import places, quiet_libraries, remote_report
from kvtide.cli_select import select_lines, select_options, select_report
from kvtide.errors import UnsupportedError
from kvtide.probe.file import find_knee
from kvtide.spec import KVShape
from kvtide.tiers.dial import without_secrets
from kvtide.trace.extents import traced_file
from kvtide.trace.file import About
from kvtide.trace.record import Recorder
from kvtide.units import format_bytes, printable

if TYPE_CHECKING:
    from kvtide.integrations.transformers import KvStore, LoadedModel, StoreOptions
    from kvtide.integrations.transformers.turns import Conversation, Turn, TurnRunner

RUN_EXAMPLE = "Example: kvtide run --document notes.txt --ask 'What is decided?' --device-memory 16MiB --dram 64MiB"
DEFAULT_DIR = ".kvtide/store"
CHAT_TURNS = 64  # that the default budgets have room for


def run(
    model: Annotated[str | None, typer.Option(help="Model folder or hub id. Default: the embedded SmolLM2.")] = None,
    document: Annotated[str | None, typer.Option(help="Text file, or - for standard input.")] = None,
    ask: Annotated[list[str] | None, typer.Option(help="A question; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask from the keyboard, one line a turn.")] = False,
    directory: Annotated[Path, typer.Option("--dir", help="Directory of the file tier.")] = Path(DEFAULT_DIR),
    device_memory: Annotated[
        str | None, typer.Option(help="Budget of the device tier. Default: a tenth of the KV.")
    ] = None,
    dram: Annotated[str | None, typer.Option(help="Budget of the DRAM tier. Default: half of the KV.")] = None,
    disk: Annotated[str, typer.Option(help="Capacity of the file tier; 0 for none.")] = "2GiB",
    remote: Annotated[
        str | None,
        typer.Option(
            envvar="KVTIDE_REMOTE",
            metavar="URL",
            help="Remote that machines share: valkey://, unix:// or mooncake:// (docs/remote.md).",
        ),
    ] = None,
    role: Annotated[
        str,
        typer.Option(help="both; or prefill: leave a prompt's KV on the remote; decode: wait for it and answer."),
    ] = "both",
    wait_s: Annotated[float, typer.Option(help="Longest wait of --role decode for KV; the rest is computed.")] = 60.0,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    group_blocks: Annotated[
        str,
        typer.Option(
            help="Blocks stored together, or auto: enough for the drive's knee, as `kvtide probe` measured it. A new "
            "probe may change auto; KV stored in groups of another size is then not found."
        ),
    ] = "auto",
    layout: Annotated[
        str,
        typer.Option(
            help="How KV lies in the store: groups (a layer of a group is one piece), block-first (groups of 1 block), "
            "kv-apart (keys and values are pieces of their own), head-major (every KV head is one), or auto: what the "
            "drive reads soonest with --select, else groups. KV stored in another layout is not found."
        ),
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 48,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Answers drawn for each question from one prompt.")] = 1,
    salt: Annotated[str, typer.Option(help="Tenant: KV is shared only within one salt.")] = "",
    key_file: Annotated[
        Path | None,
        typer.Option(help="Encrypt KV on disk and on a remote under the 32 bytes in this file (docs/security.md)."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. Default: what is fast here.")] = None,
    engine: Annotated[str, typer.Option(help="auto, uring or threads.")] = "auto",
    write_policy: Annotated[str, typer.Option(help="through: store at once; back: when evicted.")] = "through",
    reuse: Annotated[
        str, typer.Option(help="Kept KV below DRAM: auto (load it if that is faster than computing), always, never.")
    ] = "auto",
    select: Annotated[
        str,
        typer.Option(help="Attend to a selection of the KV: none (everything), auto (lowrank), or a method's name."),
    ] = "none",
    budget: Annotated[
        str, typer.Option(help="Tokens each layer attends to with --select: a number, or a share as 10%.")
    ] = "512",
    verify: Annotated[bool, typer.Option("--verify", help="Compare with transformers' own cache.")] = False,
    trace: Annotated[
        Path | None, typer.Option(envvar="KVTIDE_TRACE", help="Write every object and operation to this trace file.")
    ] = None,
    metrics: MetricsAddress = None,
    memory: MemoryDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Answer questions about a long document, its KV cache kept in device, DRAM and file tiers.

    A second run finds the document's KV on disk and answers many times sooner.
    """
    if remote is not None:
        quiet_libraries()
    given = {"--device-memory": device_memory, "--dram": dram, "--disk": disk}
    sizes = {name: option_size(name, text) for name, text in given.items()}
    check_choices(group_blocks, block_tokens, write_policy, engine, reuse, trace)
    if is_block_first(layout, group_blocks) or (layout != "auto" and select != "none" and group_blocks == "auto"):
        group_blocks = "1"  # a selection is of groups: small ones are chosen well
    check_questions(ask, document, chat=chat)
    check_role(role, remote, ask, chat=chat, wait_s=wait_s, reuse=reuse)
    selected = select_options(select, budget)
    text = read_document(document)
    console = Console(stderr=as_json, highlight=False, markup=False, emoji=False)
    with waiting(console, "Loading the model"):
        try:
            from kvtide.integrations.transformers import KvStore, load
            from kvtide.integrations.transformers.store import KNEE_BYTES
            from kvtide.integrations.transformers.turns import Conversation, TurnOptions, TurnRunner
        except ImportError as error:
            raise UnsupportedError(f"{error}; type pip install 'kvtide[transformers]'") from None

        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        loaded = load(model, dtype=dtype or fast_dtype(), cache_dir=cache_dir() / "models")
    text = text if text is not None else default_document(loaded)
    recorder = Recorder()
    knee = find_knee(cache_dir(), directory, KNEE_BYTES) if group_blocks == "auto" else None
    options = _store_options(
        loaded,
        text,
        sizes,
        directory,
        max_new_tokens=max_new_tokens,
        num_turns=CHAT_TURNS if chat else len(ask or ()),
        block_tokens=block_tokens,
        group_blocks=None if knee else int(group_blocks),
        knee_bytes=knee.num_bytes if knee else KNEE_BYTES,
        remote=remote,
        engine=engine,
        write_policy=write_policy,
        reuse=reuse,
        select=selected,
        key_file=key_file,
    )
    shape, num_tokens = KVShape.of(loaded.spec, loaded.dtype), _num_tokens(loaded, text)
    options, laid = lay_out(options, layout, shape, num_tokens, cache_dir=cache_dir())
    show = _Show(console, is_quiet=as_json)
    remembering = Remembering(memory, loaded, recorder)
    with remembering, KvStore(loaded, options, recorder=recorder) as store, serving(metrics, store, recorder, console):
        show.opening(store, laid.lines())
        turn_options = TurnOptions(max_new_tokens=max_new_tokens, num_samples=samples, salt=salt, is_verified=verify)
        runner = TurnRunner(store, recorder, turn_options, on_text=show.text, on_prefill=show.prefill)
        turns: list[Turn] = []
        handing = Handing(role, store, salt)
        if ask and role != "both":
            handing.begin(Conversation(loaded, text), ask[0], wait_s=wait_s, on_progress=show.prefill)
        for index, asked in enumerate(handing.questions(ask, chat=chat, has_document=document is not None)):
            one = partial(show.turn, runner, Conversation(loaded, text), index)
            turns.extend(remembering.turn(one, question, index) for question in asked)
        store.cache.flush()
        about = _about(store) if trace is not None else None
        report = _report(store, turns, verify=verify) | handing.report(turns) | remembering.report() | laid.report()
        report["knee"] = dataclasses.asdict(knee) if knee else None
        if not as_json:
            show.summary(store, turns, [*handing.lines(turns), *remembering.lines()], verify=verify)
    _write_out(report, recorder, trace, about, show, as_json=as_json)
    if verify and not report["tokens_equal"]:
        raise typer.Exit(1)


def _write_out(
    report: dict[str, Any], recorder: Recorder, trace: Path | None, about: About | None, show: _Show, *, as_json: bool
) -> None:
    """Write the trace, if one is asked for, and the report."""
    try:
        if trace is not None:
            report["trace"] = {"file": str(trace), "events": recorder.write_parquet(trace, about)}
            show.line(f"Trace: {report['trace']['events']} events in {trace}")
    finally:  # what was measured is told even where the trace cannot be written
        if as_json:
            print(json.dumps(report))


def _store_options(
    loaded: LoadedModel,
    text: str,
    sizes: dict[str, int | None],
    directory: Path,
    *,
    max_new_tokens: int,
    num_turns: int,
    **rest: Any,
) -> StoreOptions:
    """Fill in budgets that were not given, from the KV of the document: a tenth on the device, half in DRAM."""
    from kvtide.cache.steps import PREFILL_TOKENS
    from kvtide.integrations.transformers import StoreOptions

    num_tokens = _num_tokens(loaded, text)
    num_tokens += max(4, num_turns) * (max_new_tokens + 64)
    num_tokens = min(num_tokens, loaded.max_positions)
    shape = KVShape.of(loaded.spec, loaded.dtype)
    whole_bytes = num_tokens * shape.bytes_per_token
    layer_bytes = max(layer.token_bytes for layer in shape.layers) * (num_tokens + 1024)
    dram_least = (2 * PREFILL_TOKENS + 2048) * shape.bytes_per_token
    return StoreOptions(
        device_bytes=sizes["--device-memory"] or max(whole_bytes // 10, 2 * layer_bytes),
        dram_bytes=sizes["--dram"] or max(whole_bytes // 2, dram_least),
        disk_bytes=sizes["--disk"] or 0,
        directory=directory,
        **rest,
    )


def _num_tokens(loaded: LoadedModel, text: str) -> int:
    """Return the tokens of the document."""
    return max(1, len(loaded.tokenizer(text, add_special_tokens=False).input_ids))


def _about(store: KvStore) -> About:
    """Return what a trace of `store` must say of itself: the file its ops go to, and where that lies."""
    about = About(
        source="kvtide", command=without_secrets(" ".join(sys.argv)), pid=os.getpid(), host=os.uname().nodename
    )
    if store.namespace is not None:
        file, why_unknown = traced_file(store.namespace.path / "data.kvt", store.namespace.fd)
        about.files = [file]
        about.notes = [f"Block commands cannot be joined to ops: {why_unknown}."] if why_unknown else []
    return about


def fast_dtype() -> str | None:
    """Return fp32 on a CPU without bf16 arithmetic, where bf16 is several times slower; else None, the model's own."""
    import torch

    if torch.cuda.is_available():
        return None
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return None if has_bf16 else "fp32"


def cache_dir() -> Path:
    """Return where kvtide keeps what it can make again."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "kvtide"


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Say `what` is going on, if somebody is there to see it."""
    with console.status(f"{what} ...") if console.is_terminal else _nothing():
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Show:
    """What a person sees while turns run."""

    def __init__(self, console: Console, *, is_quiet: bool) -> None:
        self._console, self._is_quiet = console, is_quiet
        self._progress: Progress | None = None
        self._task: Any = None

    def line(self, text: str) -> None:
        if not self._is_quiet:
            self._console.print(printable(text, keep="\n"), soft_wrap=True)

    def opening(self, store: KvStore, more: list[str]) -> None:
        options, layout, parts = store.options, store.layout, store.layout.parts_per_layer
        where = "no file tier"
        if store.namespace is not None:
            kind = "direct I/O" if store.namespace.is_direct else "through the page cache"
            where = f"{store.namespace.path} ({store.namespace.engine_name}, {kind})"
        self.line(
            f"{store.loaded.name} in {store.loaded.dtype.value}: {layout.shape.bytes_per_token} B of KV a token, "
            f"groups of {layout.tokens_per_group} tokens, {format_bytes(sum(layout.fragment_bytes[:parts]))} a layer"
            f"{f' in {parts} parts' if parts > 1 else ''}"
        )
        self.line(
            f"device {format_bytes(options.device_bytes)}, DRAM {format_bytes(options.dram_bytes)}, "
            f"file {format_bytes(options.disk_bytes)}: {where}"
        )
        if store.remote is not None:
            self.line(f"remote {store.remote.name}")
        for line in more:
            self.line(line)

    def text(self, piece: str) -> None:
        if not self._is_quiet:
            self._stop_progress()
            self._console.print(printable(piece, keep="\n\t"), end="", soft_wrap=True)

    def prefill(self, done: int, total: int) -> None:
        if self._is_quiet or not self._console.is_terminal:
            return
        if self._progress is None:
            columns = (TextColumn("prefill"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task("prefill", total=total)
            self._progress.start()
        self._progress.update(self._task, completed=done)

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def turn(self, runner: TurnRunner, conversation: Conversation, index: int, question: str) -> Turn:
        self.line(f"\n[{index + 1}] {printable(question, keep=chr(10))}")
        try:
            turn = runner.run(conversation, question, index=index)
        finally:
            self._stop_progress()
        self.line("")
        return turn

    def summary(self, store: KvStore, turns: list[Turn], handed: list[str], *, verify: bool) -> None:
        from kvtide.report.turns import tier_table, turn_table, verdict

        width = None if self._console.is_terminal else 170
        console = Console(highlight=False, width=width, markup=False, emoji=False)
        if not turns:
            for sentence in handed or ["Nothing was asked."]:
                console.print(sentence)
            return
        console.print()
        console.print(turn_table(turns, store.layout.shape.bytes_per_token, width=console.width))
        console.print(tier_table(store.cache.usage(), places(store)))
        for sentence in (*handed, *select_lines(store), *verdict(turns)):
            console.print(sentence)
        if store.cache.num_refused:
            console.print(f"{store.cache.num_refused} groups were not stored: the tier below was full or refused them.")
        if verify:
            equal = all(turn.tokens_equal for turn in turns)
            worst = max((turn.logits_diff_max or 0.0 for turn in turns), default=0.0)
            word = "equal" if equal else "NOT equal"
            console.print(
                f"Verified against transformers' own cache: tokens {word}, logits differ by at most {worst:g}."
            )


def _report(store: KvStore, turns: list[Turn], *, verify: bool) -> dict[str, Any]:
    from kvtide.report.turns import verdict

    report: dict[str, Any] = {
        "label": "measured",
        "model": store.loaded.name,
        "dtype": store.loaded.dtype.value,
        "bytes_per_token": store.layout.shape.bytes_per_token,
        "block_tokens": store.layout.block_tokens,
        "group_blocks": store.layout.group_blocks,
        "split": store.layout.split,
        "engine": store.namespace.engine_name if store.namespace else None,
        "is_direct": store.namespace.is_direct if store.namespace else None,
        "turns": [dataclasses.asdict(turn) for turn in turns],
        "tiers": {name: dataclasses.asdict(stats) for name, stats in store.cache.usage().items()},
        "num_refused": store.cache.num_refused,
        "remote": remote_report(store),
        "select": select_report(store),
        "verdict": verdict(turns),
    }
    if verify:
        report["tokens_equal"] = all(turn.tokens_equal for turn in turns)
        report["logits_diff_max"] = max((turn.logits_diff_max or 0.0 for turn in turns), default=0.0)
    return report
