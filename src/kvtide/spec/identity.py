"""Everything stored KV depends on, in one value with one digest: KV of two identities must never be mixed. Pure.

The digest names a store's directory, and `describe` is what its identity.json says. Next: blocks.

*Theory.* digest = SHA-256 of the JSON of `describe()` with sorted keys, no spaces, ASCII only. Lists and tuples are
the same there; floats are written in the shortest form that reads back equal. `split`, `facts` and `encryption` are
told only where there are any: stores made before there were such keep their names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtide.errors import ConfigError, FormatError
from kvtide.spec.anatomy import LAYERS_MAX
from kvtide.spec.fields import TEXT_MAX, Frozen, freeze
from kvtide.spec.fragments import Layout
from kvtide.spec.geometry import Dtype, shown, whole_number
from kvtide.spec.layout import (
    BLOCK_TOKENS_MAX,
    GROUP_BLOCKS_MAX,
    PAGE_BYTES,
    SPLITS,
    TP_MAX,
    KVShape,
    LayerShape,
    SlotLayout,
    Split,
)
from kvtide.spec.model import ModelSpec, RopeParameters

FORMAT_VERSION = 1
_ROW_BYTES_MAX = 1 << 32
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_ENCRYPTION = re.compile(r"(aes-256-gcm key [0-9a-f]{16})?", re.ASCII)
_OPTIONAL = {"split", "facts", "encryption"}

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True)
class Identity:
    """What KV depends on. Digests are SHA-256 in hexadecimal; `adapter` is empty without one.

    `layers` has (layer number in the model, K bytes a token, V bytes a token, heads, window or 0) for each layer that
    keeps KV on this rank. `facts` are what else KV depends on that another engine made: its name and version, its
    layout, the other ranks. `encryption` says how it is encrypted at rest and names the key, without telling it; empty
    where it is not.
    """

    model: str
    weights_digest: str
    tokenizer_digest: str
    revision: str
    adapter: str
    rope: RopeParameters
    dtype: Dtype
    layout: Layout
    block_tokens: int
    group_blocks: int
    tp_rank: int
    tp_size: int
    layers: tuple[tuple[int, int, int, int, int], ...]
    format_version: int = FORMAT_VERSION
    split: Split = "none"
    facts: tuple[tuple[str, str], ...] = ()
    encryption: str = ""

    def __post_init__(self) -> None:
        _text("model", self.model, least=1)
        _text("revision", self.revision)
        _text("adapter", self.adapter)
        for label, digest in (("weights_digest", self.weights_digest), ("tokenizer_digest", self.tokenizer_digest)):
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                raise ConfigError(f"{label} must be 64 hexadecimal digits, got {shown(digest)}")
        whole_number("block_tokens", self.block_tokens, least=1, most=BLOCK_TOKENS_MAX)
        whole_number("group_blocks", self.group_blocks, least=1, most=GROUP_BLOCKS_MAX)
        whole_number("tp_size", self.tp_size, least=1, most=TP_MAX)
        whole_number("tp_rank", self.tp_rank, least=0, most=self.tp_size - 1)
        whole_number("format_version", self.format_version, least=1, most=1 << 16)
        if self.split not in SPLITS:
            raise ConfigError(f"split is {shown(self.split)}; known are {', '.join(SPLITS)}")
        if not isinstance(self.encryption, str) or not _ENCRYPTION.fullmatch(self.encryption):
            raise ConfigError(f"encryption is {shown(self.encryption)}; known is aes-256-gcm key, and its 16 digits")
        _check_layers(self.layers)
        for name, told in self.facts:
            _text("the name of a fact", name, least=1)
            _text(name, told)

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        shape: KVShape,
        *,
        block_tokens: int,
        group_blocks: int,
        weights_digest: str,
        tokenizer_digest: str,
        revision: str = "",
        adapter: str = "",
        layout: Layout = Layout.LAYER_MAJOR,
        split: Split = "none",
    ) -> Identity:
        """Identity of the KV that `model` writes on the rank of `shape`."""
        return cls(
            model=model.name,
            weights_digest=weights_digest,
            tokenizer_digest=tokenizer_digest,
            revision=revision,
            adapter=adapter,
            rope=model.rope,
            dtype=shape.dtype,
            layout=layout,
            block_tokens=block_tokens,
            group_blocks=group_blocks,
            tp_rank=shape.tp_rank,
            tp_size=shape.tp_size,
            layers=tuple(
                (index, one.k_bytes, one.v_bytes, one.num_heads, one.window_tokens or 0)
                for index, one in zip(shape.layer_index, shape.layers, strict=True)
            ),
            split=split,
        )

    def digest(self) -> bytes:
        """32 bytes that differ whenever anything KV depends on differs."""
        text = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode("ascii")).digest()

    def describe(self) -> dict[str, Json]:
        """All fields as JSON values, for a person to read and for `from_json` to take back."""
        told: dict[str, Json] = {
            "model": self.model,
            "weights_digest": self.weights_digest,
            "tokenizer_digest": self.tokenizer_digest,
            "revision": self.revision,
            "adapter": self.adapter,
            "rope": {name: _thaw(value) for name, value in self.rope},
            "dtype": self.dtype.value,
            "layout": self.layout.value,
            "block_tokens": self.block_tokens,
            "group_blocks": self.group_blocks,
            "tp_rank": self.tp_rank,
            "tp_size": self.tp_size,
            "layers": [list(layer) for layer in self.layers],
            "format_version": self.format_version,
        }
        if self.split != "none":
            told["split"] = self.split
        if self.facts:
            told["facts"] = dict(self.facts)
        if self.encryption:
            told["encryption"] = self.encryption
        return told

    def shape(self) -> KVShape:
        """The KV geometry this identity was made for."""
        return KVShape(
            dtype=self.dtype,
            layers=tuple(LayerShape(k, v, heads, window or None) for _, k, v, heads, window in self.layers),
            layer_index=tuple(layer[0] for layer in self.layers),
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
        )

    def slot(self) -> SlotLayout:
        """The slots that KV of this identity is stored in.

        Raises: ConfigError if its layers cannot be cut as it says.
        """
        shape = self.shape()
        if self.is_chunk and any(layer.k_bytes % PAGE_BYTES for layer in shape.layers):  # they lie side by side
            shape = KVShape(self.dtype, (LayerShape(sum(layer.k_bytes for layer in shape.layers), 0, 1),), (0,))
        is_encrypted = bool(self.encryption)
        return SlotLayout(shape, self.block_tokens, self.group_blocks, self.split, is_encrypted=is_encrypted)

    @property
    def is_chunk(self) -> bool:
        """Whether this is another engine's chunk, whose pieces in memory are told as layers: see `chunks.options`."""
        is_one = self.block_tokens == self.group_blocks == 1 and not self.rope and self.tokenizer_digest == "0" * 64
        return is_one and not any(v_bytes for _, _, v_bytes, _, _ in self.layers)

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "identity.json") -> Identity:
        """The identity `describe` wrote, from its JSON text.

        Raises: FormatError naming `where`, the field, what was expected and what was found.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: not JSON: {error}") from error
        if not isinstance(found, dict):
            raise FormatError(f"{where}: expected a JSON object, found {shown(found)}")
        known = set(cls.__dataclass_fields__)
        missing, unknown = sorted(known - set(found) - _OPTIONAL), sorted(set(found) - known)
        if missing or unknown:
            raise FormatError(f"{where}: fields missing: {missing or 'none'}; fields unknown: {shown(unknown)}")
        try:
            return cls(**_values(found))
        except (ConfigError, TypeError, ValueError) as error:
            raise FormatError(f"{where}: {error}") from error


def _values(found: Mapping[str, object]) -> dict[str, Any]:
    """Fields of an identity from JSON values; `Identity` judges them."""
    rope, layers, facts = found["rope"], found["layers"], found.get("facts", {})
    if not isinstance(rope, dict) or not isinstance(layers, list) or not all(isinstance(row, list) for row in layers):
        raise ConfigError("rope must be an object and layers a list of lists")
    if not isinstance(facts, dict):
        raise ConfigError("facts must be an object")
    return {
        **found,
        "rope": tuple((name, freeze(value)) for name, value in sorted(rope.items())),
        "dtype": Dtype(found["dtype"]),
        "layout": Layout(found["layout"]),
        "layers": tuple(tuple(row) for row in layers),
        "facts": tuple(sorted(facts.items())),
    }


def _text(label: str, text: object, *, least: int = 0) -> None:
    if not isinstance(text, str) or not least <= len(text) <= TEXT_MAX:
        raise ConfigError(f"{label} must be a text of {least}..{TEXT_MAX} characters, got {shown(text)}")


def _check_layers(layers: tuple[tuple[int, ...], ...]) -> None:
    if not 0 < len(layers) <= LAYERS_MAX:
        raise ConfigError(f"layers must have 1..{LAYERS_MAX} entries, got {len(layers)}")
    before = -1
    for row in layers:
        if len(row) != 5:
            raise ConfigError(f"a layer must have 5 numbers, got {shown(row)}")
        before = whole_number("layer number", row[0], least=before + 1, most=LAYERS_MAX - 1)
        whole_number("K bytes a token", row[1], least=1, most=_ROW_BYTES_MAX)
        whole_number("V bytes a token", row[2], least=0, most=_ROW_BYTES_MAX)
        whole_number("heads", row[3], least=1, most=row[1])
        whole_number("window", row[4], least=0, most=1 << 31)


def _thaw(value: Frozen) -> Json:
    """`value` with lists for tuples. Pairs stay lists of two: reading them back gives equal tuples."""
    return [_thaw(entry) for entry in value] if isinstance(value, tuple) else value
