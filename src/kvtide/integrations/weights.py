"""The weights an engine was told to load, by their bytes rather than their name. Next: the plug-ins."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from kvtide.errors import ConfigError
from kvtide.modelfiles import weights_digest

_log = logging.getLogger("kvtide.engines")


def digest_of_weights(name: str) -> str:
    """Return the digest of the weights of model `name`; of its name alone, with a warning, where they are not found."""
    folder = Path(name)
    if not folder.exists():
        folder = _downloaded(name)
    try:
        return weights_digest(folder)
    except ConfigError as error:
        _log.warning("kvtide: weights of %s are told apart by name alone: %s", name, error)
        return hashlib.sha256(name.encode()).hexdigest()


def _downloaded(name: str) -> Path:
    """Return where the hub's library keeps model `name` here."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not downloaded, or no such library: weights_digest says that there are none
        return Path(name)
