"""What a model's KV is and where it lies: geometry, layouts, fragments, identity. Pure values, no effects."""

from kvtide.spec.anatomy import Mla
from kvtide.spec.fragments import Access, Fragments, Layout, fragments
from kvtide.spec.geometry import Dtype, LayerKV
from kvtide.spec.identity import FORMAT_VERSION, Identity
from kvtide.spec.layout import (
    PAGE_BYTES,
    SPLITS,
    KVShape,
    LayerShape,
    Piece,
    SlotLayout,
    Split,
    auto_group_blocks,
    page_up,
    why_not_split,
)
from kvtide.spec.model import ModelSpec
from kvtide.spec.presets import PRESET_NAMES, preset

__all__ = [
    "FORMAT_VERSION",
    "PAGE_BYTES",
    "PRESET_NAMES",
    "SPLITS",
    "Access",
    "Dtype",
    "Fragments",
    "Identity",
    "KVShape",
    "LayerKV",
    "LayerShape",
    "Layout",
    "Mla",
    "ModelSpec",
    "Piece",
    "SlotLayout",
    "Split",
    "auto_group_blocks",
    "fragments",
    "page_up",
    "preset",
    "why_not_split",
]
