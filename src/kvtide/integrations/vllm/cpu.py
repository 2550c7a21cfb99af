"""A worker for vLLM's CPU build, which has none that copies KV between its cache and the primary tier. Next: facts.

Everything else is vLLM's own: the manager, its policies, the tiers. Copies are made at once, on the worker's thread.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Ids = npt.NDArray[np.int64]


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering where the device is the CPU."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class _CopyingWorker(OffloadingWorker):
    """Copies blocks. Shapes: [blocks, page] in the cache, [chunks, blocks a chunk, page] in the region."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region, self._per_chunk = region, blocks_per_chunk
        self._cache, self._host = [], []
        for one in kv_caches.tensors:
            page = one.page_size_bytes
            self._cache.append(one.tensor.view(torch.int8).view(-1, page))
            rows = region.create_next_worker_view(page * blocks_per_chunk)
            self._host.append(rows.unflatten(1, (blocks_per_chunk, page)))
        self._groups = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: copies are done when they are submitted."""

    def shutdown(self) -> None:
        self._cache.clear()
        self._host.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, device: Any, chunks: npt.NDArray[np.int32], *, is_store: bool) -> bool:
        """Copy the blocks of `device` from or to where they lie in `chunks`."""
        began, num_bytes = time.perf_counter(), 0
        first_block = first_chunk = 0
        for group, (num, index) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
            blocks = device.block_ids[first_block : first_block + num].astype(np.int64)
            place = index % self._per_chunk + np.arange(num)  # counted from the start of the group's first chunk
            ids = chunks[first_chunk + place // self._per_chunk].astype(np.int64)
            num_bytes += self._copy_group(group, blocks, ids, place % self._per_chunk, is_store=is_store)
            first_block += num
            first_chunk += int(place[-1]) // self._per_chunk + 1 if num else 0
        seconds = time.perf_counter() - began
        self._finished.append(TransferResult(job_id, success=True, transfer_size=num_bytes, transfer_time=seconds))
        return True

    def _copy_group(self, group: int, blocks: Ids, chunks: Ids, within: Ids, *, is_store: bool) -> int:
        """Copy the blocks of one cache group in all its tensors; return how many bytes. Shapes: [n] each."""
        at, there = torch.from_numpy(blocks), (torch.from_numpy(chunks), torch.from_numpy(within))
        num_bytes = 0
        for index in self._groups[group]:
            cache, host = self._cache[index], self._host[index]
            if is_store:
                host.index_put_(there, cache.index_select(0, at))
            else:
                cache.index_copy_(0, at, host[there])
            num_bytes += cache.shape[1] * len(blocks)
        return num_bytes
