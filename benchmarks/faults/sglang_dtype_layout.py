"""SGLang's HiCacheFile: pages stored by a pool of one dtype and layout are hits of another (SGLang#38362).

Its source says so: "TODO: Include KV dtype and stored layout in keys". The opt-in key scheme `unified` has them.

Uses only SGLang. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: sglang-file identity-dtype, identity-layout
"""

import sys
import tempfile

import torch
from _sglang import KEY, backend, told

hits = {}
with tempfile.TemporaryDirectory() as folder:
    stored = torch.full((4096,), 1.5, dtype=torch.float8_e4m3fn)
    backend(folder, dtype=torch.float8_e4m3fn).set(KEY, stored)
    loaded = torch.zeros(4096, dtype=torch.float8_e5m2)
    hits["dtype"] = backend(folder, dtype=torch.float8_e5m2).get(KEY, loaded) is not None
    told(stored=f"{stored.dtype} {stored[0].item()}", loaded=f"{loaded.dtype} {loaded[0].item()}", hit=hits["dtype"])
    told(hit_with_layout_layer_first=backend(folder, layout="layer_first").exists(KEY))
sys.exit(int(any(hits.values())))
