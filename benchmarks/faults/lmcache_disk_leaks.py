"""LMCache's storage manager: closed, it leaves an event loop open, with a thread and three descriptors.

They go when the collector of cycles comes by. Here it does not, so that the count is the same each time.
Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-disk leaks
"""

import gc
import tempfile
from pathlib import Path

from _disk import leave
from _lmcache import Disk, told

ROUNDS = 8


def held() -> dict[str, int]:
    """Return the descriptors and threads of this process."""
    return {what: len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task")}


def use(folder: str) -> None:
    """Open, use and close."""
    disk = Disk(folder)
    key = disk.key([1] * 16)
    disk.put(key, 0x11)
    disk.get([key])
    disk.manager.close()


with tempfile.TemporaryDirectory() as folder:
    use(folder)  # loads libraries
    gc.collect()
    gc.disable()
    before = held()
    for _ in range(ROUNDS):
        use(folder)
    after = held()
    gc.collect()
    told(opens_and_closes=ROUNDS, before=before, after=after, after_the_collector_came=held())
leave(int(any(after[what] - before[what] >= ROUNDS for what in before)))
