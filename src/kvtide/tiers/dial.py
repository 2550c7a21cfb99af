"""From a URL to a client: which library, which server, which knobs. Next: stacked.

    valkey://[user:password@]host[:port][/db]      also redis://; valkeys://, rediss:// with TLS
    unix:///path/of/socket[?db=0]
    mooncake://host:port?metadata=http://host:port/metadata[&local=address][&segment=1GiB][&protocol=tcp][&device=]

Knobs come behind a `?`: timeout_s, connect_timeout_s, ttl_s, cluster=1 (Valkey); timeout_s (Mooncake); zstd (both).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from kvtide.errors import ConfigError, UnsupportedError
from kvtide.spec import SlotLayout
from kvtide.tiers.cipher import Cipher
from kvtide.tiers.client import RemoteClient
from kvtide.tiers.remote import KNOWN_GROUPS, RemoteOptions, RemoteTier
from kvtide.units import parse_option_bytes, printable

SCHEMES = {"valkey", "redis", "valkeys", "rediss", "unix"}
EXAMPLE = (
    "type valkey://host:6379/0, valkeys://host:6379/0, unix:///path, or "
    "mooncake://host:50051?metadata=http://host:8080/metadata"
)
WAIT_S_MAX = 3600.0
TLS_KNOBS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
TRUSTS = ("none", "optional", "required")


@dataclass(frozen=True, slots=True)
class Dialled:
    """What a URL means. `name` is the URL without secrets; `connect` makes the client, and may raise RemoteDown."""

    name: str
    zstd_level: int
    connect: Callable[[], RemoteClient]


def dial(url: str) -> Dialled:
    """Read `url`; nothing is connected yet.

    Raises: ConfigError for a URL that means nothing here.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        knobs = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        _refuse_stray_at(parts, knobs)
    except ValueError:  # its message may hold a part of a password
        what = "no URL; in a user and a password type / as %2F, @ as %40, ? as %3F, # as %23"
        raise ConfigError(f"--remote: {what}; {EXAMPLE}") from None
    zstd_level = int(_number(knobs, "zstd", 0, 22))
    if parts.scheme == "mooncake":
        return Dialled(_shown(parts), zstd_level, _mooncake(parts, port, knobs))
    if parts.scheme in SCHEMES:
        return Dialled(_shown(parts), zstd_level, _valkey(parts, knobs))
    raise ConfigError(f"--remote {printable(_shown(parts))[:80]!r}: no scheme known here; {EXAMPLE}")


def open_remote(
    url: str,
    layout: SlotLayout,
    identity_digest: bytes,
    *,
    num_groups: int = KNOWN_GROUPS,
    cipher: Cipher | None = None,
) -> RemoteTier:
    """Return the tier at `url`, for KV of one layout and identity. It connects when something is first asked of it.

    `cipher` encrypts what is put there.
    Raises: ConfigError for a URL that means nothing here; UnsupportedError without zstandard where it is asked for.
    """
    dialled = dial(url)
    options = RemoteOptions(num_groups=num_groups, zstd_level=dialled.zstd_level)
    return RemoteTier(dialled.connect, layout, identity_digest, options, name=dialled.name, cipher=cipher)


def _valkey(parts: SplitResult, knobs: dict[str, str]) -> Callable[[], RemoteClient]:
    from kvtide.tiers.valkey import ValkeyClient, ValkeyOptions

    if find_spec("valkey") is None:
        raise UnsupportedError("valkey-py is not here; type pip install 'kvtide[valkey]'")
    if parts.scheme == "unix" and not parts.path.strip("/"):
        raise ConfigError(f"--remote: no path of a socket; {EXAMPLE}")
    if parts.scheme != "unix" and not parts.hostname:
        raise ConfigError(f"--remote: no host; {EXAMPLE}")
    options = ValkeyOptions(
        timeout_s=_number(knobs, "timeout_s", 2.0, WAIT_S_MAX),
        connect_timeout_s=_number(knobs, "connect_timeout_s", 1.0, WAIT_S_MAX),
        ttl_s=int(_number(knobs, "ttl_s", 0, 1 << 40)),
        is_cluster=bool(_number(knobs, "cluster", 0, 1)),
    )
    _refuse_unknown(knobs, {"db", "username", "password", *TLS_KNOBS})
    _check_db(parts, knobs)
    _check_tls(parts, knobs)
    url = urlunsplit(parts._replace(query=urlencode(knobs)))
    return lambda: ValkeyClient(url, options)


