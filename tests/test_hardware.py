"""The hardware catalogue: known figures, sources, interpolation, RAID 0, a user's file, a probe, and its document."""

from __future__ import annotations

import dataclasses
import heapq
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide import ConfigError, FormatError
from kvtide.hardware import LABELS, Catalogue, Link, Ssd, from_probe, load, raid0
from kvtide.hardware.table import render
from kvtide.io.drive import DeviceQueue
from kvtide.io.ops import READ, WRITE
from kvtide.probe.caps import DeviceCaps
from kvtide.probe.file import Probe
from kvtide.probe.fit import RoofFit
from kvtide.probe.memory import Dram, GpuCopies
from kvtide.roofline import Roof
from kvtide.spec import Dtype

KIB, MIB = 1 << 10, 1 << 20
DEEP = 1024
OURS = load()
DRIVES = sorted(OURS.ssds.values(), key=lambda ssd: ssd.name)
DOCUMENT = Path(__file__).parent.parent / "docs" / "hardware.md"
SOURCE = '[source.mine]\nlabel = "measured"\ntext = "fio on our server"\ndate = "2026-11"\n'
NETWORK = '[network.ours]\ntitle = "our network"\nbytes_per_s = [25e9, "mine"]\nlatency_ns = [2000, "mine"]\n'
LINK = '[link.ours]\ntitle = "t"\nnominal_bytes_per_s = [1e9, "mine"]\nlatency_ns = [9, "mine"]\n[link.ours.table]\n'
GPU = (
    '[gpu.Ours]\ntitle = "t"\nmemory_bytes = [1e9, "mine"]\nmemory_bytes_per_s = [1e9, "mine"]\n'
    'gemm_share = [0.5, "mine"]\nmemory_share = [0.5, "mine"]\n'
)


def entries(catalogue: Catalogue) -> list:
    return [entry for part in dataclasses.fields(catalogue) for entry in getattr(catalogue, part.name).values()]


# What the catalogue says.


def test_known_figures() -> None:
    h100 = OURS.gpu("h100")
    assert 80e9 <= h100.memory_bytes <= 85e9
    assert h100.memory_bytes_per_s == pytest.approx(3.35e12)
    assert h100.peak_flop_per_s(Dtype.BF16) == pytest.approx(989e12)
    assert h100.peak_flop_per_s(Dtype.FP8_E4M3) == pytest.approx(1979e12)
    assert h100.gemm_flop_per_s(Dtype.BF16) == pytest.approx(0.803 * 989e12)
    assert h100.decode_bytes_per_s == pytest.approx(0.8 * 3.35e12)
    assert OURS.gpu("h200").memory_bytes_per_s == pytest.approx(4.8e12)
    assert OURS.gpu("a100").memory_bytes_per_s == pytest.approx(2.039e12)
    assert OURS.link("pcie5-x16").nominal_bytes_per_s == pytest.approx(64e9)
    assert OURS.ssd("nvme-970pro").read.latency_ns == pytest.approx(21_500 + 35_760)
    assert OURS.ssd("nvme-970pro").transfer_bytes_max == 4096 << 6
    assert OURS.io_path("spdk").host_ns == pytest.approx(1e9 / 10.39e6, rel=0.01)
    assert OURS.memory("cxl-expander").latency_ns / OURS.memory("dram-ddr5").latency_ns == pytest.approx(3.5, abs=1.5)


def test_names_are_those_promised() -> None:
    promised = {
        "gpus": "h100 h200 a100 l40s rtx-4090 b200 mi300x ascend-910b cpu",
        "links": "pcie3-x16 pcie4-x16 pcie5-x16 pcie6-x16 nvlink-c2c",
        "memories": "dram-ddr4 dram-ddr5 cxl-expander",
        "ssds": "sata nvme-gen3 nvme-gen4 nvme-gen5 optane nvme-970pro",
        "networks": "rdma-100g rdma-400g tcp-10g tcp-100g",
        "io_paths": "buffered direct io_uring passthrough spdk",
    }
    for kind, names in promised.items():
        assert list(getattr(OURS, kind)) == names.split(), kind


