"""LMCache's local disk: a get of more values than its memory holds never returns.

All its buffers are taken before the first file is read; who finds none waits for one to be given back, and the get that
waits holds them all. Nothing of another request is under way.
Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-disk small-memory, long-requests
"""

import tempfile
import threading

from _disk import leave
from _lmcache import Disk, told

WAIT_S = 10.0


def ends(disk: Disk, num: int) -> bool:
    """Whether a get of so many values ends in time."""
    reading = threading.Thread(target=disk.get, args=([disk.key([index] * 16) for index in range(num)],), daemon=True)
    reading.start()
    reading.join(WAIT_S)
    return not reading.is_alive()


with tempfile.TemporaryDirectory() as folder:
    disk = Disk(folder, dram_mib=1)  # 16 values
    told(stored=sum(disk.put(disk.key([index] * 16), 0x11) for index in range(32)))
    told(get_of_8_values_ends=(few := ends(disk, 8)))
    told(get_of_32_values_ends_in_10_s=(many := ends(disk, 32)))
leave(int(not many) if few else 2)
