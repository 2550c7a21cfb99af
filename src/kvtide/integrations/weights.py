"""The weights an engine was told to load, by their bytes rather than their name. Next: the plug-ins."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from kvtide.errors import ConfigError
from kvtide.modelfiles import CONFIG_BYTES_MAX, weights_digest

_log = logging.getLogger("kvtide.engines")


def digest_of_weights(name: str, revision: str | None = None, folder: Path | None = None) -> str:
    """Return the digest of the weights of model `name`; of its name alone, with a warning, where they are not found.

    They lie in `folder`, if it is known: what `folder_of_model` returned.
    """
    try:
        return weights_digest(folder or folder_of_model(name, revision))
    except ConfigError as error:
        _log.warning("kvtide: weights of %s are told apart by name alone: %s", name, error)
        return hashlib.sha256(f"{name}@{revision}".encode() if revision else name.encode()).hexdigest()


def digest_of_config(folder: Path) -> str:
    """Return the digest of the config.json of the model in `folder`; empty where there is none."""
    file = (folder.parent if folder.is_file() else folder) / "config.json"
    try:
        if not 0 < file.stat().st_size <= CONFIG_BYTES_MAX or not file.is_file():
            return ""
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def folder_of_model(name: str, revision: str | None = None) -> Path:
    """Return where model `name` lies: a path as it is, else where the hub's library keeps it here.

    Warns where several revisions are here and none is named.
    """
    folder = Path(name)
    if folder.exists():
        return folder
    try:
        from huggingface_hub import snapshot_download

        found = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # not downloaded, or no such library: weights_digest says that there are none
        return folder
    if revision is None and len(list(found.parent.iterdir())) > 1:
        _log.warning(
            "kvtide: several revisions of %s are here, and the engine does not say which it loads; %s is taken: part "
            "them by salt, or keep one",
            name,
            found.name,
        )
    return found