def _mooncake(parts: SplitResult, port: int | None, knobs: dict[str, str]) -> Callable[[], RemoteClient]:
    from kvtide.tiers.mooncake import MooncakeClient, MooncakeOptions

    if find_spec("mooncake") is None:
        raise UnsupportedError("Mooncake is not here; type pip install 'kvtide[mooncake]'")
    if not parts.hostname or port is None:
        raise ConfigError(f"--remote: no host and port of the master; {EXAMPLE}")
    options = MooncakeOptions(
        master=f"{parts.hostname}:{port}",
        metadata=knobs.pop("metadata", ""),
        local=knobs.pop("local", "127.0.0.1"),
        protocol=knobs.pop("protocol", "tcp"),
        device=knobs.pop("device", ""),
        segment_bytes=parse_option_bytes("--remote segment", knobs.pop("segment", "0")),
        timeout_s=_number(knobs, "timeout_s", 5.0, WAIT_S_MAX),
    )
    if not options.metadata:
        raise ConfigError(f"--remote: no metadata server; {EXAMPLE}")
    _refuse_unknown(knobs, set())
    return lambda: MooncakeClient(options)


def _number(knobs: dict[str, str], name: str, default: float, most: float) -> float:
    """Take knob `name` out and return it.

    Raises: ConfigError unless it is a number from 0 to `most`, and above 0 where the default is.
    """
    text = knobs.pop(name, None)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    least_is_wrong = isinstance(default, float) and value == 0
    if not 0 <= value <= most or least_is_wrong:
        raise ConfigError(f"--remote: {name} is {printable(text)[:40]!r}; type a number up to {most:g}")
    return value


def _refuse_unknown(knobs: dict[str, str], known: set[str]) -> None:
    unknown = sorted(set(knobs) - known)
    if unknown:
        raise ConfigError(f"--remote: {printable(unknown[0])[:40]!r} is no knob of this kind of remote; {EXAMPLE}")


def _refuse_stray_at(parts: SplitResult, knobs: dict[str, str]) -> None:
    """Raise ValueError if a password seems to be cut: its end would be taken for a path or a knob, and shown."""
    is_knob = "password" in knobs or "username" in knobs
    rest = parts.path + parts.fragment + ("" if is_knob else parts.query)
    if parts.scheme != "unix" and "@" in rest:
        raise ValueError


def _check_db(parts: SplitResult, knobs: dict[str, str]) -> None:
    path = "" if parts.scheme == "unix" else parts.path.strip("/")
    for db in (knobs.get("db", "0"), path or "0"):
        if not (db.isascii() and db.isdecimal()):
            raise ConfigError(f"--remote: the database is {printable(db)[:40]!r}; type its number, as in /0 or ?db=0")


def _check_tls(parts: SplitResult, knobs: dict[str, str]) -> None:
    named = [name for name in TLS_KNOBS if name in knobs]
    if named and parts.scheme not in ("valkeys", "rediss"):
        raise ConfigError(
            f"--remote: {named[0]} is for TLS, and {parts.scheme}:// has none; type valkeys://host:6379/0"
        )
    trust = knobs.get("ssl_cert_reqs", "required")
    if trust not in TRUSTS:
        raise ConfigError(f"--remote: ssl_cert_reqs is {printable(trust)[:40]!r}; type {', '.join(TRUSTS)}")


def without_secrets(command: str) -> str:
    """Return a command line as it may be kept: users and passwords of URLs left out."""
    command = re.sub(r"(?<=://)\S*@", "", command)  # to the last one: passwords may hold / and @
    return re.sub(r"(?<=[?&])(password|username)=[^&\s]*", r"\1=", command)


def _shown(parts: SplitResult) -> str:
    """Return the URL without user, password and knobs."""
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
