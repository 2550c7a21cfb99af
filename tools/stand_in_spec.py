"""What the stand-ins of the engines hold: names of their modules, and bodies of our own for what the plug-ins call.

Signatures, fields and members come from the engines' sources, see make_stand_ins. A class maps to the methods to take;
None takes all. `lines` stand at the top of a module as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Module:
    """One module of a stand-in; `source` is where its names are defined, if elsewhere."""

    classes: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    functions: tuple[str, ...] = ()
    lines: str = ""
    source: str = ""


@dataclass(frozen=True)
class Engine:
    """One engine: the distribution its version is that of, its modules, and bodies by qualified name."""

    distribution: str
    version: str
    modules: dict[str, Module]
    bodies: dict[str, str]


_TIER = (
    "__init__",
    "block_size_bytes",
    "lookup",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "take_events",
    "touch",
    "on_new_request",
    "drain_jobs",
    "build_metric_definitions",
    "get_stats",
    "shutdown",
)

VLLM = Engine(
    "vllm",
    "0.32.0",
    {
        "vllm.config": Module(functions=("get_current_vllm_config_or_none",), source="vllm.config.vllm"),
        "vllm.v1.kv_offload.base": Module(
            {
                "Medium": (),
                "Locality": (),
                "OffloadingEvent": (),
                "OffloadingKVEventsConfig": (),
                "ReqContext": (),
                "LookupResult": (),
                "OffloadPolicy": (),
                "RequestOffloadingContext": (),
                "OffloadingMetricMetadata": (),
                "OffloadingCounterMetadata": (),
                "OffloadingGaugeMetadata": (),
                "TransferResult": (),
                "OffloadingWorker": None,
            },
            lines='OffloadKey = NewType("OffloadKey", bytes)',
        ),
        "vllm.v1.kv_offload.cpu.shared_offload_region": Module(
            {"SharedOffloadRegion": ("__init__", "create_next_worker_view", "cleanup")}
        ),
        "vllm.v1.kv_offload.tiering.base": Module({"TransferJob": (), "JobResult": (), "SecondaryTierManager": _TIER}),
        "vllm.v1.kv_offload.tiering.spec": Module({"TieringOffloadingSpec": ("get_worker",)}),
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": Module(
            {"OffloadingConnector": ("__init__",)}
        ),
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": Module({"KVConnectorStats": ()}),
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": Module(
            {"OffloadingConnectorStats": ("increase_counter", "set_gauge", "is_empty")}
        ),
    },
    {
        "get_current_vllm_config_or_none": "return None",
        "SecondaryTierManager.__init__": (
            "self._offloading_spec, self.tier_type = offloading_spec, tier_type\n"
            "self._primary_kv_view, self._bp_detector = primary_kv_view, backpressure_detector\n"
            "self._block_size_bytes = primary_kv_view.strides[0]"
        ),
        "OffloadingConnector.__init__": "self._vllm_config, self._role = vllm_config, role",
        "SecondaryTierManager.block_size_bytes": "return self._block_size_bytes",
        "OffloadingConnectorStats.increase_counter": (
            "self.data[counter_name] = self.data.get(counter_name, 0) + counter_increase_value"
        ),
        "OffloadingConnectorStats.set_gauge": "self.data[gauge_name] = gauge_value",
        "OffloadingConnectorStats.is_empty": "return not self.data",
    },
)

SGLANG = Engine(
    "sglang",
    "0.5.23",
    {
        "sglang.srt.mem_cache.hicache_storage": Module(
            {
                "HiCacheStorageConfig": ("is_storage_writer",),
                "HiCacheStorageExtraInfo": (),
                "PoolName": ("__str__",),
                "PoolHitPolicy": (),
                "PoolTransfer": (),
                "PoolTransferResult": (),
                "HiCacheStorage": None,
            }
        ),
        "sglang.srt.observability.metrics_collector": Module({"StorageMetrics": ()}),
    },
    {
        "HiCacheStorageConfig.is_storage_writer": "return self.tp_rank == self.dcp_rank or not self.is_mla_model",
        "PoolName.__str__": "return self.value",
    },
)

LMCACHE = Engine(
    "lmcache",
    "0.5.6",
    {
        "lmcache.lmcache_native": Module(
            {"Bitmap": ("__init__", "batched_set", "test", "popcount", "get_indices_list")}
        ),
        "lmcache.v1.distributed.api": Module(
            {
                "EncodedObjectKey": (),
                "ObjectKey": ("to_encoded_object_key",),
                "KeyEntry": (),
                "KeyListPage": (),
            }
        ),
        "lmcache.v1.distributed.internal_api": Module(
            {"L2StoreResult": ("__new__", "is_successful", "bytes_transferred")}
        ),
        "lmcache.v1.distributed.l2_adapters.base": Module(
            {"AdapterUsage": ("usage_fraction",), "L2AdapterInterface": None}
        ),
        "lmcache.v1.platform": Module(
            {"EventNotifier": ("fileno", "notify", "consume", "close")},
            ("create_event_notifier",),
            source="lmcache.v1.platform.event_notifier",
        ),
    },
    {
        "Bitmap.__init__": "self._bits = [False] * size",
        "Bitmap.batched_set": "for index in indices:\n    self._bits[index] = True",
        "Bitmap.test": "return self._bits[index]",
        "Bitmap.popcount": "return sum(self._bits)",
        "Bitmap.get_indices_list": "return [index for index, bit in enumerate(self._bits) if bit]",
        "ObjectKey.to_encoded_object_key": (
            "content = self.chunk_hash.hex()\n"
            "return EncodedObjectKey(content, self.model_name, self.kv_rank, self.object_group_id, self.cache_salt)"
        ),
        "L2StoreResult.__new__": "return super().__new__(cls, bytes_transferred if success else -1)",
        "L2StoreResult.is_successful": "return self != -1",
        "L2StoreResult.bytes_transferred": "return max(0, int(self))",
        "AdapterUsage.usage_fraction": (
            "full = self.total_capacity_bytes\nreturn self.total_bytes_used / full if full > 0 else -1.0"
        ),
        "L2AdapterInterface.__init__": (
            "self._max_capacity_bytes, self._listeners = max_capacity_bytes, []\n"
            "self._backend_name, self._bytes, self._counting = '', {}, threading.Lock()"
        ),
        "L2AdapterInterface.register_listener": "self._listeners.append(listener)",
        "L2AdapterInterface.set_backend_identity": "self._backend_name = name",
        "L2AdapterInterface._notify_keys_stored": (
            "self._count(keys, sizes, 1)\nfor one in self._listeners:\n    one.on_l2_keys_stored(keys, sizes)"
        ),
        "L2AdapterInterface._notify_keys_accessed": ("for one in self._listeners:\n    one.on_l2_keys_accessed(keys)"),
        "L2AdapterInterface._notify_keys_deleted": (
            "self._count(keys, sizes, -1)\nfor one in self._listeners:\n    one.on_l2_keys_deleted(keys)"
        ),
        "L2AdapterInterface.get_usage": (
            "with self._counting:\n"
            "    kept = {salt: num for salt, num in self._bytes.items() if num}\n"
            "return AdapterUsage(sum(kept.values()), self._max_capacity_bytes, kept)"
        ),
        "L2AdapterInterface": (
            "def _count(self, keys, sizes, sign):\n"
            "    with self._counting:\n"
            "        for key, size in zip(keys, sizes, strict=True):\n"
            "            self._bytes[key.cache_salt] = self._bytes.get(key.cache_salt, 0) + sign * size"
        ),
        "EventNotifier": ("def __init__(self):\n    self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)"),
        "EventNotifier.fileno": "return self._fd",
        "EventNotifier.notify": "os.eventfd_write(self._fd, 1)",
        "EventNotifier.consume": "with contextlib.suppress(BlockingIOError):\n    os.eventfd_read(self._fd)",
        "EventNotifier.close": "if self._fd >= 0:\n    os.close(self._fd)\nself._fd = -1",
        "create_event_notifier": "return EventNotifier()",
    },
)

ENGINES = {"vllm": VLLM, "sglang": SGLANG, "lmcache": LMCACHE}
