"""A small file system of its own, mounted from a file, so that a full disk harms nobody. Needs root. Next: capacity."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtide.errors import IoError


class SmallDisk:
    """An ext4 file system of `num_bytes` with `num_inodes` at `path`, gone when it is closed.

    Raises: IoError where it cannot be made.
    """

    def __init__(self, image: Path, path: Path, num_bytes: int, num_inodes: int | None = None) -> None:
        self.path, self._image = path, image
        with image.open("wb") as file:
            file.truncate(num_bytes)
        inodes = ["-N", str(num_inodes)] if num_inodes else []
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", *inodes, str(image))
        _run("mount", "-o", "loop", str(image), str(path))

    def close(self) -> None:
        """Unmount it; whatever still uses it is not waited for."""
        if self._image.exists():
            for _ in range(20):
                if not subprocess.run(["umount", str(self.path)], check=False, capture_output=True).returncode:
                    break
                time.sleep(0.1)
            else:
                subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
            self._image.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise IoError(0, f"{words[0]} failed: {done.stderr.strip()[:300]}; is this root, with loop devices?")
