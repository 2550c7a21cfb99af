"""Reads what describes a model from disk: config.json, and digests of weights and tokenizer. Next: sizing, cli.

Knows where the files of a model folder lie, and nothing of what a config means: that is `spec.model`.

*Theory.* Hashing tens of GiB at every start would cost more than the cache saves. The digest of a weight file is taken
over its name, its size, its first and last page, and one page at a seeded place in each stratum, of which there are
at least 64, each at most 8 MiB: weights that differ throughout any stretch of 16 MiB always get another digest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import stat
from pathlib import Path

from kvtide.errors import ConfigError
from kvtide.spec import PRESET_NAMES, ModelSpec, preset

CONFIG_BYTES_MAX = 16 << 20  # the largest published config.json is some 100 KiB
SAMPLE_BYTES = 4096
STRATA_MIN = 64
STRATUM_BYTES_MAX = 8 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
TOKENIZER_FILES = (
    "added_tokens.json", "merges.txt", "special_tokens_map.json", "spiece.model", "tekken.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
_NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "scheduler.bin", "random_states.bin"})


def load_model(ref: str) -> ModelSpec:
    """The model `ref` means: a preset's name, a config.json, or the folder that holds one.

    Raises: ConfigError that says what was found there and what to type.
    """
    if not ref.strip() or "\0" in ref:
        raise ConfigError(f"no model named: type a preset ({', '.join(PRESET_NAMES)}), a config.json or its folder")
    if ref.strip().lower() in PRESET_NAMES:
        return preset(ref)
    path = Path(ref).expanduser()
    if not _exists(path):
        if os.sep in ref or path.suffix == ".json":
            raise ConfigError(f"{ref}: no such file or folder; type a preset name, a config.json or its folder")
        try:
            return preset(ref)
        except ConfigError as error:
            raise ConfigError(f"{error}; or type the path of a config.json or of its folder") from None
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not _exists(file):
        raise ConfigError(f"{path}: the folder holds no config.json; type the folder of a model, or a preset name")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    try:
        return ModelSpec.from_config(_read_config(file), name=(name or "model")[:128], source=_tail(str(file)))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def weights_digest(folder: str | Path) -> str:
    """SHA-256, in hexadecimal, that tells weights apart: names, sizes and sampled contents of the weight files.

    `folder` may also be one weight file.

    Raises: ConfigError if there are no weights or they cannot be read.
    """
    path = Path(folder)
    files = [path] if path.is_file() else _weight_files(path)
    if not files:
        raise ConfigError(
            f"{path}: no weights here; a model's folder holds {', '.join('*' + s for s in WEIGHT_SUFFIXES)}"
        )
    digest = hashlib.sha256(b"kvtide weights 1")
    for file in files:
        _sample(digest, file)
    return digest.hexdigest()


def tokenizer_digest(folder: str | Path) -> str:
    """SHA-256, in hexadecimal, of the tokenizer's files; of the weights where a GGUF file holds the tokenizer.

    Raises: ConfigError if there is no tokenizer or it cannot be read.
    """
    path = Path(folder)
    if path.is_file() and path.suffix == ".gguf":
        return weights_digest(path)
    files = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
    if not files:
        if any(file.suffix == ".gguf" for file in _weight_files(path)):
            return weights_digest(path)
        raise ConfigError(f"{path}: no tokenizer here; a model's folder holds tokenizer.json or tokenizer.model")
    digest = hashlib.sha256(b"kvtide tokenizer 1")
    for file in files:
        content = _read(file, most=1 << 30)
        digest.update(f"{file.name}:{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _read_config(file: Path) -> dict[str, object]:
    text = _read(file, most=CONFIG_BYTES_MAX)
    if not text.strip():
        raise ConfigError("the file is empty; a config.json holds a JSON object")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON ({error}); type the path of a config.json") from error
    if not isinstance(found, dict):
        raise ConfigError(f"a config.json holds a JSON object, this file a {type(found).__name__}")
    return found


def _read(file: Path, *, most: int) -> bytes:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device would be read without end
            raise ConfigError(f"{file} is no regular file; type the path of a config.json or of its folder")
        if status.st_size > most:
            raise ConfigError(f"{file} has {status.st_size} bytes, more than the {most} such a file can have")
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long, or a folder that may not be searched
        return False


def _weight_files(folder: Path) -> list[Path]:
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be listed: {error.strerror or error}; type the folder of a model"
        ) from error
    return [
        file for file in files if file.suffix in WEIGHT_SUFFIXES and file.name not in _NOT_WEIGHTS and file.is_file()
    ]


def _sample(digest: hashlib._Hash, file: Path) -> None:
    try:
        with file.open("rb", buffering=0) as source:
            size = os.fstat(source.fileno()).st_size
            digest.update(f"{file.name}:{size}\n".encode("utf-8", "surrogateescape"))
            for offset in _sample_offsets(file.name, size):
                digest.update(os.pread(source.fileno(), SAMPLE_BYTES, offset))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error


def _sample_offsets(name: str, size: int) -> list[int]:
    """Places to sample, the same for the same name and size: every page of a small file, one a stratum of others."""
    if size <= 2 * STRATA_MIN * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    num_strata = max(STRATA_MIN, -(-size // STRATUM_BYTES_MAX))
    rng = random.Random(f"{name}:{size}")
    edges = [size * index // num_strata for index in range(num_strata + 1)]
    inside = [rng.randrange(low, high - SAMPLE_BYTES + 1) for low, high in itertools.pairwise(edges)]
    return [0, *inside, size - SAMPLE_BYTES]


def _tail(text: str) -> str:
    """`text` short enough for a source; the end of a path says more than its beginning."""
    return text if len(text) <= 200 else f"...{text[-200:]}"
