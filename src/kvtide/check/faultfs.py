"""A directory whose files fail on request: `mount` it over another, and say what goes wrong while others use it.

Decides how the file system is started, told and ended. It runs in a process of its own; another watches both it and
whoever mounted it, and unmounts when either is gone, however it went. Needs Linux, root and /dev/fuse, no library.
Faults strike below the page cache: when one is armed the kernel forgets the pages it has.

    with mount(tmp / "below", tmp / "at") as disk:
        disk.arm(Fault("error", op="write", after=3, errno="ENOSPC"))
        ...                                        # any program uses tmp / "at"
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvtide.check.faults import Fault, Faults
from kvtide.check.passthrough import PassThrough
from kvtide.errors import ConfigError, IoError, UnsupportedError

if TYPE_CHECKING:
    from kvtide.check.contract import FaultRule

START_S = 30.0  # to mount, on a machine under load
FLIPPED_BIT = 8 * 2049 + 3  # of what a rule flips: past the headers of most stores
WATCH_S = 0.1  # between looks at who mounted it
MNT_DETACH = 2
MS_NOSUID, MS_NODEV = 2, 4

_libc = ctypes.CDLL(None, use_errno=True)


def unavailable() -> str | None:
    """Why no such file system can be mounted here, or None if one can."""
    if sys.platform != "linux":
        return "the fault file system needs Linux"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "the fault file system needs /dev/fuse: modprobe fuse, or in a container --device /dev/fuse"
    status = Path("/proc/self/status").read_text()
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    if not effective >> 21 & 1:  # CAP_SYS_ADMIN
        return "the fault file system needs root: sudo, or in a container --cap-add SYS_ADMIN"
    return None


class Mount:
    """A mounted file system with faults. Threads: one at a time."""

    def __init__(self, path: Path, watcher: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.path = path
        self._watcher, self._control = watcher, control
        self._answers = control.makefile("rb")

    def arm(self, fault: Fault) -> int:
        """Let `fault` strike from now on; return the number `clear` knows it by."""
        return int(self._ask({"do": "arm", "fault": fault.to_json()})["id"])

    def clear(self, number: int | None = None) -> None:
        """End one fault or, without a number, all; what they hold up goes on."""
        self._ask({"do": "clear", "id": number})

    def fired(self) -> dict[int, int]:
        """Operations struck by each fault that is armed."""
        return {int(number): times for number, times in self._ask({"do": "state"})["fired"].items()}

    def set(self, rules: Sequence[FaultRule]) -> None:
        """Have these rules and no others, counting from now on. None: no faults; what hangs goes on."""
        faults = [_fault(rule) for rule in rules]
        self._ask({"do": "reset"})
        for fault in faults:
            self.arm(fault)

    def counts(self) -> dict[str, int]:
        """How often each operation came since `set`, and how many were struck ("faults")."""
        state = self._ask({"do": "state"})
        return {**state["counts"], "faults": sum(state["fired"].values())}

    def close(self) -> None:
        """Let go on what is held up, and unmount. Idempotent."""
        if self._watcher.poll() is None:
            with contextlib.suppress(OSError, IoError):
                self.clear()
            self._control.close()
            self._answers.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._watcher.wait(START_S)
        if self._watcher.poll() is None:
            self._watcher.kill()
            self._watcher.wait()
        _unmount(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, what: dict[str, Any]) -> Any:
        self._control.sendall(json.dumps(what).encode() + b"\n")
        line = self._answers.readline()
        if not line:
            raise IoError(f"the fault file system at {self.path} has ended: mount it again")
        answer = json.loads(line)
        if "problem" in answer:
            raise ConfigError(answer["problem"])
        return answer


def mount(backing: Path, at: Path) -> Mount:
    """Mount `backing` at `at`, both directories, which are made if need be.

    Raises: UnsupportedError where it cannot be mounted.
    """
    reason = unavailable()
    if reason is not None:
        raise UnsupportedError(reason)
    backing.mkdir(parents=True, exist_ok=True)
    at.mkdir(parents=True, exist_ok=True)
    backing, at = backing.resolve(), at.resolve()
    ours, theirs = socket.socketpair()
    source = str(Path(__file__).parents[2])
    command = (
        f"import sys; sys.path.insert(0, {source!r}); from kvtide.check import faultfs; faultfs.main(sys.argv[1:])"
    )
    arguments = [str(backing), str(at), str(theirs.fileno()), str(os.getpid())]
    watcher = subprocess.Popen(
        [sys.executable, "-c", command, *arguments], pass_fds=[theirs.fileno()], start_new_session=True
    )
    theirs.close()
    ours.settimeout(START_S)
    made = Mount(at, watcher, ours)
    try:
        made.fired()
    except (OSError, ConfigError) as problem:
        made.close()
        raise UnsupportedError(f"no file system could be mounted at {at}: {problem}") from problem
    return made


def main(arguments: Sequence[str]) -> None:
    """Serve in a child, and watch it and the process that asked for it."""
    backing, at, control, asked_by = Path(arguments[0]), Path(arguments[1]), int(arguments[2]), int(arguments[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        _serve(backing, at, socket.socket(fileno=control))
        os._exit(0)
    os.close(control)
    is_over = False
    while not is_over:
        time.sleep(WATCH_S)
        is_over = os.getppid() != asked_by or os.waitpid(child, os.WNOHANG)[0] == child
    _unmount(at)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(backing: Path, at: Path, control: socket.socket) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor an inode that the kernel knows
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    if _libc.mount(b"kvtide-faultfs", os.fsencode(at), b"fuse", MS_NOSUID | MS_NODEV, options.encode()) < 0:
        problem = os.strerror(ctypes.get_errno())
        control.sendall(json.dumps({"problem": f"mount(2) says {problem}"}).encode() + b"\n")
        return
    faults = Faults()
    files = PassThrough(device, backing, faults)
    threading.Thread(target=files.serve, daemon=True).start()
    with contextlib.suppress(OSError):
        _obey(control, files, faults)
    faults.clear()
    _unmount(at)


def _obey(control: socket.socket, files: PassThrough, faults: Faults) -> None:
    """Do what is asked over `control`, a line of JSON each, until its other end closes."""
    before = files.counts()
    with control.makefile("rb") as lines:
        for line in lines:
            asked = json.loads(line)
            answer: dict[str, Any] = {}
            try:
                if asked["do"] == "arm":
                    answer["id"] = faults.arm(Fault.from_json(asked["fault"]))
                    files.forget_pages()
                elif asked["do"] in {"clear", "reset"}:
                    faults.clear(asked.get("id"))
                    files.forget_pages()
                    before = files.counts() if asked["do"] == "reset" else before
                answer |= {"counts": dict(files.counts() - before), "fired": faults.fired()}
            except ConfigError as problem:
                answer = {"problem": str(problem)}
            control.sendall(json.dumps(answer).encode() + b"\n")


def _unmount(at: Path) -> None:
    """Unmount, now or as soon as nobody uses it; nothing if it is not mounted."""
    if f" {_escaped(at)} fuse " in Path("/proc/mounts").read_text():
        _libc.umount2(os.fsencode(at), MNT_DETACH)


def _escaped(path: Path) -> str:
    return "".join(f"\\{ord(one):03o}" if one in " \t\n\\" else one for one in str(path))


def _fault(rule: FaultRule) -> Fault:
    """What a rule of the contract means here."""
    kinds = {"short": "short", "torn": "torn", "flip": "flip", "slow": "delay", "hang": "stall"}
    kind = kinds.get(rule.fault, "error")
    number = rule.fault if kind == "error" else "EIO"
    times = 0 if rule.times is None else rule.times
    bit = FLIPPED_BIT if kind == "flip" else 0
    return Fault(kind, rule.operation, after=rule.after, times=times, errno=number, seconds=rule.delay_s, bit=bit)
