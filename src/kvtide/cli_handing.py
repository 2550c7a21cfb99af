"""`kvtide run --role`: one process computes a prompt's KV, another decodes from it; a remote lies between them.

Decides what is stored, how long it is waited for, and what is told of both. KV is handed over in whole groups; layers
are not sent while later ones are still computed. Next: cli_run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtide.blocks import KEY, chain_keys, chain_root, partial_keys
from kvtide.cli_asking import questions
from kvtide.errors import ConfigError
from kvtide.tiers.client import RemoteDown
from kvtide.tiers.contract import OK, GroupRecords
from kvtide.tiers.stacked import StackedTier
from kvtide.tiers.streams import Arrival, Publisher
from kvtide.units import format_ns, printable

if TYPE_CHECKING:
    from kvtide.integrations.transformers import KvStore
    from kvtide.integrations.transformers.store import Session
    from kvtide.integrations.transformers.turns import Conversation, Turn

ROLES = ("both", "prefill", "decode")
POLL_S, POLL_S_MAX = 0.02, 0.5  # between two looks for the last group: one small request of the remote each


def check_role(
    role: str, remote: str | None, ask: list[str] | None, *, chat: bool, wait_s: float, reuse: str = "auto"
) -> None:
    """Refuse roles that cannot be.

    Raises: ConfigError that says which, and what to type.
    """
    if role not in ROLES:
        raise ConfigError(f"--role is {printable(role)[:40]!r}; type {', '.join(ROLES)}")
    if role == "both":
        return
    if remote is None:
        raise ConfigError(f"--role {role} hands KV over through a remote; type --remote URL")
    if chat or not ask or len(ask) != 1:
        raise ConfigError(f"--role {role} is for one prompt; type one --ask, the same for both roles")
    if role == "decode" and reuse == "never":
        raise ConfigError("--role decode reuses what a prefill computed, and --reuse is 'never'; type --reuse always")
    if not 0 <= wait_s <= 86_400:
        raise ConfigError(f"--wait-s is {wait_s:g}; type 0 to 86400 seconds")


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill left on the remote. `key` is that of its last group. Times in ns."""

    key: str
    num_tokens: int
    num_groups: int
    matched_tokens: int
    prefill_ns: int
    store_ns: int

    def lines(self) -> list[str]:
        """Return what is told of it."""
        how_many = f"{self.num_tokens} tokens ({self.matched_tokens} were there)"
        times = f"in {format_ns(self.prefill_ns)}, stored as {self.num_groups} groups in {format_ns(self.store_ns)}"
        return [f"Prefilled {how_many} {times}.", f"key {self.key}"]


def prefill(store: KvStore, tokens: list[int], salt: str, on_progress: Callable[[int, int], None]) -> Prefilled:
    """Compute the KV of all `tokens` but the last, which whoever decodes runs on, and leave it on the remote.

    Raises: RemoteDown if not all of it is there in the end.
    """
    assert isinstance(store.tier, StackedTier), "a role was checked without a remote"
    assert store.remote is not None, "a role was checked without a remote"
    store.tier.is_patient = True  # sending is what this process is for
    started = time.perf_counter_ns()
    session = store.session(tokens, salt=salt)
    try:
        session.prefill(on_progress)
        groups = _groups(store, tokens[:-1], salt)
        if session.kv.num_tokens < len(tokens) - 1:
            run = _stream_last_step if store.remote.can_stream else _run_last_step
            run(store, session, groups, len(tokens) - 1)
        computed = time.perf_counter_ns()
        store.cache.flush()
        matched = session.matched.num_tokens
    finally:
        session.release()
    store.cache.drain()
    missing = len(groups) - len(store.remote.find(groups.keys))
    if missing:  # what the file tier had already was not written anew
        missing -= _push(store, tokens[:-1], groups, salt)
    if missing:
        raise RemoteDown(f"{store.remote.name} lacks {missing} of {len(groups)} groups: it was down, or had no room")
    ended = time.perf_counter_ns()
    key = groups.keys[-1].tobytes().hex() if len(groups) else ""
    return Prefilled(key, len(tokens) - 1, len(groups), matched, computed - started, ended - computed)


def _run_last_step(_store: KvStore, session: Session, _groups: GroupRecords, num_tokens: int) -> None:
    session.forward(session.kv.num_tokens, num_tokens)


def _stream_last_step(store: KvStore, session: Session, groups: GroupRecords, num_tokens: int) -> None:
    """Run the last step up to `num_tokens`, and send each layer of the groups it completes once it is computed."""
    assert store.remote is not None, "a role was checked without a remote"
    kv, ledger = session.kv, store.cache.ledger
    first, is_whole = kv.num_tokens // store.layout.tokens_per_group, False
    publisher = Publisher(store.remote, groups, first)

    def publish(layer: int) -> None:
        publisher.layer(layer, ledger.frame_pool.addresses(ledger.frames[kv.sequences[0].units[first:]]))

    kv.on_layer = publish
    try:
        session.forward(kv.num_tokens, num_tokens)
        is_whole = True
    finally:
        kv.on_layer = None
        publisher.finish(is_whole=is_whole)


