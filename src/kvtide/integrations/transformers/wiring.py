"""Where a model's attention can be met: its modules, query projections and RoPE tables. Next: selecting.

Works with models whose attention modules have a `q_proj` and take the layer's normed input, as LLaMA-like ones do; says
so where a model is otherwise. Changes nothing of the model but the attention function, and puts that back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from kvtide.errors import UnsupportedError
from kvtide.integrations.transformers.models import LoadedModel
from kvtide.select.contract import Floats, Heads
from kvtide.select.rope import Rope

ATTENTION = "kvtide_selected"


class Wiring:
    """A model with its attention met.

    Raises: UnsupportedError for models whose attention cannot be.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        model, config = loaded.model, loaded.model.config
        self._model = model
        self.modules = [
            module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "q_proj")
        ]
        self.modules.sort(key=lambda module: int(module.layer_idx))
        spec = loaded.spec
        if len(self.modules) != len(spec.layers) or any(layer.window_tokens for layer in spec.layers):
            raise UnsupportedError(
                f"selection needs full attention with a query projection in every layer, and {loaded.name} has another "
                f"kind; leave --select out"
            )
        first, layer = self.modules[0], spec.layers[0]
        self.heads = Heads(
            num_layers=len(self.modules),
            num_q=spec.num_q_heads,
            num_kv=layer.num_kv_heads,
            dim=layer.head_dim_k,
            scaling=float(getattr(first, "scaling", layer.head_dim_k**-0.5)),
        )
        self._rotary = next((m for name, m in model.named_modules() if name.endswith("rotary_emb")), None)
        self._max_positions = loaded.max_positions
        self._attention = config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
        self._hooks: list[Any] = []
        self._rope: Rope | None = None
        self._to_next = _norm_ratios(model, self.modules)

    def rope(self) -> Rope | None:
        """Return the model's RoPE tables; None for a model without, or with layers without."""
        if self._rope is not None:
            return self._rope
        if self._rotary is None or not all(getattr(module, "use_rope", True) for module in self.modules):
            return None
        positions = torch.arange(self._max_positions)[None]
        device = next(self._model.parameters()).device
        with torch.inference_mode():
            cos, sin = self._rotary(torch.zeros(1, 1, device=device, dtype=torch.float32), positions.to(device))
        self._rope = Rope(cos[0].cpu().float().numpy().copy(), sin[0].cpu().float().numpy().copy())
        return self._rope

    def attach(self, before: Callable[[Any, dict[str, Any]], None]) -> None:
        """Route attention through modules' `kvtide_step`, which `before` sets, from each one's keyword arguments."""
        AttentionInterface.register(ATTENTION, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
        self._model.set_attn_implementation(ATTENTION)
        self._hooks = [
            module.register_forward_pre_hook(lambda module, _args, kwargs: before(module, kwargs), with_kwargs=True)
            for module in self.modules
        ]

    def detach(self) -> None:
        """Put the model's own attention back. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        for module in self.modules:
            module.kvtide_step = None
        if self._hooks:
            self._model.set_attn_implementation(self._attention)
        self._hooks = []

    def ahead(self, layer: int, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> Floats:
        """Return the query that the attention input of `layer` foretells for the layer after it.

        Layers change what runs through them little, but each weighs it by a norm of its own: that of `layer` is taken
        out of its input, and the next one's put in. Shapes: hidden [1, m, width]; returns [m, Hq, D].
        """
        ratio = self._to_next[layer]
        return self.query(layer + 1, hidden if ratio is None else hidden * ratio, rotation)

    def query(self, layer: int, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> Floats:
        """Return the query that `layer` would have for the attention input `hidden`.

        Shapes: hidden [1, m, width]; returns [m, Hq, D].
        """
        module, heads = self.modules[layer], self.heads
        query = module.q_proj(hidden).view(hidden.shape[1], heads.num_q, heads.dim)
        norm = getattr(module, "q_norm", None)
        if norm is not None:
            query = norm(query)
        rows = as_floats(query)
        if rotation is None or not getattr(module, "use_rope", True):
            return rows
        rope = Rope(as_floats(rotation[0][0]), as_floats(rotation[1][0]))
        return rope.apply(rows, 0)


def _norm_ratios(model: Any, attentions: list[Any]) -> list[torch.Tensor | None]:
    """Return what a layer's normed input is multiplied with to be normed as the next layer does; None: not known.

    Shapes: [width] each.
    """
    norms = {
        id(attention): getattr(layer, "input_layernorm", None)
        for layer in model.modules()
        for attention in layer.children()
        if hasattr(attention, "q_proj")
    }
    weights = [_norm_weight(norms.get(id(attention)), attention.q_proj.in_features) for attention in attentions]
    return [
        None if own is None or after is None else torch.where(own == 0, 0, after / own)
        for own, after in zip(weights, [*weights[1:], None], strict=True)
    ]


def _norm_weight(norm: Any, width: int) -> torch.Tensor | None:
    """Return what a norm multiplies each number with; None for one that does more than that."""
    if "RMSNorm" not in type(norm).__name__ or not list(norm.parameters()):
        return None
    with torch.no_grad():
        found: torch.Tensor = norm(next(norm.parameters()).new_ones(1, 1, width))[0, 0]
    return found


def as_floats(tensor: torch.Tensor) -> Floats:
    """Return `tensor` as an fp32 array on the host."""
    array: Floats = tensor.detach().cpu().float().numpy()
    return np.ascontiguousarray(array)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    step = getattr(module, "kvtide_step", None)
    if step is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0], None
    layer, own, given = int(module.layer_idx), getattr(module, "scaling", None), options.get("scaling")
    plain = query if own is None or given is None or own == given else query * (given / own)  # OPT scales beforehand
    if step.is_sparse:
        return step.attend(layer, plain, key), None
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    step.summarise(layer, plain, key)
    return out, None
