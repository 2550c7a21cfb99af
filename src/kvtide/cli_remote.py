"""`kvtide remote`: is a remote there, how fast is it, do bytes come back equal; and one to try, on this machine.

Exit codes: 0 all is well, 1 the remote does not answer, or bytes differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
import typer

from kvtide import children
from kvtide.blocks import KEY, KeyArray
from kvtide.cli_places import quiet_libraries
from kvtide.errors import ConfigError
from kvtide.io.ops import address_of, aligned_buffer
from kvtide.spec import Dtype, KVShape, LayerShape, SlotLayout
from kvtide.tiers.client import RemoteDown
from kvtide.tiers.contract import OK, READ_REQUEST, GroupRecords
from kvtide.tiers.dial import open_remote
from kvtide.tiers.remote import RemoteTier
from kvtide.units import format_bytes, format_ns, parse_option_bytes, printable

REMOTE_EXAMPLE = "Example: kvtide remote check valkey://127.0.0.1:6379/0"
SECOND_NS = 1_000_000_000
START_S = 30.0  # a master is up in about one second
SEGMENT_LEAST = 16 << 20  # the library refuses smaller ones

remote = typer.Typer(
    name="remote", help="Check a remote that machines share, or start one to try.", epilog=REMOTE_EXAMPLE
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@remote.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    """Check a remote that machines share, or start one to try."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """What a check found. Rates of KV, without headers."""

    url: str
    groups: int
    group_bytes: int
    equal: bool
    lookup_ns_p50: int
    lookup_ns_p99: int
    put_bytes_per_s: float
    get_bytes_per_s: float
    num_failed: int
    num_corrupt: int


@remote.command("check", epilog=REMOTE_EXAMPLE)
def check(
    url: Annotated[str, typer.Argument(metavar="URL", help="As given to `kvtide run --remote`.")],
    size: Annotated[str, typer.Option(help="KV to put and to get back.")] = "64MiB",
    fragment: Annotated[str, typer.Option(help="Bytes of a fragment: one layer of a group.")] = "256KiB",
    as_json: AsJson = False,
) -> None:
    """Put random KV, get it back, compare it, and remove it: latency, rates, and whether every byte is the same."""
    quiet_libraries()
    num_bytes, part = parse_option_bytes("--size", size), parse_option_bytes("--fragment", fragment)
    if not 4096 <= part <= 64 << 20 or part % 4096:
        raise ConfigError(f"--fragment is {printable(fragment)[:40]!r}; type a multiple of 4KiB, up to 64MiB")
    if not part * 4 <= num_bytes <= 16 << 30:
        raise ConfigError(f"--size is {printable(size)[:40]!r}; type {format_bytes(part * 4)} to 16GiB")
    found = measure(url, num_bytes, part)
    if as_json:
        print(json.dumps({"label": "measured", **dataclasses.asdict(found)}))
    else:
        typer.echo(
            f"{found.url}: {found.groups} groups of {format_bytes(found.group_bytes)}, "
            f"bytes {'equal' if found.equal else 'NOT equal'}\n"
            f"lookup {format_ns(found.lookup_ns_p50)} (p99 {format_ns(found.lookup_ns_p99)}), "
            f"put {found.put_bytes_per_s / 1e6:.0f} MB/s, get {found.get_bytes_per_s / 1e6:.0f} MB/s"
        )
    if not found.equal:
        raise typer.Exit(1)


def measure(url: str, num_bytes: int, part: int) -> Checked:
    """Put and get `num_bytes` in fragments of `part` bytes under an identity of its own, and remove them.

    Raises: RemoteDown if the remote does not answer, or takes nothing.
    """
    row = part // 2 // 16
    layer = LayerShape(k_bytes=row, v_bytes=row, num_heads=1)
    layout = SlotLayout(KVShape(dtype=Dtype.BF16, layers=(layer,) * 4, layer_index=(0, 1, 2, 3)), 16, 1)
    num = num_bytes // (4 * part)
    tier = open_remote(url, layout, hashlib.sha256(b"kvtide check" + os.urandom(16)).digest(), num_groups=num)
    try:
        return _measure(tier, layout, num)
    finally:
        tier.close()


def _measure(tier: RemoteTier, layout: SlotLayout, num: int) -> Checked:
    keys = np.frombuffer(os.urandom(32 * num), KEY)
    block_keys = keys.reshape(num, 1)
    records = GroupRecords(keys, keys, np.full(num, 16), np.ones(num, np.int64), block_keys)
    part = layout.fragment_padded_bytes[0]
    source, target = aligned_buffer(num * 4 * part), aligned_buffer(num * 4 * part)
    source[:] = np.random.default_rng(0).integers(0, 256, source.size, np.uint8)
    tier.register(source)
    starts = np.arange(num * 4, dtype=np.uint64) * np.uint64(part)
    tier.lookup(keys[:1])  # connects
    if tier.breaker.is_open:
        raise RemoteDown(f"{tier.name} does not answer; see the line above, and type --remote with another URL")
    lookups = [_timed(lambda one=keys[index % num : index % num + 1]: tier.lookup(one))[0] for index in range(200)]
    try:
        put_ns, written = _timed(
            lambda: tier.write(records, (address_of(source) + starts).reshape(num, 4), cause="demote")
        )
        requests = np.zeros(num * 4, READ_REQUEST)
        requests["row"], requests["fragment"] = np.repeat(np.arange(num), 4), np.tile(np.arange(4), num)
        requests["address"] = address_of(target) + starts
        get_ns, read = _timed(lambda: tier.read(keys, requests, cause="restore"))
    finally:
        _remove(tier, keys)
    stats = tier.stats()
    if not (written == OK).any():
        raise RemoteDown(f"{tier.name} takes nothing: {stats.num_full} of {num} groups found no room")
    whole = np.repeat(written == OK, 4)
    is_same = (source.reshape(-1, part)[whole] == target.reshape(-1, part)[whole]).all()
    is_equal = bool((read[whole] == OK).all() and is_same)
    num_kept = int(whole.sum()) * part
    return Checked(
        url=tier.name,
        groups=int(whole.sum()) // 4,
        group_bytes=4 * part,
        equal=is_equal,
        lookup_ns_p50=int(np.percentile(lookups, 50)),
        lookup_ns_p99=int(np.percentile(lookups, 99)),
        put_bytes_per_s=num_kept * SECOND_NS / max(1, put_ns),
        get_bytes_per_s=num_kept * SECOND_NS / max(1, get_ns),
        num_failed=stats.num_failed,
        num_corrupt=stats.num_corrupt,
    )


def _remove(tier: RemoteTier, keys: KeyArray) -> None:
    """Remove what was put; once more after a rest, where the remote did not answer in time. Says so if that fails."""
    tier.drop(keys)
    if not tier.breaker.is_open:
        return
    time.sleep(tier.breaker.left_ns() / 1e9)
    tier.drop(keys)
    if tier.breaker.is_open:
        left = f"{tier.name} does not answer: up to {len(keys)} groups of this check are left there"
        typer.echo(f"{left}; remove the names {tier.prefix}* when it is back", err=True)


def _timed(call: Any) -> tuple[int, Any]:
    started = time.perf_counter_ns()
    result = call()
    return time.perf_counter_ns() - started, result


@remote.command("up", epilog="Example: kvtide remote up mooncake --memory 1GiB")
def up(
    kind: Annotated[str, typer.Argument(metavar="mooncake", help="What to start.")],
    memory: Annotated[str, typer.Option(help="Memory that is shared.")] = "1GiB",
    as_json: AsJson = False,
) -> None:
    """Start a Mooncake master with some memory on the loopback interface, until Ctrl-C. For trials: nothing is safe."""
    if kind != "mooncake":
        raise ConfigError(
            f"remote up {printable(kind)[:40]!r}; type remote up mooncake (redis-server starts by itself)"
        )
    num_bytes = parse_option_bytes("--memory", memory)
    if num_bytes < SEGMENT_LEAST:
        raise ConfigError(f"--memory is {printable(memory)[:40]!r}; type {format_bytes(SEGMENT_LEAST)} or more")
    quiet_libraries()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the master would outlive this process
    with _master() as (url, options):
        from kvtide.tiers.mooncake import MooncakeClient

        client = MooncakeClient(dataclasses.replace(options, segment_bytes=num_bytes))
        try:
            told = json.dumps({"url": url, "memory_bytes": num_bytes, "pid": os.getpid()})
            print(told if as_json else f"{url}\n{format_bytes(num_bytes)} shared; Ctrl-C ends it", flush=True)
            while True:
                time.sleep(3600)
        finally:
            client.close()


@contextmanager
def _master() -> Iterator[tuple[str, Any]]:
    """Run a master and its metadata server on free ports; yield their URL and options.

    Raises: UnsupportedError without the package; RemoteDown if it does not come up.
    """
    from kvtide.tiers.mooncake import MooncakeOptions, master_program

    rpc, metrics, http = _free_ports(3)
    command = [master_program(), "--rpc_address=127.0.0.1", f"--rpc_port={rpc}", "--metrics_host=127.0.0.1",
               f"--metrics_port={metrics}", "--enable_http_metadata_server=true",
               "--http_metadata_server_host=127.0.0.1", f"--http_metadata_server_port={http}",
               "--default_kv_lease_ttl=2000"]  # fmt: skip
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)  # Ctrl-C ends it last
    try:
        until = time.monotonic() + START_S
        for port in (rpc, http):
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > until:
                    raise RemoteDown(f"{command[0]} did not come up (exit code {process.poll()})")
                time.sleep(0.05)
        metadata = f"http://127.0.0.1:{http}/metadata"
        url = f"mooncake://127.0.0.1:{rpc}?metadata={metadata}"
        yield url, MooncakeOptions(master=f"127.0.0.1:{rpc}", metadata=metadata)
    finally:
        children.end(process)


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _free_ports(num: int) -> list[int]:
    sockets = [socket.socket() for _ in range(num)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
