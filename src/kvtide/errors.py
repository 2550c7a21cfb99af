"""The exceptions kvtide raises. Decides how a failure is named; knows nothing of where it happens. Next: spec.

A miss or a full pool is a value, never an exception. Every message says what was got, what is needed, and
what to type. The command line turns `ConfigError` into exit code 2 and every other `KvtideError` into 1.
"""

from __future__ import annotations


class KvtideError(Exception):
    """Root of everything kvtide raises on purpose."""


class ConfigError(KvtideError, ValueError):
    """Something impossible was asked for: the message says what was got, what is needed and what to type."""


class FormatError(KvtideError):
    """A file is not what it claims to be: the message names path, offset, expected and found."""


class UnsupportedError(KvtideError):
    """The kernel, file system or library lacks something: the message says which, and the fallback."""


class IoError(KvtideError, OSError):
    """The world refused an operation: the message names operation, extent and errno."""


class ShortIo(IoError):  # noqa: N818
    """Fewer bytes moved than asked for, and nothing more will come."""


class Corrupt(IoError):  # noqa: N818
    """A checksum differs. The copy is dropped and counted; the caller recomputes."""
