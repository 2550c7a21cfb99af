"""What is planned: a job (model, batch, context, how KV is laid out and read) on a machine. Next: placement, closed.

Decides what cannot be: weights larger than memory, heads that do not divide, contexts beyond a model's positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.hardware import Gpu, IoPath, Link, Memory, Network, Ssd
from kvtide.sizing import BATCH_MAX
from kvtide.spec import Dtype, KVShape, Layout, ModelSpec, SlotLayout, auto_group_blocks
from kvtide.spec.geometry import POSITIONS_MAX, whole_number
from kvtide.units import format_bytes

WORKSPACE_SHARE = 0.1  # of GPU memory for activations and buffers; vLLM leaves as much (gpu_memory_utilization 0.9)
KNEE_BYTES = 128 << 10  # read size a group aims at where no drive was probed


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is. Sizes in bytes; `depth` is the most operations in flight, `num_io_threads` submit them."""

    gpu: Gpu
    num_gpus: int
    link: Link | None
    dram: Memory
    dram_bytes: int
    io_path: IoPath
    ssd: Ssd | None = None
    ssd_bytes: int | None = None  # None: the drives' capacity
    num_ssds: int = 1
    cxl: Memory | None = None
    cxl_bytes: int = 0
    network: Network | None = None
    depth: int = 64
    num_io_threads: int = 1
    is_nominal: bool = False  # links at the rate of their standard, not at the measured one for the size of a copy

    def __post_init__(self) -> None:
        whole_number("--gpus", self.num_gpus, least=1, most=1 << 16)
        whole_number("--depth", self.depth, least=1, most=1 << 16)
        whole_number("--ssds", self.num_ssds, least=1, most=1 << 12)
        whole_number("--io-threads", self.num_io_threads, least=1, most=1 << 12)
        whole_number("--dram", self.dram_bytes, least=0, most=1 << 60)
        whole_number("--cxl", self.cxl_bytes, least=0, most=1 << 60)
        if self.cxl_bytes and self.cxl is None:
            raise ConfigError("CXL memory needs its figures: give cxl with cxl_bytes")

    @property
    def gpu_bytes(self) -> int:
        """Memory of all GPUs."""
        return int(self.num_gpus * self.gpu.memory_bytes)

    @property
    def disk_bytes(self) -> int:
        """Room for KV on the drives."""
        if self.ssd is None:
            return 0
        return int(self.ssd_bytes if self.ssd_bytes is not None else self.ssd.capacity_bytes or 0)

    def link_bytes_per_s(self, size_bytes: float) -> float:
        """Rate of all links to the GPUs for copies of one size; without a link, that of the memory."""
        if self.link is None:
            return self.dram.copy_bytes_per_s
        return self.num_gpus * (self.link.nominal_bytes_per_s if self.is_nominal else self.link.bytes_per_s(size_bytes))


@dataclass(frozen=True, slots=True)
class Job:
    """What is run. `select` is the part of the context a decode step reads; 1.0: all of it.

    `fragment_bytes` overrides the size of a read; `device_kv_bytes` the room for KV on the GPU (None: what is left).
    Raises: ConfigError for what cannot be.
    """

    model: ModelSpec
    batch: int
    context: int
    output: int = 256
    dtype: Dtype | None = None
    weight_dtype: Dtype | None = None
    select: float = 1.0
    layout: Layout = Layout.LAYER_MAJOR
    block_tokens: int = 16
    group_blocks: int | None = None
    fragment_bytes: int | None = None
    device_kv_bytes: int | None = None
    is_overlapped: bool = True
    is_disaggregated: bool = False
    is_any_context: bool = False

    def __post_init__(self) -> None:
        whole_number("--batch", self.batch, least=1, most=BATCH_MAX)
        whole_number("--context", self.context, least=1, most=POSITIONS_MAX)
        whole_number("--output", self.output, least=1, most=POSITIONS_MAX)
        if not 0.0 < self.select <= 1.0:
            raise ConfigError(f"--select is {self.select}; type full, or a part above 0 and up to 1, as 0.01")
        if self.fragment_bytes is not None:
            whole_number("--fragment", self.fragment_bytes, least=1, most=1 << 40)
        needed = self.context + self.output
        if needed > self.model.max_positions and not self.is_any_context:
            raise ConfigError(
                f"{self.context} tokens of context and {self.output} of output are {needed}, but {self.model.name} has "
                f"{self.model.max_positions} positions; type a smaller --context, or --any-context to plan it anyway"
            )

    @property
    def kv_dtype(self) -> Dtype:
        """Format KV is kept in."""
        return self.dtype or self.model.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.model.num_params * (self.weight_dtype or self.model.weight_dtype).itemsize

    def shape(self, tp_size: int = 1) -> KVShape:
        """Geometry of one rank's KV."""
        return KVShape.of(self.model, self.kv_dtype, tp_size)

    def slot(self) -> SlotLayout:
        """The slot of the file tier, for all ranks together.

        Raises: ConfigError if the model's layers cannot be cut as the layout says.
        """
        shape = self.shape()
        group = 1 if self.layout is Layout.BLOCK_FIRST else self.group_blocks
        group = group or auto_group_blocks(shape, self.block_tokens, KNEE_BYTES)
        return SlotLayout(shape, self.block_tokens, group, self.layout.split)


def check(job: Job, machine: Machine) -> None:
    """Refuse what cannot be.

    Raises: ConfigError that says what is needed and what to type.
    """
    job.shape(machine.num_gpus)  # heads divide
    room = int(machine.gpu_bytes * (1 - WORKSPACE_SHARE))
    if job.weight_bytes > room:
        least = -(-job.weight_bytes // int(machine.gpu.memory_bytes * (1 - WORKSPACE_SHARE)))
        raise ConfigError(
            f"the weights of {job.model.name} take {format_bytes(job.weight_bytes)}, but {machine.num_gpus} x "
            f"{machine.gpu.name} have {format_bytes(room)} beside {WORKSPACE_SHARE:.0%} for activations; "
            f"type --gpus {least} or more, or --weights fp8_e4m3"
        )
