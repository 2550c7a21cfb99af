"""Exact attention over some of the keys, in parts that are merged. Torch in, torch out. Next: selecting.

Theory. Softmax attention over a set of keys that is cut in parts: each part gives its own normalised output and the
log of its sum of exponentials. Weighted by the share of those sums, outputs add up to attention over the whole set.
Source: FlashAttention, arXiv 2205.14135.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over a part of the keys. Shapes: out [Hkv, G, m, D]; lse [Hkv, G, m], -inf where nothing is seen."""

    out: torch.Tensor
    lse: torch.Tensor


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scaling: float, mask: torch.Tensor | None
) -> Part:
    """Attend to `keys` where `mask` allows it (None: everywhere). Softmax runs in fp32.

    Shapes: query [Hkv, G, m, D]; keys, values [Hkv, N, D]; mask [Hkv or 1, m, N], true where a key is seen.
    """
    heads, group, num, dim = query.shape
    if query.dtype is torch.float16:  # whose largest number a product may pass
        query, scaling = query * scaling, 1.0
    logits = torch.matmul(query.reshape(heads, group * num, dim), keys.transpose(1, 2)).float() * scaling
    logits = logits.view(heads, group, num, -1)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse[..., None].clamp(min=torch.finfo(torch.float32).min))
    out = torch.matmul(weights.to(values.dtype).view(heads, group * num, -1), values)
    return Part(out.view(heads, group, num, -1), lse)


def merge(parts: list[Part]) -> torch.Tensor:
    """Return attention over all `parts` together. Shapes: [Hkv, G, m, D]."""
    if len(parts) == 1:
        return parts[0].out
    sums = torch.stack([part.lse for part in parts])
    shares = torch.exp(sums - torch.logsumexp(sums, dim=0))
    outs = torch.stack([part.out.float() for part in parts])
    return (outs * shares[..., None]).sum(dim=0).to(parts[0].out.dtype)
