"""A prompt's KV computed by one store and decoded from by another, over a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("valkey")

from kvtide.cli_handing import Handing, check_role, prefill, wait_for_kv
from kvtide.errors import ConfigError
from kvtide.integrations.transformers import KvStore
from kvtide.integrations.transformers.turns import Conversation, TurnOptions, TurnRunner
from kvtide.tiers.client import RemoteDown
from kvtide.trace.record import Recorder
from remotes import redis
from test_transformers import options
from test_turns import model

DOCUMENT = "The tide comes in and the tide goes out. " * 6


def answer(loaded: Any, store: KvStore) -> Any:
    runner = TurnRunner(store, Recorder(), TurnOptions(5), on_text=lambda _: None, on_prefill=lambda *_: None)
    return runner.run(Conversation(loaded, DOCUMENT), "why", index=0)


def nothing(_done: int, _all: int) -> None: ...


def test_decode_answers_as_one_process_does(tmp_path: Path) -> None:
    loaded = model("llama")
    with KvStore(loaded, options(None)) as store:
        alone = answer(loaded, store)
    with redis(tmp_path) as server:
        with KvStore(loaded, options(None, remote=server.url)) as store:
            conversation = Conversation(loaded, DOCUMENT)
            handing = Handing("prefill", store, "")
            handing.begin(conversation, "why", wait_s=0, on_progress=nothing)
            done = handing.report([])["handed"]
            assert done["num_tokens"] == len(conversation.tokens) - 1
            assert handing.questions(["why"], chat=False, has_document=True) == []
            assert done["key"] in handing.lines([])[1]
        assert any(done["key"].encode() in name for name in server.plain().scan_iter("kvtide:*:m"))
        with KvStore(loaded, options(None, remote=server.url)) as store:
            handing = Handing("decode", store, "")
            handing.begin(Conversation(loaded, DOCUMENT), "why", wait_s=0, on_progress=nothing)
            turn = answer(loaded, store)
            told = handing.report([turn])["handed"]
        assert turn.matched_tokens == told["arrived_tokens"] == turn.prompt_tokens - 1
        assert turn.answer == alone.answer
        assert told["ttft_ns"] == told["wait_ns"] + told["transfer_ns"] + told["first_token_ns"]


def test_what_the_file_has_already_is_handed_over_too(tmp_path: Path) -> None:
    loaded = model("llama")
    conversation = Conversation(loaded, DOCUMENT)
    conversation.ask("why")
    tokens = conversation.tokens
    with KvStore(loaded, options(tmp_path)) as store:
        alone = answer(loaded, store)  # the file's last group is longer than the prompt's
    with redis(tmp_path) as server:
        for num_known in (alone.prompt_tokens // 16 * 16, len(tokens) - 1):  # then it has the prompt's own, too
            server.plain().flushall()
            with KvStore(loaded, options(tmp_path, remote=server.url)) as store:
                done = prefill(store, tokens, "", nothing)
                assert (done.num_tokens, done.matched_tokens) == (len(tokens) - 1, num_known)
            with KvStore(loaded, options(None, remote=server.url)) as store:
                assert wait_for_kv(store, tokens, "", 0.0).arrived_tokens == len(tokens) - 1
                assert answer(loaded, store).answer == alone.answer


def test_a_wait_looks_for_one_group_until_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, tokens, pauses = model("llama"), list(range(3, 60)), []
    with redis(tmp_path) as server, KvStore(loaded, options(None, remote=server.url)) as store:
        matched = []
        match = store.cache.match
        monkeypatch.setattr(store.cache, "match", lambda *given, **how: matched.append(1) or match(*given, **how))

        def sleep(pause_s: float) -> None:
            pauses.append(pause_s)
            if len(pauses) == 6:
                with KvStore(loaded, options(None, remote=server.url)) as other:
                    prefill(other, tokens, "", nothing)

        monkeypatch.setattr("kvtide.cli_handing.time.sleep", sleep)
        assert wait_for_kv(store, tokens, "", 3600.0).arrived_tokens == 56
    assert pauses[:6] == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5]
    assert len(matched) == 2


def test_a_wait_ends_and_a_remote_that_takes_nothing_is_told(tmp_path: Path) -> None:
    loaded = model("llama")
    with redis(tmp_path) as server, KvStore(loaded, options(None, remote=server.url)) as store:
        tokens = list(range(3, 60))
        awaited = wait_for_kv(store, tokens, "", 0.0)
        assert (awaited.arrived_tokens, awaited.prompt_tokens) == (0, 57)
        server.kill()
        with pytest.raises(RemoteDown, match="lacks"):
            prefill(store, tokens, "", nothing)
        server.start()


@pytest.mark.parametrize(
    ("role", "remote", "ask", "says"),
    [
        ("neither", None, None, "type both, prefill, decode"),
        ("prefill", None, ["why"], "type --remote"),
        ("decode", "valkey://host", None, "type one --ask"),
        ("decode", "valkey://host", ["why", "who"], "type one --ask"),
    ],
)
def test_roles_that_cannot_be(role: str, remote: str | None, ask: list[str] | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_role(role, remote, ask, chat=False, wait_s=1.0)


def test_decode_reuses() -> None:
    with pytest.raises(ConfigError, match="type --reuse always"):
        check_role("decode", "valkey://host", ["why"], chat=False, wait_s=1.0, reuse="never")
