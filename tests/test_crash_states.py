"""Whatever a loss of power leaves of the last writes, no byte is wrong; and a check of that finds what is."""

from __future__ import annotations

import pytest

from crash_states import check_states
from kvtide.tiers.slotwriter import SlotWriter
from oracle import WrongStoreError


def test_no_crash_state_has_a_wrong_byte_or_lacks_what_was_acknowledged() -> None:
    counts = check_states(240, seed=7)
    assert counts.states == 240
    assert counts.volatile_states > 50
    assert counts.verified_bytes > 1 << 20


def test_a_tier_that_writes_the_header_first_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(self: SlotWriter, *arguments: object) -> object:
        return SlotWriter._begin_packed(self, *arguments)

    monkeypatch.setattr(SlotWriter, "_write_in_steps", packed)
    with pytest.raises(WrongStoreError, match="safe cache"):
        check_states(120, seed=7)
