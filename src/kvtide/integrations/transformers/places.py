"""Where the KV of a model lies: memory on its device, and the tiers below DRAM. Next: store.

Decides which tiers there are; knows no prompt and no step.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from kvtide.cache import CpuArena
from kvtide.cache.windows import DeviceArena
from kvtide.errors import UnsupportedError
from kvtide.integrations.transformers.models import LoadedModel
from kvtide.spec import Identity, SlotLayout
from kvtide.tiers.cipher import MasterKey
from kvtide.tiers.contract import Tier
from kvtide.tiers.dial import open_remote
from kvtide.tiers.namespace import OpenNamespace, cipher_for, open_namespace
from kvtide.tiers.remote import RemoteTier
from kvtide.tiers.stacked import StackedTier
from kvtide.trace.record import Recorder

if TYPE_CHECKING:
    from kvtide.integrations.transformers.store import StoreOptions


class Below:
    """The tiers below DRAM: a file, a remote, the one over the other, or none.

    Raises: ConfigError for a foreign directory or a URL that means nothing; FormatError for files that are not what
    they claim; IoError if another process owns the store or the disk refuses; UnsupportedError without the library
    for a remote. A remote that does not answer is no error.
    """

    def __init__(
        self,
        identity: Identity,
        layout: SlotLayout,
        options: StoreOptions,
        recorder: Recorder | None,
        master: MasterKey | None,
    ) -> None:
        self.namespace: OpenNamespace | None = None
        self.remote: RemoteTier | None = None
        if options.remote is not None:
            self.remote = open_remote(options.remote, layout, identity.digest(), cipher=cipher_for(identity, master))
        if options.directory is not None and options.disk_bytes:
            self.namespace = open_namespace(
                options.directory,
                identity,
                layout,
                capacity_bytes=options.disk_bytes,
                engine=options.engine,
                depth_max=options.depth_max,
                recorder=recorder,
                gap_bytes_max=options.gap_bytes_max,
                master=master,
            )
        self.tier: Tier | None = self.namespace.tier if self.namespace else None
        if self.remote is not None:
            self.tier = StackedTier(self.tier, self.remote)

    def close(self) -> None:
        """Give files and connections back. Idempotent."""
        with ExitStack() as all_of_it:  # the last one first, whatever interrupts
            for one in (self.namespace, self.remote, self.tier if isinstance(self.tier, StackedTier) else None):
                if one is not None:
                    all_of_it.callback(one.close)


def device_memory(num_bytes: int, device: torch.device) -> tuple[DeviceArena, torch.Tensor]:
    """Return memory for windows on `device`, and the same as a tensor.

    Raises: UnsupportedError for a device kvtide keeps no KV on.
    """
    if device.type == "cuda":
        from kvtide.tiers.cuda import CudaArena

        arena = CudaArena(num_bytes, str(device))
        return arena, arena.tensor
    if device.type != "cpu":
        raise UnsupportedError(f"the model is on {device.type}; kvtide keeps KV for cpu and cuda")
    cpu = CpuArena(num_bytes // 64 * 64)
    return cpu, torch.from_numpy(cpu.buffer)


def as_kept_by_transformers(loaded: LoadedModel) -> Any:
    """Return what KV the model keeps.

    Raises: UnsupportedError if that is not plain K and V in every layer.
    """
    if any(layer.kind in {"none", "mla"} for layer in loaded.spec.layers):
        raise UnsupportedError(
            f"{loaded.name} has layers whose state transformers does not keep as plain K and V; "
            f"models with full or sliding attention in every layer are supported"
        )
    return loaded.spec
