"""LMCache's storage manager: keys of the same tokens differ between processes, by the default hash.

Its documents ask for PYTHONHASHSEED where caches are shared. Without it a restarted engine finds nothing.

Uses only LMCache. Exits with 1 while the fault is there, with 0 when it is not.

Confirms: lmcache-disk same-keys
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from _lmcache import told

code = (
    f"import sys, os; sys.path.insert(0, {str(Path(__file__).parent)!r}); from _lmcache import Disk\n"
    "key = Disk(sys.argv[1]).key([1] * 16); print(key.to_string(), flush=True); os._exit(0)"
)
keys = []
for seed in ("1", "2"):
    with tempfile.TemporaryDirectory() as folder:
        asked = ["env", f"PYTHONHASHSEED={seed}", sys.executable, "-c", code, folder]
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
    keys.append(done.stdout.strip().splitlines()[-1])
    told(**{f"key_with_seed_{seed}": keys[-1]})
sys.exit(int(keys[0] != keys[1]))
