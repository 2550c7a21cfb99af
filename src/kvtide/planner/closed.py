"""The plan in closed form: how long each resource works in each phase, and which one makes the others wait. Pure.

*Theory.* A phase moves bytes over resources that work side by side, a layer at a time. Where layers overlap, the
slowest resource sets the pace and the others show only in the first layer; where they do not, times add up:

    overlapped     max(t) + (sum(t) - max(t)) / L
    one by one     sum(t)

Compute is a roofline: max(FLOP / rate, bytes of weights and KV / memory rate). Drives have the roofs of
`kvtide.roofline`, with the host's time of an op as one of them. A copy to the GPU has the rate of its size. KV that a
step reads is spread over the tiers as all KV is. Next: report.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from kvtide.planner.inputs import Job, Machine, check
from kvtide.planner.placement import Placement, copies, place
from kvtide.roofline import Roof
from kvtide.sizing import Phase as Work
from kvtide.sizing import step_work
from kvtide.spec import Access, fragments

WRITE_BYTES_MAX = 1 << 20  # of one operation of the file tier
BOUNDS = {"latency": "depth-starved", "iops": "iops-bound", "bandwidth": "bandwidth-bound", "host": "host-bound"}


@dataclass(frozen=True, slots=True)
class Use:
    """Work of one resource in one phase. `bound` says which of its own limits it runs into."""

    time_ns: float
    num_bytes: float = 0.0
    num_ops: int = 0
    op_bytes: int = 0
    depth: float = 0.0
    bound: str = ""


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """One phase: its time, what each resource does in it, and what bounds it."""

    name: str
    total_ns: float
    uses: dict[str, Use]

    @property
    def limit(self) -> str:
        """The resource that works longest."""
        return max(self.uses, key=lambda name: self.uses[name].time_ns)

    @property
    def bound(self) -> str:
        """What bounds the phase, by the names of `kvtide.trace.verdict` where it is the drive."""
        return self.uses[self.limit].bound

    def utilisation(self, name: str) -> float:
        """Part of the phase in which a resource works."""
        return min(1.0, self.uses[name].time_ns / self.total_ns) if self.total_ns else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything predicted. Label: modelled."""

    job: Job
    machine: Machine
    placement: Placement
    phases: dict[str, PhasePlan]
    notes: list[str] = field(default_factory=list)

    @property
    def ttft_ns(self) -> float:
        """Time to the first tokens of the whole batch, nothing kept before."""
        handed = self.phases.get("hand-over")
        return self.phases["prefill"].total_ns + (handed.total_ns if handed else 0.0)

    @property
    def itl_ns(self) -> float:
        """Time between tokens, halfway through the output."""
        return self.phases["decode"].total_ns

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the whole batch in decode."""
        return self.job.batch / (self.itl_ns / 1e9)


def plan(job: Job, machine: Machine) -> Plan:
    """Predict all phases.

    Raises: ConfigError for what cannot be, or does not fit.
    """
    check(job, machine)
    placement = place(job, machine)
    phases = {
        "prefill": _prefill(job, machine, placement),
        "restore": _restore(job, machine, placement),
        "decode": _decode(job, machine, placement),
    }
    if job.is_disaggregated and machine.network is not None:
        total, sending = hand_over_ns(job, machine, placement.total_bytes, phases["prefill"].total_ns)
        use = Use(sending, placement.total_bytes, bound="network-bound")
        phases["hand-over"] = PhasePlan("hand-over", total, {"network": use})
    return Plan(job, machine, placement, phases, _notes(job, machine))


def compute_use(work: Work, job: Job, machine: Machine, *, kv_share: float = 1.0) -> Use:
    """Return the time the GPUs need for some work, of whose KV only `kv_share` is read."""
    gpu, num = machine.gpu, machine.num_gpus
    flop = work.weight_flop + work.attention_flop * kv_share
    weights = (
        work.weight_bytes / job.model.weight_dtype.itemsize * (job.weight_dtype or job.model.weight_dtype).itemsize
    )
    num_bytes = weights + (work.kv_read_bytes * kv_share + work.kv_written_bytes) * copies(job, machine)
    by_flop = flop / (gpu.gemm_flop_per_s(job.model.dtype) * num) * 1e9
    by_bytes = num_bytes / (gpu.decode_bytes_per_s * num) * 1e9
    return Use(max(by_flop, by_bytes), num_bytes, bound="compute-bound" if by_flop >= by_bytes else "memory-bound")


def drive_use(roof: Roof, num_bytes: float, num_ops: int, op_bytes: int, machine: Machine, *, together: int) -> Use:
    """Return the time drives need for equal ops of which `together` are known at once."""
    if not num_ops:
        return Use(0.0)
    depth = float(max(1, min(machine.depth, together)))
    whole = machine.io_path.over(roof)
    rate = float(whole.bytes_per_s(op_bytes, depth, num_threads=machine.num_io_threads))
    bound = whole.bound(op_bytes, depth, num_threads=machine.num_io_threads)
    return Use(num_ops * op_bytes / rate * 1e9, num_bytes, num_ops, op_bytes, depth, BOUNDS[bound])


def link_use(num_bytes: float, op_bytes: int, machine: Machine) -> Use:
    """Return the time copies between host and GPUs need."""
    if not num_bytes:
        return Use(0.0, bound="copy-bound")
    rate = machine.link_bytes_per_s(op_bytes)
    return Use(num_bytes / rate * 1e9, num_bytes, -(-int(num_bytes) // op_bytes), op_bytes, bound="copy-bound")


def overlap(uses: dict[str, Use], num_layers: int, *, is_overlapped: bool) -> float:
    """Return how long a phase of these uses takes; see the theory."""
    times = [use.time_ns for use in uses.values()]
    longest = max(times)
    return longest + (sum(times) - longest) / num_layers if is_overlapped else sum(times)


def _phase(name: str, job: Job, uses: dict[str, Use]) -> PhasePlan:
    kept = {key: use for key, use in uses.items() if use.time_ns > 0}
    total = overlap(kept, job.shape().num_layers, is_overlapped=job.is_overlapped)
    return PhasePlan(name, total, kept)


def _prefill(job: Job, machine: Machine, placement: Placement) -> PhasePlan:
    work = step_work(job.model, job.shape(), num_new=job.context, num_old=0, batch=job.batch)
    slot = job.slot()
    uses = {
        "compute": compute_use(work, job, machine),
        "link": link_use(placement.spilled_bytes, max(slot.fragment_bytes), machine),
        "dram": memory_use(machine, placement.kv_bytes["dram"] + 2 * placement.kv_bytes["ssd"]),
        "cxl": cxl_use(machine, placement.kv_bytes["cxl"]),
    }
    if machine.ssd is not None and placement.kv_bytes["ssd"]:
        size = min(WRITE_BYTES_MAX, slot.slot_bytes)
        num_bytes = placement.kv_bytes["ssd"] * slot.slot_bytes / (slot.tokens_per_group * job.shape().bytes_per_token)
        num_ops = -(-int(num_bytes) // size)
        uses["ssd"] = drive_use(machine.ssd.write, num_bytes, num_ops, size, machine, together=num_ops)
    return _phase("prefill", job, uses)


def _restore(job: Job, machine: Machine, placement: Placement) -> PhasePlan:
    """Bring a whole context up again instead of computing it: one layer at a time, all of it."""
    uses = _reads(replace(job, select=1.0), machine, placement, job.context)
    work = step_work(job.model, job.shape(), num_new=1, num_old=job.context, batch=job.batch)
    uses["compute"] = compute_use(work, job, machine)  # the prompt's last token still runs
    return _phase("restore", job, uses)


def _decode(job: Job, machine: Machine, placement: Placement) -> PhasePlan:
    tokens = job.context + job.output // 2
    work = step_work(job.model, job.shape(), num_new=1, num_old=tokens, batch=job.batch)
    uses = _reads(job, machine, placement, tokens)
    uses["compute"] = compute_use(work, job, machine, kv_share=job.select)
    return _phase("decode", job, uses)


def hand_over_ns(job: Job, machine: Machine, kv_bytes: int, prefill_ns: float) -> tuple[float, float]:
    """Return how much later the first token comes as KV goes to another machine, and how long it is on its way.

    Where layers overlap, each is sent while the next is computed; the last one cannot be.
    """
    assert machine.network is not None, "a hand-over needs a network"
    sending = kv_bytes / machine.network.bytes_per_s * 1e9 + machine.network.latency_ns
    late = max(sending - prefill_ns, 0.0) + sending / job.shape().num_layers
    return (late if job.is_overlapped else sending), sending


def read_pattern(job: Job, num_tokens: int) -> tuple[int, int, int]:
    """Return how one decode step reads: ops in all, bytes of one, and how many are known at once (a layer's)."""
    shape, slot = job.shape(), job.slot()
    num_ops = num_bytes = most = 0
    # Layers of one shape read alike. All tokens, also where attention sees a window: they are kept as one.
    for layer, num_layers in Counter(shape.layers).items():
        blocks = max(1, round(-(-num_tokens // job.block_tokens) * job.select))
        found = fragments(
            shape,
            job.layout,
            Access.READ_LAYER if job.select == 1.0 else Access.READ_BLOCKS,
            num_tokens=num_tokens,
            block_tokens=job.block_tokens,
            group_blocks=slot.group_blocks,
            k=blocks if job.select < 1.0 else 1,
            layer=shape.layers.index(layer),
        )
        num_ops += job.batch * num_layers * found.num_fragments
        num_bytes += job.batch * num_layers * found.padded_bytes
        most = max(most, job.batch * found.num_fragments)
    if job.fragment_bytes is not None:
        num_ops, most = -(-num_bytes // job.fragment_bytes), -(-num_bytes // job.fragment_bytes // shape.num_layers)
        return num_ops, job.fragment_bytes, most
    return num_ops, -(-num_bytes // num_ops), most


def _reads(job: Job, machine: Machine, placement: Placement, num_tokens: int) -> dict[str, Use]:
    """Return what a step's reads of KV cost in every tier below the device."""
    num_ops, size, together = read_pattern(job, num_tokens)
    below = {tier: num_ops * size * placement.share(tier) for tier in ("dram", "cxl", "ssd")}
    uses = {
        "link": link_use(sum(below.values()), size, machine),
        "dram": memory_use(machine, below["dram"] + 2 * below["ssd"]),
        "cxl": cxl_use(machine, below["cxl"]),
    }
    if machine.ssd is not None and below["ssd"]:
        share = placement.share("ssd")
        ops = max(1, round(num_ops * share))
        known = max(1, round(together * share))
        uses["ssd"] = drive_use(machine.ssd.read, below["ssd"], ops, size, machine, together=known)
    return uses


def memory_use(machine: Machine, num_bytes: float) -> Use:
    """Return the time DRAM needs to give or take these bytes."""
    return Use(num_bytes / machine.dram.bytes_per_s * 1e9, num_bytes, bound="dram-bound")


def cxl_use(machine: Machine, num_bytes: float) -> Use:
    """Return the time CXL memory needs to give or take these bytes."""
    return Use(num_bytes / machine.cxl.bytes_per_s * 1e9 if machine.cxl else 0.0, num_bytes, bound="cxl-bound")


def _notes(job: Job, machine: Machine) -> list[str]:
    notes = []
    if job.context + job.output > job.model.max_positions:
        notes.append(f"{job.model.name} has {job.model.max_positions} positions: such a context needs RoPE scaling.")
    if not job.layout.is_paged:
        notes.append(f"Layout {job.layout.value} is that of memory; kvtide's file tier stores layer_major.")
    if job.is_disaggregated and machine.network is None:
        notes.append("No network is given, so the hand-over is not planned; type --network rdma-400g.")
    return notes
