"""kvtide as an L2 adapter of LMCache's server, loaded by configuration alone:

    --l2-adapter '{"type": "plugin", "module_path": "kvtide.integrations.lmcache", "class_name": "KvtideL2Adapter",
                   "adapter_params": {"directory": "/var/cache/kvtide", "capacity": "64GiB"}}'

Next: adapter.
"""

from kvtide.integrations.lmcache.versions import check_version

check_version()

from kvtide.integrations.lmcache.adapter import KvtideL2Adapter  # noqa: E402  after the version is known to fit

__all__ = ["KvtideL2Adapter"]
