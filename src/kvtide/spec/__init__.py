"""What a model's KV is and where it lies: geometry, layouts, fragments, identity. Pure values, no effects."""

from kvtide.spec.anatomy import Mla
from kvtide.spec.fragments import Access, Fragments, Layout, fragments
from kvtide.spec.geometry import Dtype, LayerKV
from kvtide.spec.identity import FORMAT_VERSION, Identity
from kvtide.spec.layout import PAGE_BYTES, KVShape, LayerShape, SlotLayout, auto_group_blocks, page_up
from kvtide.spec.model import ModelSpec
from kvtide.spec.presets import PRESET_NAMES, preset

__all__ = [
    "FORMAT_VERSION",
    "PAGE_BYTES",
    "PRESET_NAMES",
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
    "SlotLayout",
    "auto_group_blocks",
    "fragments",
    "page_up",
    "preset",
]
