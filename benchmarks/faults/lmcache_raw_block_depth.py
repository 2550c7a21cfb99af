"""LMCache's adapter raw_block reads the values of one task one after the other: an SSD needs tens of reads at once.

So its default engine, `posix`, does; to `io_uring` a task is handed as one batch. While a task of 256 values is read
with O_DIRECT, the kernel is asked again and again which threads are in a read. The same values as 16 tasks show that
the question can see more than one.
Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-raw-block depth
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor

from _disk import SIZE, leave, most_in_reads
from _lmcache import L2, adapter_raw_block, page_aligned, told

NUM, TASKS, REPEATS = 256, 16, 5
with tempfile.TemporaryDirectory() as folder:
    store, rooms = L2(adapter_raw_block(folder, slots=NUM, direct=True)), list(page_aligned(NUM * SIZE).split(SIZE))
    keys = [store.key([index] * 16) for index in range(NUM)]
    stored = sum(store.put(key, room) for key, room in zip(keys, rooms, strict=True))

    def get(tasks: int) -> None:
        """Read all values as so many tasks at once."""
        with ThreadPoolExecutor(tasks) as threads:
            parts = [slice(at, None, tasks) for at in range(tasks)]
            list(threads.map(lambda part: store.get_all(keys[part], rooms[part]), parts))

    one = max(most_in_reads(lambda: get(1)) for _ in range(REPEATS))
    several = max(most_in_reads(lambda: get(TASKS)) for _ in range(REPEATS))
    told(values=stored, read_at_once_of_one_task=one, read_at_once_of_16_tasks=several)
leave(2 if stored < NUM or several < 2 or not one else int(one == 1))
