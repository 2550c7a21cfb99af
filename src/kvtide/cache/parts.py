"""Moving rows of K and V between whole rows, as models and windows have them, and the fragments of frames.

Only geometry: which bytes go where is `SlotLayout.pieces`. Frames of a layer come as one row a group, a column a part.

*Theory.* A window is `[T, H, D]`. A fragment that holds all heads has the same bytes in the same order, so it is copied
as it is. Fragments of one head each are `[T, D]`: those of a group are put side by side, `[H, T, D]`, and turned to
`[T, H, D]` while they are copied. Next: traffic.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.cache.ledger import Ids
from kvtide.cache.windows import Window, Windows
from kvtide.spec import Piece, SlotLayout
from kvtide.tiers.memory import FramePool

Rows = npt.NDArray[np.uint8]


def put_rows(
    pool: FramePool, layout: SlotLayout, layer: int, frames: Ids, spans: npt.NDArray[np.int64], k: Rows, v: Rows
) -> None:
    """Put the rows of new tokens into the frames of one layer.

    Shapes: frames [n, P]; spans [n, 3] (unit, first token in it, end); k [T, k_bytes of a token], v [T, v_bytes].
    """
    done, pieces = 0, layout.pieces[layer]
    for of_parts, (_, start, end) in zip(frames.tolist(), spans.tolist(), strict=True):
        rows = slice(done, done + end - start)
        for piece in pieces:
            columns = slice(piece.column, piece.column + piece.row_bytes)
            source = (v if piece.is_value else k)[rows, columns]
            pool.put(of_parts[piece.part], piece.start, piece.row_bytes, start, source)
        done = rows.stop


def fill_rows(
    windows: Windows, window: Window, row: int, first: int, layout: SlotLayout, rows: Rows, frames: Ids, num_tokens: int
) -> None:
    """Copy groups from number `first` on into a row of `window`, up to token `num_tokens` of the sequence.

    Shapes: rows [all frames, frame bytes]; frames [n, P].
    """
    layer, start = window.layer, first * layout.tokens_per_group
    for is_value, offset in (
        (False, windows.k_offset(window, row, start)),
        (True, windows.v_offset(window, row, start)),
    ):
        pieces = [piece for piece in layout.pieces[layer] if piece.is_value == is_value]
        if len(pieces) == 1:
            _copy_whole(windows, offset, rows, frames[:, pieces[0].part], pieces[0], layout, num_tokens - start)
        elif pieces:  # none: K and V share one row
            _copy_heads(windows, offset, rows, frames, pieces, layout, num_tokens - start)


def _copy_whole(
    windows: Windows, offset: int, rows: Rows, frames: Ids, piece: Piece, layout: SlotLayout, num_tokens: int
) -> None:
    """Copy one piece of each of `frames`, which holds all heads; the last one only as far as it is filled."""
    group, part, start = layout.tokens_per_group, layout.tokens_per_group * piece.row_bytes, piece.start
    num_full = min(len(frames), num_tokens // group)
    for index in range(num_full):
        windows.arena.write(offset + index * part, rows[frames[index], start : start + part])
    if num_full < len(frames):
        length = (num_tokens - num_full * group) * piece.row_bytes
        windows.arena.write(offset + num_full * part, rows[frames[num_full], start : start + length])


def _copy_heads(
    windows: Windows, offset: int, rows: Rows, frames: Ids, pieces: list[Piece], layout: SlotLayout, num_tokens: int
) -> None:
    """Copy groups whose heads lie apart, one copy a group. Pieces of all heads are alike; they come in order."""
    group, width, start, num_heads = layout.tokens_per_group, pieces[0].row_bytes, pieces[0].start, len(pieces)
    for index, of_heads in enumerate(frames):
        tokens = min(group, num_tokens - index * group)
        heads = rows[of_heads, start : start + tokens * width].reshape(num_heads, tokens, width)
        windows.arena.write(offset + index * group * num_heads * width, heads.transpose(1, 0, 2))
