"""kvtide as a storage backend of SGLang's hierarchical cache, loaded by configuration alone:

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
      '{"backend_name": "kvtide", "module_path": "kvtide.integrations.sglang", "class_name": "KvtideStorage",
        "interface_v1": 1, "directory": "/var/cache/kvtide", "capacity": "64GiB"}'

Next: storage.
"""

from kvtide.integrations.sglang.versions import check_version

check_version()

from kvtide.integrations.sglang.storage import KvtideStorage  # noqa: E402  after the version is known to fit

__all__ = ["KvtideStorage"]
