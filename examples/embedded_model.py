"""Write the language model that kvtide's demo embeds as a folder of safetensors, which vLLM can load.

python examples/embedded_model.py FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Load the model from its package, and save a plain one with the same weights."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path)
    folder: Path = made.parse_args().folder
    if (folder / "config.json").exists():
        return 0
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvtide.integrations.transformers import load

    loaded = load(None, dtype="fp32", cache_dir=folder.parent)
    told = loaded.model.config.to_dict()
    told.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig(**told))
    plain.load_state_dict(loaded.model.state_dict(), strict=False)
    plain.tie_weights()
    plain.to(torch.bfloat16).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
