"""vLLM's disk tier: KV stored with one RoPE scaling and revision is a hit with another (vLLM#56311, vLLM#49261).

The model's folder keeps its name; its config.json and the revision change, as after an update in place.

Uses only vLLM. Exits with 1 while both faults are there, with 0 when neither is.

Confirms: vllm-fs identity-rope, identity-revision
"""

import sys
import tempfile
from pathlib import Path

from _disk import exit_code
from _vllm import Tier, config_of, told

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {**PLAIN, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
with tempfile.TemporaryDirectory() as folder:
    model = Path(folder) / "model"
    model.mkdir()
    first = Tier(f"{folder}/kv", config_of(model, revision="main", rope=PLAIN))
    first.row[:] = 0x11
    told(stored_with="main, default RoPE", store_says=first.put())
    hits = {}
    for name, revision, rope in (("revision", "v2", PLAIN), ("rope", "main", YARN)):
        second = Tier(f"{folder}/kv", config_of(model, revision=revision, rope=rope))
        hits[name] = second.has() and second.get() and bool((second.row == 0x11).all())
        told(**{f"hit_with_other_{name}": hits[name]})
        second.close()
    first.close()
sys.exit(exit_code(hits))
