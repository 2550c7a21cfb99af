"""vLLM's disk tier reads the chunks of one job one after the other: an SSD needs tens of reads at once.

Jobs of several requests do run beside each other, in its threads. Eight chunks become pipes that hold up whoever reads
them; how many the job has open is how many it reads at once.
Uses only vLLM. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: vllm-fs depth
"""

import os
import sys
import tempfile
from pathlib import Path

from _disk import most_read_at_once
from _vllm import Tier, plain_config, told

NUM = 8
with tempfile.TemporaryDirectory() as folder:
    tier = Tier(folder, plain_config(), num=NUM)
    tier.rows[:] = 0x11
    tier.put()
    files = sorted(Path(folder).rglob("*.bin"))
    most = most_read_at_once(files, tier.get)
    told(chunks_of_the_job=len(files), read_at_once=most)
    sys.stdout.flush()
    os._exit(int(most == 1) if most else 2)  # the read never ends
