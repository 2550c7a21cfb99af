"""Turns at the edges: the last position of a model, KV lost while an answer is shown, an interrupted close."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvtide.cache.mover import WRITE_BACK, Mover  # noqa: E402
from kvtide.cache.traffic import LostKv  # noqa: E402
from kvtide.errors import IoError  # noqa: E402
from kvtide.integrations.transformers import KvStore, LoadedModel  # noqa: E402
from kvtide.integrations.transformers import store as store_module  # noqa: E402
from kvtide.integrations.transformers.turns import Clockwork, Conversation, TurnOptions, TurnRunner  # noqa: E402
from kvtide.trace.record import Recorder  # noqa: E402
from test_transformers import options, prompt, small_model  # noqa: E402


class Letters:
    """One token a letter."""

    chat_template = None
    all_special_ids: tuple[int, ...] = ()
    pad_token_id = 0
    eos_token_id = None

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[ord(letter) % 250 + 3 for letter in text])

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


def model(family: str) -> LoadedModel:
    loaded = small_model(family)
    return LoadedModel(family, loaded.model, Letters(), loaded.spec, loaded.dtype, "0" * 64, "1" * 64, "")


@pytest.mark.parametrize(("num_spare", "num_new"), [(0, 1), (2, 3)])
def test_answer_ends_at_the_last_position_of_the_model(num_spare: int, num_new: int) -> None:
    loaded = model("opt")  # its positions are a table: beyond the end there is nothing
    with KvStore(loaded, options(None, device_bytes=8 << 20, dram_bytes=64 << 20)) as store:
        how = TurnOptions(max_new_tokens=10**30, is_verified=True)
        runner = TurnRunner(store, Recorder(), how, on_text=lambda _: None, on_prefill=lambda *_: None)
        empty = len("Q: \n\nwhy\nA:")
        turn = runner.run(Conversation(loaded, "x" * (loaded.max_positions - empty - num_spare)), "why", index=0)
        assert (turn.prompt_tokens, turn.new_tokens) == (loaded.max_positions - num_spare, num_new)
        assert turn.tokens_equal


def test_answer_that_starts_again_is_shown_once() -> None:
    shown: list[str] = []
    clock = Clockwork(Letters(), shown.append, lambda: None)
    for tokens in ([1, 2], [1, 2, 3, 4]):
        clock.put(torch.tensor([[7, 7, 7]]))
        for token in tokens:
            clock.put(torch.tensor([token]))
    assert "".join(shown) == "bcde"
    assert len(clock.times_ns) == 4


def test_samples_drawn_again_after_a_loss_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, ids = small_model(), prompt(60)
    how = {"max_new_tokens": 6, "do_sample": True}
    with KvStore(loaded, options(None)) as store:
        torch.manual_seed(3)
        expected = store.session(ids, salt="a").generate(**how).tolist()
        session, real, countdown = store.session(ids, salt="b"), store.cache.layer, iter(range(1, 100))

        def layer(*args: Any, **kwargs: Any) -> Any:
            if next(countdown) == 10:
                raise LostKv(torch.zeros(1).numpy())
            return real(*args, **kwargs)

        monkeypatch.setattr(store.cache, "layer", layer)
        torch.manual_seed(3)
        assert session.generate(**how).tolist() == expected
        assert session.num_lost == 1


def test_drive_that_loses_everything_is_an_error_not_a_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store_module, "LOST_MAX", 3)
    with KvStore(small_model(), options(tmp_path)) as store:

        def layer(*_: Any, **__: Any) -> Any:
            raise LostKv(torch.zeros(1).numpy())

        monkeypatch.setattr(store.cache, "layer", layer)
        with pytest.raises(IoError, match="could not be read back"):
            store.session(prompt(20)).generate(max_new_tokens=2)


def test_interrupted_close_waits_for_the_job_that_runs_and_drops_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    mover, go, done = Mover(), threading.Event(), []
    first = mover.submit(lambda: (go.wait(10), done.append("first")), WRITE_BACK)
    while not first.done() and mover._heap:
        pass
    second = mover.submit(lambda: done.append("second"), WRITE_BACK)
    join, presses = mover._thread.join, iter([True, True])

    def interrupted(*args: Any) -> None:
        if next(presses, False):
            raise KeyboardInterrupt
        go.set()
        join(*args)

    monkeypatch.setattr(mover._thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mover.close()
    assert done == ["first"]
    assert second.cancelled()
    assert not mover._thread.is_alive()


def test_tenants_with_odd_names_are_kept_apart() -> None:
    loaded, ids = small_model(), prompt(60)
    with KvStore(loaded, options(None)) as store:
        session = store.session(ids, salt="\udcc3\udca9")
        session.generate(max_new_tokens=2)
        session.release()
        assert store.session(ids, salt="\udcc3\udca9").matched.num_tokens == 48
        assert store.session(ids, salt="é").matched.num_tokens == 0
