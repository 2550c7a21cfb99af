"""Ending a program that was started: asked first, killed if it does not. Next: cli_trace."""

from __future__ import annotations

import signal
import subprocess

ENDING_S = 10.0  # that a program gets once it was asked


def end(child: subprocess.Popen[bytes]) -> None:
    """Ask a program to end, and kill it if it has not after `ENDING_S`. A stopped one goes on first. Idempotent."""
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGCONT)
    child.terminate()
    try:
        child.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
