"""Memory gets its pages before it is needed: as much of DRAM and of the device as the tier below could fill.

A page that is touched for the first time costs a fault, and in a virtual machine often another one on the host; a
restore pays for them while the model waits. What stored KV can fill is known when a cache opens, so its pages are asked
for then: for a moment at once, the rest by the mover whenever it has nothing else to do. Next: tiered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kvtide.cache.mover import WARM, Mover
from kvtide.cache.windows import DeviceArena
from kvtide.tiers.memory import FramePool

CHUNK_BYTES = 8 << 20  # asked for at once: some ms, for which a demand may have to wait
OPENING_NS = 250_000_000  # an opening may take this much longer for it

Populate = Callable[[int, int], None]  # start, bytes


def warm_for(stored_bytes: int, pool: FramePool, arena: DeviceArena, mover: Mover) -> None:
    """Warm as much of `pool` and `arena` as that many stored bytes can fill."""
    frames = min(stored_bytes, pool.num_frames * pool.frame_bytes)
    warm([(pool.populate, frames), (arena.populate, min(stored_bytes, arena.num_bytes))], mover)


def warm(parts: list[tuple[Populate, int]], mover: Mover) -> None:
    """Ask for the first bytes of each memory in `parts`; return when some of that is done."""
    chunks = _chunks(parts)
    until = time.perf_counter_ns() + OPENING_NS
    for populate, start, num in chunks:
        populate(start, num)
        if time.perf_counter_ns() > until:
            mover.submit(lambda: _go_on(chunks, mover), WARM)
            return


def _go_on(chunks: Iterator[tuple[Populate, int, int]], mover: Mover) -> None:
    """Do one chunk, and queue the next behind everything else."""
    chunk = next(chunks, None)
    if chunk is None or mover.is_closed:
        return
    populate, start, num = chunk
    populate(start, num)
    mover.submit(lambda: _go_on(chunks, mover), WARM)


def _chunks(parts: list[tuple[Populate, int]]) -> Iterator[tuple[Populate, int, int]]:
    for populate, num_bytes in parts:
        for start in range(0, num_bytes, CHUNK_BYTES):
            yield populate, start, min(CHUNK_BYTES, num_bytes - start)
