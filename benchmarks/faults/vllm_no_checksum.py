"""vLLM's disk tier: bytes that changed on the disk are given as they are. It claims no checksum, only short reads fail.

A file of two is flipped in one bit, torn (its second half zeros), given the other's second half, or filled with noise.
`one-missing` and `flipped-reads` of the check come down to a torn file and a flipped bit.
Uses only vLLM. Exits with 1 while every fault is there, with 0 when none is.

Confirms: vllm-fs damage-flipped, damage-torn, damage-swapped, damage-senseless, flipped-reads, one-missing
"""

import sys
import tempfile
from pathlib import Path

from _disk import DAMAGE, SIZE, exit_code, told_bytes
from _vllm import Tier, plain_config, told

wrong = {}
for name, damage in DAMAGE.items():
    with tempfile.TemporaryDirectory() as folder:
        tier = Tier(folder, plain_config())
        tier.row[:] = 0x11
        tier.put()
        (path,) = Path(folder).rglob("*.bin")
        path.write_bytes(damage(path.read_bytes(), b"\x22" * SIZE))
        found, given = tier.get(), bytes(tier.row[0])
        told(damage=name, stored=f"{SIZE} x 0x11", load_says=found, given=told_bytes(given))
        wrong[name] = found and given != b"\x11" * SIZE
        tier.close()
sys.exit(exit_code(wrong))