def _groups(store: KvStore, tokens: list[int], salt: str) -> GroupRecords:
    """Return the records of the groups of exactly these tokens, the unfilled one's too."""
    block, group, root = store.layout.block_tokens, store.layout.group_blocks, chain_root(store.root, salt)
    keys = chain_keys(np.array(tokens, np.int64), block_tokens=block, parent=root)
    rest = tokens[len(keys) * block :]
    keys = np.append(keys, partial_keys(rest, parent=keys[-1].tobytes() if len(keys) else root)[-1:])
    num = -(-len(keys) // group)
    ends = np.minimum(np.arange(1, num + 1) * group, len(keys))
    num_blocks = ends - np.arange(num) * group
    block_keys = np.zeros((num, group), KEY)
    block_keys.ravel()[: len(keys)] = keys
    num_tokens = np.minimum(ends * block, len(tokens)) - np.arange(num) * group * block
    parents = np.append(np.frombuffer(root, KEY), keys[ends - 1])[:-1] if num else np.zeros(0, KEY)
    return GroupRecords(keys[ends - 1], parents, num_tokens, num_blocks, block_keys)


def _push(store: KvStore, tokens: list[int], groups: GroupRecords, salt: str) -> int:
    """Write the groups of `tokens` that the remote lacks from what the tiers below hold; return how many it took.

    Nothing moves in the background meanwhile: it was drained.
    """
    match, tier, ledger = store.cache.match(tokens, salt=salt), store.tier, store.cache.ledger
    if not isinstance(tier, StackedTier) or match.num_tokens < len(tokens):
        return 0
    is_absent = ~np.isin(groups.keys, tier.find(groups.keys).keys)
    rows = np.flatnonzero(is_absent & (ledger.stored_tokens[match.units] >= groups.num_tokens))
    statuses = tier.push(ledger.stored_key[match.units[rows]], groups.take(rows), cause="demote")
    return int((statuses == OK).sum())


@dataclass(frozen=True, slots=True)
class Awaited:
    """How long KV was waited for, and how many of the prompt's tokens it covers."""

    wait_ns: int
    arrived_tokens: int
    prompt_tokens: int


def wait_for_kv(store: KvStore, tokens: list[int], salt: str, wait_s: float) -> Awaited:
    """Wait until the KV of all `tokens` but the last has arrived, `wait_s` at most; what is missing is computed.

    The last group alone is looked for, ever less often; the rest once it is there, or time is up.
    """
    assert store.remote is not None, "a role was checked without a remote"
    started, pause_s, num = time.perf_counter_ns(), POLL_S, len(tokens) - 1
    groups = _groups(store, tokens[:num], salt)
    last, tier = groups.keys[-1:], store.tier
    if isinstance(tier, StackedTier) and len(groups) and store.remote.can_stream:
        tier.arrival = Arrival(tier.far, groups)
    arrived = store.cache.match(tokens[:num], salt=salt).num_tokens
    while arrived < num and (left_s := wait_s - (time.perf_counter_ns() - started) / 1e9) > 0:
        time.sleep(min(pause_s, left_s))
        has_begun = isinstance(tier, StackedTier) and tier.arrival is not None and tier.arrival.has_begun()
        if left_s <= pause_s or has_begun or len(store.remote.find(last)):
            arrived = store.cache.match(tokens[:num], salt=salt).num_tokens
        pause_s = min(2 * pause_s, POLL_S_MAX)
    return Awaited(time.perf_counter_ns() - started, arrived, len(tokens))


class Handing:
    """One role of a run over `store`: what it does before questions are asked, and what is told of it."""

    def __init__(self, role: str, store: KvStore, salt: str) -> None:
        self._role, self._store, self._salt = role, store, salt
        self._prefilled: Prefilled | None = None
        self._awaited: Awaited | None = None

    def begin(
        self, conversation: Conversation, question: str, *, wait_s: float, on_progress: Callable[[int, int], None]
    ) -> None:
        """Leave the prompt's KV on the remote, or wait for it there.

        Raises: RemoteDown if not all of a prefill is there in the end.
        """
        conversation.ask(question)
        if self._role == "prefill":
            self._prefilled = prefill(self._store, conversation.tokens, self._salt, on_progress)
        else:
            self._awaited = wait_for_kv(self._store, conversation.tokens, self._salt, wait_s)

    def questions(self, ask: list[str] | None, *, chat: bool, has_document: bool) -> list[Any]:
        """Return the questions to be answered, as `cli_asking.questions` does; none in a prefill."""
        return [] if self._role == "prefill" else questions(ask, chat=chat, has_document=has_document)

    def report(self, turns: list[Turn]) -> dict[str, Any]:
        """Return what was handed over, and how the time to the first token splits.

        That is: waiting for the prefill elsewhere, moving KV, and computing on the rest.
        """
        told: dict[str, Any] = {"role": self._role, "handed": None}
        if self._prefilled is not None:
            told["handed"] = asdict(self._prefilled)
        if self._awaited is not None and turns:
            transfer_ns, ttft_ns = turns[0].prefill.wait_ns, turns[0].ttft_ns
            tier = self._store.tier
            arrival = tier.arrival if isinstance(tier, StackedTier) else None
            split: dict[str, float] = {"overlapped_share": arrival.overlapped_share if arrival else 0.0}
            split |= {"transfer_ns": transfer_ns, "first_token_ns": ttft_ns - transfer_ns}
            told["handed"] = asdict(self._awaited) | split | {"ttft_ns": self._awaited.wait_ns + ttft_ns}
        return told

    def lines(self, turns: list[Turn]) -> list[str]:
        """Return the same in sentences."""
        if self._prefilled is not None:
            return self._prefilled.lines()
        handed = self.report(turns)["handed"]
        if handed is None:
            return []
        told = {name: format_ns(value) for name, value in handed.items() if name.endswith("_ns")}
        arrived = f"KV of {handed['arrived_tokens']} of {handed['prompt_tokens']} prompt tokens arrived."
        parts = f"prefill {told['wait_ns']}, transfer {told['transfer_ns']}, first token {told['first_token_ns']}"
        parts += f"; {handed['overlapped_share']:.0%} of what was streamed moved before its last layer was there"
        return [arrived, f"TTFT {told['ttft_ns']}: {parts}."]
