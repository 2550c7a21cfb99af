"""What commands say of the tiers below memory: where they are, and how a remote behaved. Next: cli_run, cli_remote."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvtide.tiers.stacked import StackedTier
from kvtide.units import printable

if TYPE_CHECKING:
    from kvtide.integrations.transformers import KvStore


def places(store: KvStore) -> dict[str, str]:
    """Return where each tier below memory is."""
    found = {"file": printable(str(store.options.directory))}
    return found | ({"remote": printable(store.remote.name)} if store.remote is not None else {})


def remote_report(store: KvStore) -> dict[str, Any] | None:
    """Return where the remote is, and how often it was left alone; None without one."""
    if store.remote is None:
        return None
    breaker, tier = store.remote.breaker, store.tier
    num_unsent = tier.outbox.num_refused if isinstance(tier, StackedTier) else 0
    return {
        "url": store.remote.name,
        "is_left_alone": breaker.is_open,
        "num_left_alone": breaker.num_opened,
        "num_unsent": num_unsent,
    }


def quiet_libraries() -> None:
    """Have Mooncake's library log errors only, unless somebody said otherwise."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
