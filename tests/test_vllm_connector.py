from __future__ import annotations

import inspect
import types
from pathlib import Path
from typing import Any

import pytest

import engines
from test_vllm_tier import Primary, hits, job, names, results, spec

engines.use("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector  # noqa: E402

from kvtide.integrations.vllm import KvtideTier  # noqa: E402
from kvtide.integrations.vllm.connector import KvtideConnector  # noqa: E402


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the extra configuration that vLLM's connector was made with; vLLM's own needs a whole engine."""
    found: list[dict[str, Any]] = []

    def made(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        del self, role, kv_cache_config
        found.append(dict(vllm_config.kv_transfer_config.kv_connector_extra_config))

    assert list(inspect.signature(made).parameters) == list(inspect.signature(OffloadingConnector.__init__).parameters)
    monkeypatch.setattr(OffloadingConnector, "__init__", made)
    return found


def connected(digest: object, revision: str | None = None) -> dict[str, Any]:
    """Return the extra configuration after a connector was made for a model of which vLLM's hash is `digest`."""
    space, extra = types.SimpleNamespace, {"spec_name": "TieringOffloadingSpec"}
    model = space(compute_hash=lambda: digest, revision=revision)
    config = space(model_config=model, kv_transfer_config=space(kv_connector_extra_config=extra))
    KvtideConnector(config, "scheduler", space())
    return extra


def test_vllms_connector_is_made_with_the_models_hash(seen: list[dict[str, Any]]) -> None:
    assert issubclass(KvtideConnector, OffloadingConnector)
    extra = connected(123, "main")
    assert seen == [extra]
    assert extra == {
        "spec_name": "TieringOffloadingSpec",
        "kvtide_model_hash": "123",
        "kvtide_model_revision": "main",
    }


def test_chunks_of_another_configuration_are_not_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    primary, found = Primary(seed=1), []
    for digest in ("a", "b", "a"):
        made = spec(extra_config=connected(digest))
        tier = KvtideTier(made, primary.view, "KvtideTier", str(tmp_path), "1MiB")
        found.append(any(hits(tier, names(2))))
        tier.submit_store(job(1, names(2), [0, 1]))
        assert results(tier)[1].success
        tier.shutdown()
    assert found == [False, False, True]
    assert "model_facts" not in caplog.text
