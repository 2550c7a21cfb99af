"""Where an explained trace comes from: a file of `kvtide trace`, or a command that is run and watched.

Next: explain.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from kvtide.errors import ConfigError, UnsupportedError
from kvtide.probe.caps import caps_of
from kvtide.stores.causes import Held
from kvtide.stores.device import sync_file_system
from kvtide.stores.explain import Explained, explain
from kvtide.stores.watch import Watch
from kvtide.trace.file import About, TracedFile, TraceFile, TraceWriter
from kvtide.trace.live import start_stopped
from kvtide.units import printable


def explain_trace(path: Path, store: Path | None, *, user_bytes: int | None = None) -> Explained:
    """Return what a trace file says; files come from the trace, and from folder `store` as it is now.

    Raises: ConfigError where no file is known; FormatError for what is no trace.
    """
    trace = TraceFile(path)
    files = [Held(file.path, file.extents) for file in trace.about.files if file.extents]
    device = next((file.device for file in trace.about.files if file.extents), None)
    if store is not None:
        _check(store)
        watch = Watch(store)
        watch.look(is_last=True)
        files += watch.files
        device = watch.caps.number
    if not files:
        raise ConfigError(f"{path} does not say where files lie; type --store with the folder of the store")
    block = trace.frame("block")
    found = explain(block.filter(block["device"] == device), files, folder=store, user_bytes=user_bytes)
    found.notes += trace.about.notes
    if trace.about.health.num_lost:
        found.notes.append(f"{trace.about.health.num_lost} events were lost")
    return found


def explain_run(
    command: Sequence[str], store: Path, *, user_bytes: int | None = None, output: Path | None = None
) -> Explained:
    """Run a command, trace the device under `store`, and return what that says. The trace stays in `output`.

    Raises: UnsupportedError where the kernel may not be traced; ConfigError for what cannot be run.
    """
    from kvtide.tables import pl
    from kvtide.trace.kernel import Capture, CaptureOptions

    if shutil.which(command[0]) is None:
        raise ConfigError(f"{printable(command[0])}: no such command")
    store.mkdir(parents=True, exist_ok=True)
    caps = caps_of(store)
    if not caps.name:
        raise UnsupportedError(f"no block device is under {store}; type a folder on a disk")
    child = start_stopped(command)
    capture = None
    try:
        capture = Capture(CaptureOptions(device=caps.number, pids=(child.pid,), has_uring=False))
        capture.start()
        began, epoch = time.monotonic_ns(), time.time_ns()
        with Watch(store) as watch:
            child.send_signal(signal.SIGCONT)
            code = child.wait()
            sync_file_system(store)
        capture.stop()
        frames = [frame for level, frame in capture.frames() if level == "block"]
        found = explain(pl.concat(frames), watch.files, folder=store, user_bytes=user_bytes)
        if capture.num_lost:
            found.notes.append(f"{capture.num_lost} events were lost")
        if code:
            found.notes.append(f"the command ended with {code}")
        found.notes.append("`unknown` holds what the kernel wrote for others on this device, too.")
        if output is not None:
            about = About(
                "kernel", " ".join(command), child.pid, os.uname().nodename, began, time.monotonic_ns(), epoch
            )
            about.devices = {str(caps.number): caps.as_traced()}
            about.files = [TracedFile(file.name, -1, caps.number, file.extents) for file in watch.files]
            about.health.num_lost = capture.num_lost
            with TraceWriter(output) as writer:
                for frame in frames:
                    writer.add("block", frame)
                writer.finish(about)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        if capture is not None:
            capture.close()
    return found


def _check(store: Path) -> None:
    if not store.is_dir():
        raise ConfigError(f"--store {printable(str(store))} is no folder; type the folder of the store's files")
