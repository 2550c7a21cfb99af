"""vLLM's disk tier reads the chunks of one load job one after the other: an SSD needs tens of reads at once.

All of a request that lies on the disk is one job: vLLM#49152. While a job of 256 chunks is read, the kernel is asked
again and again which threads are in a read. The same chunks as 16 jobs show that the question can see more than one.
Uses only vLLM. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: vllm-fs depth
"""

import tempfile

from _disk import leave, most_in_reads
from _vllm import Tier, plain_config, told

NUM, JOBS, REPEATS = 256, 16, 5
with tempfile.TemporaryDirectory() as folder:
    tier = Tier(folder, plain_config(), num=NUM)
    tier.put()
    one = max(most_in_reads(tier.get) for _ in range(REPEATS))
    several = max(most_in_reads(lambda: tier.get(JOBS)) for _ in range(REPEATS))
    told(chunks=NUM, read_at_once_of_one_job=one, read_at_once_of_16_jobs=several)
leave(2 if several < 2 or not one else int(one == 1))
