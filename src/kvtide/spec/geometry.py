"""What one layer keeps for one token, and in which number format. Knows no model. Next: fields, then families.

A layer of *full* or *sliding* attention keeps a K and a V row for each KV head. A layer of *mla* (multi-head latent
attention) keeps one compressed row shared by all heads, from which K and V are computed: it counts as K, V is empty.
A layer of kind *none* (state-space, recurrent, linear attention) keeps nothing that grows with the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

from kvtide.errors import ConfigError

LayerKind = Literal["full", "sliding", "mla", "none"]
LAYER_KINDS: tuple[str, ...] = get_args(LayerKind)

# Bounds between any model published so far and nonsense in a file: each is some 16 times the largest known value.
HEADS_MAX = 1 << 14
HEAD_DIM_MAX = 1 << 14
POSITIONS_MAX = 1 << 31


class Dtype(Enum):
    """Number formats KV is stored in, with the bytes of one number."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT8 = "int8"

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return _ITEMSIZE[self]

    @classmethod
    def parse(cls, name: object) -> Dtype:
        """The format called `name` here or in a config.json (`float16`, `torch.bfloat16`).

        Raises: ConfigError that lists the known names.
        """
        if isinstance(name, cls):
            return name
        key = name.strip().lower().removeprefix("torch.") if isinstance(name, str) else ""
        found = _DTYPE_OF_NAME.get(key)
        if found is None:
            known = ", ".join(dtype.value for dtype in cls)
            raise ConfigError(f"unknown dtype {shown(name)}; type one of {known}")
        return found


_ITEMSIZE = {
    Dtype.FP32: 4,
    Dtype.FP16: 2,
    Dtype.BF16: 2,
    Dtype.FP8_E4M3: 1,
    Dtype.FP8_E5M2: 1,
    Dtype.INT8: 1,
}
_DTYPE_OF_NAME = {dtype.value: dtype for dtype in Dtype} | {
    "float32": Dtype.FP32,
    "float": Dtype.FP32,
    "float16": Dtype.FP16,
    "half": Dtype.FP16,
    "bfloat16": Dtype.BF16,
    "float8_e4m3fn": Dtype.FP8_E4M3,
    "float8_e5m2": Dtype.FP8_E5M2,
}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """KV one layer keeps, before tensor parallelism divides it.

    Shapes: K is `[num_kv_heads, head_dim_k]` a token, V is `[num_kv_heads, head_dim_v]`.
    Raises: ConfigError if kind and sizes do not fit together.
    """

    kind: LayerKind
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in LAYER_KINDS:
            raise ConfigError(f"unknown layer kind {shown(self.kind)}; one of {', '.join(LAYER_KINDS)}")
        least = 0 if self.kind == "none" else 1
        whole_number("num_kv_heads", self.num_kv_heads, least=least, most=HEADS_MAX)
        whole_number("head_dim_k", self.head_dim_k, least=least, most=HEAD_DIM_MAX)
        whole_number("head_dim_v", self.head_dim_v, least=0 if self.kind == "mla" else least, most=HEAD_DIM_MAX)
        if self.kind == "none" and (self.num_kv_heads or self.head_dim_k or self.head_dim_v):
            raise ConfigError("a layer of kind none keeps no KV: its heads and head sizes must be 0")
        if self.kind == "mla" and (self.num_kv_heads != 1 or self.head_dim_v):
            raise ConfigError("a layer of kind mla keeps one shared row: num_kv_heads must be 1 and head_dim_v 0")
        if (self.window_tokens is not None) != (self.kind == "sliding"):
            raise ConfigError(
                f"window_tokens belongs to layers of kind sliding, got {self.window_tokens} on {self.kind}"
            )
        if self.window_tokens is not None:
            whole_number("window_tokens", self.window_tokens, least=1, most=POSITIONS_MAX)

    @property
    def numbers_per_token(self) -> int:
        """Numbers (not bytes) of K and V one token adds."""
        return self.num_kv_heads * (self.head_dim_k + self.head_dim_v)


def whole_number(name: str, value: object, *, least: int, most: int) -> int:
    """`value`, if it is an int (no bool, no float) in `least..most`.

    Raises: ConfigError that says what was got and what is possible.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number in {least}..{most}, got {shown(value)}")
    if not least <= value <= most:
        raise ConfigError(f"{name} must be in {least}..{most}, got {shown(value)}")
    return value


def shown(value: object) -> str:
    """`value` for a message, cut short: files can hold anything, and very large integers refuse to print."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, (dict, list, tuple, set)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


NO_KV = LayerKV("none", 0, 0, 0)
