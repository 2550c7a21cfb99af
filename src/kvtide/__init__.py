"""kvtide keeps the KV cache of large language models in tiers and shows what every byte's I/O costs."""

from kvtide.errors import ConfigError, Corrupt, FormatError, IoError, KvtideError, ShortIo, UnsupportedError

__all__ = ["ConfigError", "Corrupt", "FormatError", "IoError", "KvtideError", "ShortIo", "UnsupportedError"]
__version__ = "0.1.0"
