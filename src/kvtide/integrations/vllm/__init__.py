"""kvtide as a storage tier of vLLM, loaded by configuration alone:

    --kv-transfer-config '{"kv_connector": "KvtideConnector",
      "kv_connector_module_path": "kvtide.integrations.vllm.connector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "secondary_tiers": [{"type": "KvtideTier", "module_path": "kvtide.integrations.vllm",
                             "directory": "/var/cache/kvtide", "capacity": "64GiB"}]}}'

vLLM's CPU build has no worker that copies KV to the primary tier; there `"spec_name": "CpuTieringSpec"` with
`"spec_module_path": "kvtide.integrations.vllm"` takes the place of the spec above. Next: tier.
"""

from kvtide.integrations.vllm.versions import check_version

check_version()

from kvtide.integrations.vllm.cpu import CpuTieringSpec  # noqa: E402  after the versions are known to fit
from kvtide.integrations.vllm.tier import KvtideTier  # noqa: E402

__all__ = ["CpuTieringSpec", "KvtideTier"]
