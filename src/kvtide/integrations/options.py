"""What a plug-in's configuration may say, the same in every engine. Next: the plug-ins."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError
from kvtide.tiers.cipher import MasterKey

CAPACITY = "16GiB"


@dataclass(frozen=True, slots=True)
class PlugInOptions:
    """Where chunks lie, how many, and who shares them.

    `capacity` bounds the files of one process together, as bytes or `64GiB`. `salt` parts tenants, or deployments whose
    keys do not differ, that share a directory. `metrics_port` is where kvtide's own metrics are served, as a port or
    `HOST:PORT`; None: nowhere. `key_file` has the key that chunks are encrypted with on disk; None: they are not.
    """

    directory: str
    capacity: str | int = CAPACITY
    salt: str = ""
    metrics_port: str | int | None = None
    key_file: str | None = None

    @classmethod
    def of(
        cls, told: dict[str, Any], *, where: str, directory: str, engines_own: Collection[str] = ()
    ) -> PlugInOptions:
        """Take the options out of `told`, the engine's `where`; `directory` is the one if none is told.

        Raises: ConfigError for a key that means nothing to kvtide, nor to the engine, which reads `engines_own` itself.
        """
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(told) - known - set(engines_own)):
            beside = f", beside {', '.join(sorted(engines_own))}" if engines_own else ""
            raise ConfigError(f"{where} has {', '.join(unknown)}; kvtide's keys are {', '.join(sorted(known))}{beside}")
        return cls(**{"directory": directory, **{name: told[name] for name in known & set(told)}})

    def master(self) -> MasterKey | None:
        """Return the key in `key_file`; None without one. Raises: as `MasterKey.read`."""
        return master_in(self.key_file)


def master_in(key_file: str | None) -> MasterKey | None:
    """Return the key in the file; None without one.

    Raises: as `MasterKey.read`.
    """
    return None if key_file is None else MasterKey.read(Path(key_file).expanduser())
