"""vLLM's disk tier: bytes that changed on the disk are given as they are. It claims no checksum, only short reads fail.

Uses only vLLM. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: vllm-fs damage-flipped, damage-torn, damage-swapped, damage-senseless
Confirms: vllm-fs lost-writes, flipped-reads, one-missing
"""

import sys
import tempfile
from pathlib import Path

from _vllm import Tier, plain_config, told

with tempfile.TemporaryDirectory() as folder:
    tier = Tier(folder, plain_config())
    tier.row[:] = 0x11
    tier.put()
    (path,) = Path(folder).rglob("*.bin")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found, given = tier.get(), {hex(byte): bytes(tier.row[0]).count(byte) for byte in set(bytes(tier.row[0]))}
    told(stored="65536 x 0x11", load_says=found, given=given)
    tier.close()
sys.exit(int(found and given != {"0x11": 65536}))
