"""Does a leveled tree write what the model says? RocksDB under random keys, counted by itself and by the device.

New rows of 108 bytes at random keys, at sizes that fill two to four levels of a small tree, and one that is larger; and
sequential keys, and universal compaction, beside them. The plain baseline is the row's own size: amplification 1.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from _bench import environment, parser, summary, warnings_of, write_result
from kvtide.errors import UnsupportedError
from kvtide.recall.model import Tree, leveled, tiered
from kvtide.stores.device import LoopDisk, Shared, sync_file_system, why_not
from kvtide.stores.rocksdb import levels_of, tickers

MIB = 1 << 20
KEY_BYTES, VALUE_BYTES, BATCH = 8, 100, 1000
ROW_BYTES = KEY_BYTES + VALUE_BYTES
SIZES = (60 * MIB, 180 * MIB, 540 * MIB)
SMOKE = (6 * MIB,)


def tree(memtable_bytes: int) -> Tree:
    """Return the measured tree: small, so that few bytes have many levels."""
    return Tree(
        memtable_bytes=memtable_bytes,
        l0_files=4,
        base_bytes=4 * memtable_bytes,
        file_bytes=memtable_bytes,
        row_bytes=ROW_BYTES,
        size_ratio=10,
    )


def options(shape: Tree, style: str) -> Any:
    """Return RocksDB's options for a tree: level 0 may not grow beyond what starts a compaction."""
    from rocksdict import DBCompactionStyle, DBCompressionType, Options

    made = Options(raw_mode=True)
    made.create_if_missing(True)  # noqa: FBT003
    made.set_compression_type(DBCompressionType.none())
    made.set_write_buffer_size(shape.memtable_bytes)
    made.set_max_write_buffer_number(2)
    made.set_target_file_size_base(shape.file_bytes)
    made.set_max_bytes_for_level_base(shape.base_bytes)
    made.set_max_bytes_for_level_multiplier(shape.size_ratio)
    made.set_level_compaction_dynamic_level_bytes(False)
    made.set_level_zero_file_num_compaction_trigger(shape.l0_files)
    if style == "leveled":
        made.set_level_zero_slowdown_writes_trigger(shape.l0_files)
        made.set_level_zero_stop_writes_trigger(shape.l0_files + 1)
    else:
        made.set_compaction_style(DBCompactionStyle.universal())
    made.set_max_background_jobs(2)
    made.enable_statistics()
    return made