def test_every_figure_names_its_source() -> None:
    for entry in entries(OURS):
        assert entry.figures, entry.name
        for key, figure in entry.figures.items():
            assert figure.label in LABELS, key
            assert len(figure.source) > 20, key
            assert re.fullmatch(r"20\d\d-\d\d", figure.date), key
            assert figure.unit, key
            assert figure.value > 0, key


def test_every_source_is_used() -> None:
    stated = tomllib.loads(resources.files("kvtide.hardware").joinpath("catalogue.toml").read_text())["source"]
    used = {(f.label, f.source, f.date) for entry in entries(OURS) for f in entry.figures.values()}
    assert {(s["label"], s["text"], s["date"]) for s in stated.values()} == used


def test_figures_are_the_values() -> None:
    ssd, gpu = OURS.ssd("optane"), OURS.gpu("l40s")
    assert ssd.read.latency_ns == ssd.figures["read.latency_ns"].value
    assert gpu.flop_per_s[Dtype.INT8] == gpu.figures["flop_per_s.int8"].value
    with pytest.raises(TypeError):
        gpu.figures["memory_bytes"] = gpu.figures["gemm_share"]


def test_figures_fit_together() -> None:
    for gpu in OURS.gpus.values():
        assert gpu.link is None or gpu.link in OURS.links
        assert gpu.flop_per_s[Dtype.FP32] < gpu.flop_per_s[Dtype.BF16] <= gpu.peak_flop_per_s(Dtype.FP8_E4M3) or (
            gpu.name == "cpu"
        )
    for link in OURS.links.values():
        assert max(rate for _, rate in link.table) < link.nominal_bytes_per_s
    for ssd in OURS.ssds.values():
        for roof in (ssd.read, ssd.write):
            assert 2 * KIB < roof.knee_bytes < 64 * KIB, ssd.name
            assert roof.channel_bytes_per_s <= roof.bytes_per_s_max * 1.05, ssd.name
            assert roof.host_ns == 0


def test_formats_without_units_are_computed_in_wider_ones() -> None:
    a100 = OURS.gpu("a100")
    assert a100.peak_flop_per_s(Dtype.FP8_E5M2) == a100.peak_flop_per_s(Dtype.FP16)
    narrow = dataclasses.replace(a100, flop_per_s={Dtype.INT8: 1.0})
    with pytest.raises(ConfigError, match="bf16 or a wider format, only for int8"):
        narrow.peak_flop_per_s(Dtype.BF16)


@pytest.mark.parametrize("kind", ["gpu", "link", "memory", "ssd", "network", "io_path"])
def test_unknown_names_list_near_and_all_names(kind: str) -> None:
    known = list(getattr(OURS, {"memory": "memories"}.get(kind, f"{kind}s")))
    assert getattr(OURS, kind)(f" {known[-1].upper()} ").name == known[-1]
    with pytest.raises(ConfigError) as caught:
        getattr(OURS, kind)(known[0] + "x")
    assert f"near it: {known[0]}" in str(caught.value)
    assert all(name in str(caught.value) for name in known)


# Links.


def test_link_is_exact_at_the_points_of_its_table() -> None:
    link = OURS.link("pcie5-x16")
    wanted = {4: 4.0, 8: 5.2, 16: 6.3, 24: 6.7, 28: 39.9, 64: 51.4}
    assert {size: link.bytes_per_s(size * KIB) / 1e9 for size in wanted} == pytest.approx(wanted)
    assert link.bytes_per_s(MIB) == link.bytes_per_s(64 * KIB)
    assert link.bytes_per_s(2 * KIB) == pytest.approx(link.bytes_per_s(4 * KIB) / 2)
    with pytest.raises(ConfigError, match="0 bytes"):
        link.bytes_per_s(0)


