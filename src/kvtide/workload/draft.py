"""What a reader of a format hands over: a workload without name and account. Next: hashed, counted, texts.

Decides nothing; it is where readers and the loader meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.workload.requests import Ids
from kvtide.workload.rows import Columns


@dataclass(frozen=True, slots=True)
class Draft:
    """Requests and their blocks. Shapes: block_start [R + 1], block_ids [N]."""

    block_tokens: int
    columns: Columns
    block_start: Ids
    block_ids: npt.NDArray[np.integer]
    notes: list[str]
