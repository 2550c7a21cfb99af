"""What RocksDB says of itself: the statistics string, and the events in its LOG. Next: causes.

Reads text that others wrote: a line that does not fit is passed over. Knows no device.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

_TICKER = re.compile(r"^\s*rocksdb\.([a-z0-9.\-]+) COUNT : (\d{1,19})\s*$")
_EVENT = "EVENT_LOG_v1 "
LOG_BYTES_MAX = 64 << 20  # of a LOG file that is read


def tickers(text: str) -> dict[str, int]:
    """Return the counters of a statistics string, without `rocksdb.`; of each the last value that is there."""
    found = (_TICKER.match(line) for line in text.splitlines())
    return {match[1]: int(match[2]) for match in found if match}


@dataclass(slots=True)
class Tables:
    """Which table files came from what, by file number, and the bytes they had."""

    flush: dict[int, int] = field(default_factory=dict)
    compaction: dict[int, int] = field(default_factory=dict)

    @property
    def flush_bytes(self) -> int:
        """Bytes of tables written by flushes."""
        return sum(self.flush.values())

    @property
    def compaction_bytes(self) -> int:
        """Bytes of tables written by compactions."""
        return sum(self.compaction.values())


def tables_of(log: str) -> Tables:
    """Return the tables that the text of a LOG file tells of. A job that began as a flush writes flushed tables."""
    flushes: set[int] = set()
    created: list[tuple[int, int, int]] = []
    for line in log.splitlines():
        event = _event(line)
        job = event.get("job")
        if not isinstance(job, int):
            continue
        if event.get("event") == "flush_started":
            flushes.add(job)
        elif event.get("event") == "table_file_creation":
            number, size = event.get("file_number"), event.get("file_size")
            if isinstance(number, int) and isinstance(size, int):
                created.append((job, number, size))
    tables = Tables()
    for job, number, size in created:
        (tables.flush if job in flushes else tables.compaction)[number] = size
    return tables


def levels_of(log: str) -> dict[int, int]:
    """Return the bytes that compactions wrote into each level, as a LOG file tells. Files that only moved count 0."""
    found: dict[int, int] = {}
    for line in log.splitlines():
        event = _event(line)
        level, size = event.get("output_level"), event.get("total_output_size")
        if event.get("event") == "compaction_finished" and isinstance(level, int) and isinstance(size, int):
            found[level] = found.get(level, 0) + size
    return found


def _event(line: str) -> dict[str, object]:
    _, mark, text = line.partition(_EVENT)
    if not mark:
        return {}
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}