@pytest.mark.parametrize("link", OURS.links.values(), ids=lambda link: link.name)
@given(st.integers(1, 1 << 24), st.integers(1, 1 << 24))
def test_links_never_slow_down_with_size(link: Link, one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert link.bytes_per_s(small) <= link.bytes_per_s(large) * (1 + 1e-12) <= link.nominal_bytes_per_s


# Drives.


def simulated(ssd: Ssd, size: int, depth: int, kind: int = READ) -> float:
    """Bytes a second that DeviceQueue gives `depth` ops in flight, without the start."""
    queue, num = DeviceQueue(ssd.device_model()), 20 * depth if depth > 1 else 100
    in_flight = [queue.complete_ns(kind, size, 0) for _ in range(depth)]
    heapq.heapify(in_flight)
    times = []
    for _ in range(num):
        now = heapq.heappop(in_flight)
        times.append(now)
        heapq.heappush(in_flight, queue.complete_ns(kind, size, now))
    half = num // 2
    return (num - 1 - half) * size * 1e9 / (times[-1] - times[half])


@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("ssd", DRIVES, ids=lambda ssd: ssd.name)
@pytest.mark.parametrize(
    ("size", "depth"), [(4 * KIB, 1), (4 * KIB, DEEP), (128 * KIB, 1), (128 * KIB, DEEP), (MIB, 1), (MIB, DEEP)]
)
def test_device_model_agrees_with_the_roof_of_reads(ssd: Ssd, size: int, depth: int, num: int) -> None:
    many = raid0(ssd, num)
    assert simulated(many, size, depth) == pytest.approx(float(many.read.bytes_per_s(size, depth)), rel=0.1)


@pytest.mark.parametrize("ssd", DRIVES, ids=lambda ssd: ssd.name)
@pytest.mark.parametrize(("size", "depth"), [(4 * KIB, 1), (4 * KIB, DEEP), (128 * KIB, DEEP), (MIB, 1), (MIB, DEEP)])
def test_device_model_agrees_with_the_roof_of_writes(ssd: Ssd, size: int, depth: int) -> None:
    assert simulated(ssd, size, depth, WRITE) == pytest.approx(float(ssd.write.bytes_per_s(size, depth)), rel=0.1)


def test_raid0_adds_rates_and_capacity_but_not_latency() -> None:
    one = OURS.ssd("nvme-gen5")
    four = raid0(one, 4)
    assert four.name == "4x-nvme-gen5"
    assert four.capacity_bytes == 4 * one.capacity_bytes
    for many, single in ((four.read, one.read), (four.write, one.write)):
        assert many == Roof(
            single.latency_ns, single.channel_bytes_per_s, 4 * single.iops_max, 4 * single.bytes_per_s_max
        )
    assert four.sync_latency_ns == one.sync_latency_ns
    assert four.drive_writes_per_day == one.drive_writes_per_day
    assert four.figures["read.iops_max"].label == "estimate"
    assert four.figures["read.latency_ns"] == one.figures["read.latency_ns"]
    assert raid0(one, 1) is one
    with pytest.raises(ConfigError, match="at least one drive, got 0"):
        raid0(one, 0)


def test_io_path_adds_the_host_to_a_roof() -> None:
    roof = OURS.io_path("direct").over(OURS.ssd("optane").read)
    assert roof.bound(4 * KIB, DEEP) == "host"
    assert OURS.io_path("spdk").over(OURS.ssd("optane").read).bound(4 * KIB, DEEP) == "iops"


# A user's file.


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hardware.toml"
    path.write_text(text)
    return path


def test_user_file_adds_and_overrides(tmp_path: Path) -> None:
    network = NETWORK + 'host_ns = [250, "rdma-host"]\n'
    text = SOURCE + network + network.replace("network.ours", "network.RDMA-100G")
    theirs = load(written(tmp_path, text))
    assert theirs.network("OURS").bytes_per_s == 25e9
    assert theirs.network("ours").figures["latency_ns"].source == "fio on our server"
    assert theirs.network("ours").figures["host_ns"].label == "estimate"  # a source of ours may be named
    assert theirs.network("rdma-100g").title == "our network"
    assert theirs.gpus.keys() == OURS.gpus.keys()
    gpu = GPU + 'link = "PCIe5-x16"\n[gpu.Ours.flop_per_s]\nfp32 = [1e12, "mine"]\n'
    assert load(written(tmp_path, SOURCE + gpu)).gpu("ours").link == "pcie5-x16"


def test_user_source_of_the_same_key_leaves_our_figures_alone(tmp_path: Path) -> None:
    theirs = load(written(tmp_path, SOURCE.replace("mine", "spdk")))
    assert theirs.io_path("spdk").figures == OURS.io_path("spdk").figures


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1 2", "is no TOML file: .*line 1"),
        ("[gpus.h100]", "unknown key 'gpus'; known: source, gpu, link"),
        ("gpu = 3", r"\[gpu\] must be a table, got 3"),
        ("[source.mine]\nlabel = 'rumour'", "label must be one of datasheet, measured, paper, estimate, got 'rumour'"),
        (SOURCE.replace("2026-11", "last year"), "date must be a year and a month"),
        (SOURCE.replace("fio on our server", ""), "text must be one line of text"),
        (SOURCE + NETWORK, r"\[network.ours\]: host_ns must be \[number of ns, .*got nothing"),
        (SOURCE + NETWORK + "host_ns = 5", "host_ns must be .*got 5"),
        (SOURCE + NETWORK + 'host_ns = [-5, "mine"]', "host_ns must be a number above 0, in ns, got -5"),
        (SOURCE + NETWORK + 'host_ns = [nan, "mine"]', "host_ns must be a number above 0, in ns, got nan"),
        (SOURCE + NETWORK + f'host_ns = [1{"0" * 400}, "mine"]', "in ns, got a whole number of 1329 bits"),
        (SOURCE + NETWORK + f'host_ns = [1{"0" * 5000}, "mine"]', "is no TOML file"),
        ("[gpu]\na = " + "[" * 5000, "is no TOML file"),
        (SOURCE + NETWORK + 'host_ns = [1e-300, "mine"]', "host_ns must be a number above 0, in ns, got 1e-300"),
        (SOURCE + NETWORK + 'host_ns = [true, "mine"]', "host_ns must be a number above 0, in ns, got True"),
        (SOURCE + NETWORK + 'host_ns = [5, "yours"]', "names the source 'yours', which is not stated"),
        (SOURCE + NETWORK + 'host_ns = [5, "mine"]\nspeed = 1', "unknown key 'speed'; known: title, bytes_per_s"),
        (SOURCE + NETWORK.replace("ours", '"a b"') + 'host_ns = [5, "mine"]', "a name has up to 64 letters"),
        (SOURCE + LINK + "sizes_bytes = [1]\nbytes_per_s = []\nsource = 'mine'", "two lists of the same length"),
        (SOURCE + LINK + "sizes_bytes = [8, 4]\nbytes_per_s = [1, 1]\nsource = 'mine'", "that increase"),
        (SOURCE + LINK + "sizes_bytes = [4]\nbytes_per_s = [1]", "names the source None"),
        (SOURCE + GPU.replace("0.5", "1.5"), "gemm_share is a share and must be at most 1, got 1.5"),
        (SOURCE + GPU + "[gpu.Ours.flop_per_s]", "state at least one of fp32"),
        (SOURCE + GPU + '[gpu.Ours.flop_per_s]\nfp4 = [1, "mine"]', "unknown key 'fp4'; known: fp32"),
        (SOURCE + GPU + 'link = "rope"\n[gpu.Ours.flop_per_s]\nfp32 = [1, "mine"]', "no link is called 'rope'; known"),
        (SOURCE + '[ssd.ours]\ntitle = "t"', r"\[ssd.ours\] read must be a table, got nothing"),
        ("[io_path.a]\ntitle='t'\nhost_ns=[1,'xrp']\n[io_path.A]\ntitle='t'\nhost_ns=[1,'xrp']", "stated twice"),
    ],
)
def test_malformed_user_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(FormatError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_user_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "missing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="is no TOML file"):
        load(tmp_path / "binary.toml")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_catalogue_or_a_named_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(raw)
    try:
        assert load(path).gpus.keys() >= OURS.gpus.keys()
    except FormatError as error:
        assert str(path) in str(error)  # noqa: PT017


# A probe.


def probe(**more: object) -> Probe:
    roof = Roof(80_000, 2e9, 400e3, 3e9, 1500)
    fit = RoofFit(roof, 9, 0.02, 0.1, roof.knee_bytes, is_host_bound=False, depths=())
    write = dataclasses.replace(fit, roof=Roof(20_000, 1e9, 100e3, 1e9, 2000))
    values = {"engine": "uring", "is_direct": True, "file_bytes": MIB, "seconds": 1.0, "num_rounds": 2, "seed": 0}
    values["caps"] = DeviceCaps(name="nvme0n1", capacity_bytes=10**12, max_hw_sectors_bytes=MIB, model="Fast Drive")
    values["date"] = "2026-11-30T10:00:00+00:00"
    return Probe(cells=[], read=fit, write=write, **(values | more))


def test_probe_becomes_a_drive_and_a_path() -> None:
    found = from_probe(probe(), "mine")
    assert found.drive.title == "Fast Drive"
    assert found.drive.read == Roof(80_000, 2e9, 400e3, 3e9)
    assert found.io_path.over(found.drive.read) == probe().read.roof
    assert (found.drive.capacity_bytes, found.drive.transfer_bytes_max) == (1e12, MIB)
    assert found.drive.drive_writes_per_day is None
    assert found.drive.figures["read.iops_max"].label == "measured"
    assert found.drive.figures["read.iops_max"].date == "2026-11"
    assert found.drive.figures["sync_latency_ns"].label == "estimate"
    assert found.drive.device_model().iops_max == 400_000
    assert found.memory is None
    assert found.link is None
    assert raid0(found.drive, 2).capacity_bytes == 2e12


def test_probe_without_names_or_sizes() -> None:
    found = from_probe(probe(caps=DeviceCaps(), date=""))
    assert found.drive.title == "probed drive"
    assert found.drive.capacity_bytes is None
    assert raid0(found.drive, 2).capacity_bytes is None
    assert found.drive.figures["read.latency_ns"].date == "unknown"


def test_probe_of_memory_and_gpu_copies() -> None:
    copies = GpuCopies("Big GPU", "", (4 * KIB, 64 * KIB, MIB), (4e9, 40e9, 50e9), (3e9, 30e9, 40e9))
    found = from_probe(probe(dram=Dram(MIB, 0, 2, 8e9, 12e9), gpu=copies))
    assert found.memory is not None
    assert found.memory.copy_bytes_per_s == 12e9
    assert found.link is not None
    assert found.link.bytes_per_s(64 * KIB) == pytest.approx(40e9)
    assert found.link.latency_ns == pytest.approx(1024)


# The document.


def test_document_shows_the_catalogue() -> None:
    assert render(OURS) in DOCUMENT.read_text(), "docs/hardware.md is stale: put in what kvtide.hardware.table renders"


def test_example_of_the_document_loads(tmp_path: Path) -> None:
    example = re.search(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert example is not None
    theirs = load(written(tmp_path, example[1]))
    assert len(entries(theirs)) > len(entries(OURS))
