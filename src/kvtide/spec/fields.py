"""Checked access to a config.json: every value is judged before it is used. Knows no model. Next: families.

A config.json comes from strangers. A field is taken only with the right type and within bounds; `null` counts as
absent, as the hub's files use it so; what is missing is gathered, so that one message names all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvtide.errors import ConfigError
from kvtide.spec.geometry import shown, whole_number

Frozen = str | int | float | bool | None | tuple["Frozen", ...]

TEXT_MAX = 256
_FREEZE_DEPTH_MAX = 5  # rope parameters by layer type, with lists of factors inside, are three deep
_FREEZE_ITEMS_MAX = 4096
_SHOWN_KEYS_MAX = 12


class Fields:
    """One config, its defaults, and the list of what it lacks."""

    def __init__(self, config: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        self._config = config
        self._defaults = defaults
        self._missing: list[str] = []

    def get(self, *names: str) -> object:
        """Raw value of the first of `names` that is present and not null, else its default, else None."""
        for source in (self._config, self._defaults):
            for name in names:
                value = source.get(name)
                if value is not None:
                    return value
        return None

    def need(self, *names: str, most: int, least: int = 1) -> int:
        """Whole number under the first of `names` that is there. If none is, it is noted, and `least` stands in."""
        value = self.get(*names)
        if value is None:
            self._missing.append(" or ".join(names[:2]))
            return least
        return whole_number(names[0], value, least=least, most=most)

    def count(self, *names: str, default: int, most: int, least: int = 1) -> int:
        """Whole number under the first of `names` that is there, else `default`."""
        value = self.get(*names)
        return default if value is None else whole_number(names[0], value, least=least, most=most)

    def optional(self, *names: str, most: int) -> int | None:
        """Positive whole number under the first of `names` that is there, else None."""
        value = self.get(*names)
        return None if value is None else whole_number(names[0], value, least=1, most=most)

    def flag(self, name: str, *, default: bool) -> bool:
        """Boolean under `name`, else `default`."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {shown(value)}")
        return value

    def text(self, *names: str) -> str | None:
        """Short text under the first of `names` that is there, else None."""
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, str) or not 0 < len(value) <= TEXT_MAX:
            raise ConfigError(f"{names[0]} must be a text of 1..{TEXT_MAX} characters, got {shown(value)}")
        return value

    def items(self, name: str, *, most: int) -> list[object] | None:
        """List under `name` of at most `most` entries, else None. The entries are not judged yet."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) > most:
            raise ConfigError(f"{name} must be a list of at most {most} entries, got {shown(value)}")
        return list(value)

    def indices(self, name: str, *, most: int) -> frozenset[int]:
        """Set of layer numbers below `most` listed under `name`; empty if absent."""
        entries = self.items(name, most=most) or []
        return frozenset(whole_number(f"{name}[]", entry, least=0, most=most - 1) for entry in entries)

    def check_complete(self, model_type: str) -> None:
        """Raise ConfigError naming every field that was needed and not there, and what was there instead."""
        if not self._missing:
            return
        keys = sorted(str(key)[:40] for key in self._config)
        more = f" and {len(keys) - _SHOWN_KEYS_MAX} more" if len(keys) > _SHOWN_KEYS_MAX else ""
        got = ", ".join(keys[:_SHOWN_KEYS_MAX]) or "no field at all"
        raise ConfigError(
            f"the config of model_type {model_type} lacks {', '.join(self._missing)}; got {got}{more}; "
            "add these fields to the config.json, or type a preset name"
        )


def freeze(value: object, *, depth: int = 0) -> Frozen:
    """`value` as nested tuples of plain values; a mapping becomes its sorted (key, value) pairs.

    Raises: ConfigError for anything not finite, too deep, too long or of another type.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() < 64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, str) and len(value) <= TEXT_MAX:
        return value
    if isinstance(value, (list, tuple)) and len(value) <= _FREEZE_ITEMS_MAX and depth < _FREEZE_DEPTH_MAX:
        return tuple(freeze(entry, depth=depth + 1) for entry in value)
    if isinstance(value, Mapping) and len(value) <= _FREEZE_ITEMS_MAX and depth < _FREEZE_DEPTH_MAX:
        pairs = sorted((str(key)[:TEXT_MAX], entry) for key, entry in value.items() if isinstance(key, str))
        return tuple((key, freeze(entry, depth=depth + 1)) for key, entry in pairs)
    raise ConfigError(f"rope parameters hold a value that is no finite number, short text or list: {shown(value)}")
