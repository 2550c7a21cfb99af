"""vLLM's own connector, which also shows the tier what its model computes. Next: facts."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvtide.integrations.vllm.facts import MODEL_HASH, MODEL_REVISION


class KvtideConnector(OffloadingConnector):
    """`OffloadingConnector`, with vLLM's hash of the model's configuration among the facts of kvtide's chunks."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        model, extra = vllm_config.model_config, vllm_config.kv_transfer_config.kv_connector_extra_config
        extra |= {MODEL_HASH: str(model.compute_hash()), MODEL_REVISION: model.revision}
        super().__init__(vllm_config, role, kv_cache_config)
