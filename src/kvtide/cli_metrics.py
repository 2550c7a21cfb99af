"""The option `--metrics` of commands that run a cache. Next: cli_run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvtide.metrics import CacheSource, open_endpoint, parse_address
from kvtide.trace.record import Recorder

if TYPE_CHECKING:
    from kvtide.integrations.transformers import KvStore


def _checked(text: str | None) -> str | None:
    """Return `text`, once it is known to be an address: before a model is loaded for nothing."""
    if text is not None:
        parse_address(text)
    return text


MetricsAddress = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        callback=_checked,
        help="Serve Prometheus metrics there, on loopback unless a host is given; port 0 is any free one.",
    ),
]


@contextmanager
def serving(address: str | None, store: KvStore, recorder: Recorder, console: Console) -> Iterator[None]:
    """Serve the figures of `store` at `address` for the length of a `with` block; None: nowhere.

    Raises: ConfigError if the address is taken.
    """
    if address is None:
        yield
        return
    name = store.identity.digest().hex()[:16]
    source = CacheSource(store.cache, store=name, model=store.loaded.name, integration="run", recorder=recorder)
    with open_endpoint(address, source) as endpoint:
        console.print(f"Metrics: {endpoint.url}", soft_wrap=True)
        yield
