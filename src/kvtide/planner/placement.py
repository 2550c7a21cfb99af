"""Where KV lies: the fastest tier first, the rest below. Pure. Next: closed."""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.planner.inputs import WORKSPACE_SHARE, Job, Machine
from kvtide.units import format_bytes

TIERS = ("device", "dram", "cxl", "ssd")


@dataclass(frozen=True, slots=True)
class Placement:
    """Bytes of KV in each tier, once every sequence has its context; and the room each has."""

    kv_bytes: dict[str, int]
    room_bytes: dict[str, int]
    weight_bytes: int

    @property
    def total_bytes(self) -> int:
        """All KV."""
        return sum(self.kv_bytes.values())

    def share(self, tier: str) -> float:
        """Part of all KV that lies in `tier`."""
        return self.kv_bytes[tier] / self.total_bytes

    @property
    def spilled_bytes(self) -> int:
        """KV that does not stay on the device."""
        return self.total_bytes - self.kv_bytes["device"]


def copies(job: Job, machine: Machine) -> float:
    """Return how often the GPUs together keep each byte of KV: more than once where heads do not divide among them."""
    shape = job.shape(machine.num_gpus)
    return shape.bytes_per_token * machine.num_gpus / job.shape().bytes_per_token


def place(job: Job, machine: Machine) -> Placement:
    """Fill the tiers from the top with the KV of all contexts.

    Raises: ConfigError if it fits nowhere.
    """
    total = job.batch * job.context * job.shape().bytes_per_token
    left_on_device = max(0, int(machine.gpu_bytes * (1 - WORKSPACE_SHARE)) - job.weight_bytes)
    wanted = left_on_device if job.device_kv_bytes is None else job.device_kv_bytes
    if wanted > left_on_device:
        raise ConfigError(
            f"--kv-on-device {format_bytes(wanted)}: beside the weights {machine.num_gpus} x {machine.gpu.name} have "
            f"{format_bytes(left_on_device)}; type less, or leave it out"
        )
    device = int(wanted / copies(job, machine))  # ranks that share a head keep it each
    room = {"device": device, "dram": machine.dram_bytes, "cxl": machine.cxl_bytes, "ssd": machine.disk_bytes}
    placed, left = {}, total
    for tier in TIERS:
        placed[tier] = min(left, room[tier])
        left -= placed[tier]
    if left:
        raise ConfigError(
            f"{format_bytes(total)} of KV find room for {format_bytes(total - left)} only: "
            + ", ".join(f"{tier} {format_bytes(room[tier])}" for tier in TIERS)
            + f"; {format_bytes(left)} more are needed: type a larger --dram, --ssds or --cxl, or a smaller --batch"
        )
    return Placement(placed, room, job.weight_bytes)
