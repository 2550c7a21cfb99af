"""Two worked cases whose figures are published, computed here from geometry. Next: report.

`article` is the question this project began with: Llama-3-70B, 32 sequences of 32,000 tokens with fp16 KV, one 80 GB
H100, the KV in DRAM and on an NVMe RAID behind PCIe Gen5. fp16 weights take 141 GB and do not fit it: they are planned
in fp8, and no KV stays on the device, as the question has it. `study` is a published trace of FlexGen with OPT-6.7B
(CHEOPS 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtide.hardware import Catalogue, raid0
from kvtide.planner.closed import Plan, plan
from kvtide.planner.inputs import Job, Machine
from kvtide.spec import Dtype, Layout
from kvtide.spec.presets import preset

ARTICLE_DRAM_BYTES = 256 << 30
ARTICLE_DRIVES = 4
DEPTHS = (1, 8, 32, 128, 512)
RAIDS = (("nvme-gen3", 1), ("nvme-gen4", 1), ("nvme-gen5", 1), ("nvme-gen5", 4), ("nvme-gen5", 8))
FRAGMENTS = (4 << 10, 64 << 10, 128 << 10)


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One point of a sweep."""

    ssd: str
    num_ssds: int
    depth: int
    fragment_bytes: int
    itl_ns: float
    ops_per_s: float
    bound: str
    limit: str


@dataclass(frozen=True, slots=True)
class Article:
    """The worked case: everything read for each token, then one part in a hundred; and how the latter scales."""

    full: Plan
    sparse: Plan
    sweep: list[SweepRow]


def article_job() -> Job:
    """Return the job of the worked case."""
    return Job(
        preset("llama-3-70b"), batch=32, context=32_000, output=1, dtype=Dtype.FP16, weight_dtype=Dtype.FP8_E4M3,
        device_kv_bytes=0, is_any_context=True,
    )  # fmt: skip


def article_machine(catalogue: Catalogue) -> Machine:
    """Return the machine of the worked case."""
    return Machine(
        gpu=catalogue.gpu("h100"),
        num_gpus=1,
        link=catalogue.link("pcie5-x16"),
        dram=catalogue.memory("dram-ddr5"),
        dram_bytes=ARTICLE_DRAM_BYTES,
        io_path=catalogue.io_path("io_uring"),
        ssd=raid0(catalogue.ssd("nvme-gen5"), ARTICLE_DRIVES),
        num_ssds=ARTICLE_DRIVES,
        num_io_threads=ARTICLE_DRIVES,
        depth=256,
        is_nominal=True,
    )


def article(catalogue: Catalogue) -> Article:
    """Plan the worked case and its sweep over drives, depth and size of a read."""
    job, machine = article_job(), article_machine(catalogue)
    sparse_job = replace(job, select=0.01, layout=Layout.BLOCK_FIRST)
    on_drives = replace(machine, dram_bytes=0)
    rows = []
    for name, num in RAIDS:
        for depth in DEPTHS:
            for size in FRAGMENTS:
                ssd = raid0(catalogue.ssd(name), num)
                # The drives of a server hold the KV whatever one of them holds; only their speed is compared.
                swept = replace(on_drives, ssd=ssd, num_ssds=num, ssd_bytes=1 << 40, num_io_threads=num, depth=depth)
                found = plan(replace(sparse_job, fragment_bytes=size), swept)
                decode = found.phases["decode"]
                ops = decode.uses["ssd"].num_ops
                rows.append(
                    SweepRow(name, num, depth, size, found.itl_ns, ops / (decode.uses["ssd"].time_ns / 1e9),
                             decode.bound, decode.limit)
                )  # fmt: skip
    return Article(plan(job, machine), plan(sparse_job, replace(on_drives, ssd_bytes=1 << 40)), rows)


@dataclass(frozen=True, slots=True)
class Study:
    """Traffic of the published run. Bytes from geometry (modelled), seconds from its log (from the paper)."""

    read_bytes: int
    written_bytes: int
    prefill_s: float = 21.923
    decode_s: float = 1463.125
    total_s: float = 1485.049

    @property
    def read_bytes_per_s(self) -> tuple[float, float]:
        """Reads over decode, and over all of the run."""
        return self.read_bytes / self.decode_s, self.read_bytes / self.total_s

    @property
    def written_bytes_per_s(self) -> tuple[float, float, float]:
        """Writes over prefill, over decode, and over all of the run: half of the tokens are prompt."""
        half = self.written_bytes / 2
        return half / self.prefill_s, half / self.decode_s, self.written_bytes / self.total_s


def study(batch: int = 64, prompt: int = 256, output: int = 256) -> Study:
    """Return the traffic of full offload: step i reads `prompt` + i tokens of KV; each token is written once."""
    token_bytes = Job(preset("opt-6.7b"), batch=batch, context=prompt, output=output).shape().bytes_per_token
    read_tokens = sum(prompt + step for step in range(1, output))
    return Study(batch * read_tokens * token_bytes, batch * (prompt + output) * token_bytes)