def keys(first: int, num: int, *, is_random: bool) -> list[bytes]:
    """Return keys of rows, each row's own: in order, or spread over all keys."""
    rows = np.arange(first, first + num, dtype=np.uint64)
    raw = (mixed(rows) if is_random else rows).astype(">u8").tobytes()
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def mixed(rows: np.ndarray) -> np.ndarray:
    """Return a number for each row as a hash gives it, no two alike. Source: the finalizer of splitmix64."""
    rows = rows * np.uint64(0x9E3779B97F4A7C15)
    rows = (rows ^ (rows >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    rows = (rows ^ (rows >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return rows ^ (rows >> np.uint64(31))


def fill(folder: Path, made: Any, num: int, *, is_random: bool, rng: np.random.Generator) -> dict[str, int]:
    """Insert `num` rows and wait until nothing is left to merge; return RocksDB's counters."""
    from rocksdict import Rdict, WriteBatch

    pool = rng.bytes(MIB)
    database = Rdict(str(folder), made)
    for first in range(0, num, BATCH):
        batch = WriteBatch(raw_mode=True)
        for index, key in enumerate(keys(first, min(BATCH, num - first), is_random=is_random)):
            at = ((first + index) * 7919) % (len(pool) - VALUE_BYTES)
            batch.put(key, pool[at : at + VALUE_BYTES])
        database.write(batch)
    database.flush()
    until = time.monotonic() + 60
    while time.monotonic() < until and any(
        database.property_int_value(f"rocksdb.{name}") for name in ("num-running-compactions", "compaction-pending")
    ):
        time.sleep(0.1)
    found = tickers(made.get_statistics())
    levels = [int(database.property_value(f"rocksdb.num-files-at-level{level}") or 0) for level in range(7)]
    found |= {f"files_at_level_{level}": num for level, num in enumerate(levels)}
    log = (folder / "LOG").read_text(errors="replace")
    found |= {f"written_to_level_{level}": num for level, num in levels_of(log).items()}
    database.close()
    return found


def measure(
    work: Path, shape: Tree, user_bytes: int, style: str, *, is_random: bool, rng: np.random.Generator
) -> dict[str, Any]:
    """Return one case: amplification by RocksDB's counters, by the device, and by the model."""
    num = user_bytes // ROW_BYTES
    user_bytes = num * ROW_BYTES
    with ExitStack() as stack:
        place = stack.enter_context(
            Shared(work) if why_not() else LoopDisk(work, size_bytes=6 * user_bytes + 512 * MIB)
        )
        before, started = place.counts(), time.monotonic()
        made = options(shape, style)
        found = fill(place.folder / "rocks", made, num, is_random=is_random, rng=rng)
        sync_file_system(place.folder)
        device, seconds = place.counts() - before, time.monotonic() - started
        source = place.source
    log, flush, merged = (found.get(name, 0) for name in ("wal.bytes", "flush.write.bytes", "compact.write.bytes"))
    model = leveled(shape, user_bytes, is_random=is_random) if style == "leveled" else tiered(shape, user_bytes)
    total = (log + flush + merged) / user_bytes
    return {
        "name": f"{style}, {'random' if is_random else 'sequential'} keys, {user_bytes / MIB:.0f} MiB",
        "label": "measured",
        "user_bytes": user_bytes,
        "rows": num,
        "tree": {name: getattr(shape, name) for name in Tree.__dataclass_fields__},
        "statistics": {"log": log / user_bytes, "flush": flush / user_bytes, "compaction": merged / user_bytes},
        "amplification": summary([total]),
        "device_amplification": device.write_bytes / user_bytes,
        "device_read_bytes": device.read_bytes,
        "device_source": source,
        "files_at_levels": [found[f"files_at_level_{level}"] for level in range(7)],
        "written_to_levels": [found.get(f"written_to_level_{level}", 0) / user_bytes for level in range(7)],
        "seconds": seconds,
        "model": {"log": model.log, "flush": model.flush, "compaction": list(model.compaction), "total": model.total},
        "model_error": model.total / total - 1,
    }


def run(arguments: Any) -> dict[str, Any]:
    """Measure all cases."""
    rng = np.random.default_rng(arguments.seed)
    arguments.dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="lsm-", dir=arguments.dir))
    sizes = SMOKE if arguments.smoke else tuple(int(size * MIB) for size in arguments.sizes)
    shape = tree(MIB // 4 if arguments.smoke else MIB)
    cases = [(size, "leveled", True) for size in sizes]
    cases += [] if arguments.smoke else [(sizes[0], "leveled", False), (sizes[1], "universal", True)]
    found = []
    try:
        for size, style, is_random in cases:
            found.append(measure(work, shape, size, style, is_random=is_random, rng=rng))
            print(_line(found[-1]), file=sys.stderr)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {"cases": found}


def _line(case: dict[str, Any]) -> str:
    said, model = case["statistics"], case["model"]
    return (
        f"{case['name']:36} RocksDB {case['amplification']['median']:6.2f} (log {said['log']:.2f}, flush "
        f"{said['flush']:.2f}, compaction {said['compaction']:.2f}), device {case['device_amplification']:6.2f}, model "
        f"{model['total']:6.2f} ({case['model_error']:+.0%}) {[round(each, 2) for each in model['compaction']]} "
        f"written to levels {[round(each, 2) for each in case['written_to_levels']]}, {case['seconds']:.0f} s"
    )


def main() -> None:
    """Run and tell."""
    made = parser(__doc__ or "")
    made.add_argument("--sizes", type=float, nargs="+", default=[size / MIB for size in SIZES], help="user MiB")
    arguments = made.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    payload: dict[str, Any] = {"environment": environment(arguments.dir), "seed": arguments.seed, "repeats": 1}
    try:
        import rocksdict
    except ImportError:
        payload |= {"result": "skipped", "reason": "rocksdict is not installed (pip install rocksdict)"}
    else:
        try:
            payload |= {"rocksdict": getattr(rocksdict, "__version__", "unknown"), **run(arguments)}
        except UnsupportedError as error:
            payload |= {"result": "skipped", "reason": str(error)}
    payload["warnings"] = warnings_of("amplification", [1.0]) if "cases" in payload else []
    if arguments.json:
        import json

        print(json.dumps(payload))
    write_result("lsm_model", payload, arguments.out)


if __name__ == "__main__":
    main()
