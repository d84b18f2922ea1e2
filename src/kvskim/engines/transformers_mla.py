"""Latent attention (MLA) in transformers: the cache of DeepSeek-V2 and its like holds one latent vector and one rotary part per token.

transformers expands them into the keys and values of all heads at every step and hands those to the attention function. The latent rows say the
same with one kv head: with ``k_h = (U_h c, r)`` and ``v_h = V_h c`` for latent ``c`` and rotary part ``r``,

    q_h . k_h = (U_h^T q_plain, q_rotary) . (c, r),    sum_t p_t v_ht = V_h sum_t p_t c_t

so a decode step skims, selects and attends latent rows, as in an engine that never expands them (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from kvskim.rotary import Rotary

_ATTRIBUTES = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class LatentHeads:
    """How the heads of one module read latent rows: ``key_up [Hq, plain, latent]`` and ``value_up [Hq, Dv, latent]``, views of its weights."""

    key_up: Tensor
    value_up: Tensor

    def rows(self, layer: DynamicLayer) -> Tensor:
        """Latent rows ``[B, 1, T, latent + rotary]`` of a cache layer."""
        assert layer.keys is not None
        assert layer.values is not None
        return torch.cat([layer.keys, layer.values], -1)

    def values(self, rows: Tensor) -> Tensor:
        """The values among the rows: their first channels."""
        return rows[..., : self.key_up.shape[2]]

    def absorb(self, query: Tensor) -> Tensor:
        """Queries ``[..., Hq, n, plain + rotary]`` in the space of the rows, ``[..., Hq, n, latent + rotary]``."""
        plain = self.key_up.shape[1]
        return torch.cat([query[..., :plain] @ self.key_up.to(query.dtype), query[..., plain:]], -1)

    def project(self, out: Tensor) -> Tensor:
        """Attention output ``[B, n, Hq, latent]`` to that of the heads, ``[B, n, Hq, Dv]``."""
        return torch.einsum("bnhl,hvl->bnhv", out, self.value_up.to(out.dtype))


def is_latent(module: nn.Module, layer: DynamicLayer) -> bool:
    """Whether a cache layer of this module holds latent and rotary parts instead of keys and values."""
    if not all(hasattr(module, name) for name in _ATTRIBUTES) or layer.keys is None or layer.values is None:
        return False
    return (layer.keys.shape[-1], layer.values.shape[-1]) == (module.kv_lora_rank, module.qk_rope_head_dim)


def latent_heads(module: Any, layer: DynamicLayer, key: Tensor, value: Tensor) -> LatentHeads | None:
    """What `is_latent` modules need, or None where the weights do not explain the last ``key`` and ``value`` (``[B, Hq, T, D]``) that were expanded."""
    weight = getattr(module.kv_b_proj, "weight", None)
    heads, plain = key.shape[1], module.qk_nope_head_dim
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.shape != (heads * (plain + module.v_head_dim), module.kv_lora_rank):
        return None
    key_up, value_up = weight.detach().unflatten(0, (heads, -1)).split([plain, module.v_head_dim], 1)
    assert layer.keys is not None
    assert layer.values is not None
    latent, rotary = layer.keys[:, :, -1:], layer.values[:, :, -1:].expand(-1, heads, -1, -1)
    expanded = torch.cat([latent @ key_up.transpose(1, 2), rotary], -1)
    alike = all(
        torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.02 * float(b.abs().max()))
        for a, b in ((expanded, key[:, :, -1:]), (latent @ value_up.transpose(1, 2), value[:, :, -1:]))
    )
    return LatentHeads(key_up, value_up) if alike else None


def latent_shape(text_config: Any) -> tuple[int, int] | None:
    """(1, channels of a latent row) of a text model with latent attention; None of others."""
    latent, rotary = (getattr(text_config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    return (1, latent + rotary) if latent and rotary else None


def latent_rotary(text_config: Any) -> Rotary | None:
    """Rotation speeds of the rotary channels of latent rows, or None where they are not certain."""
    parameters = getattr(text_config, "rope_parameters", None)
    if getattr(text_config, "model_type", "") != "deepseek_v2" or not isinstance(parameters, dict) or parameters.get("rope_type") != "default":
        return None
    dim = text_config.qk_rope_head_dim
    speeds = 1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return Rotary(speeds, interleaved=True, first=text_config.kv_lora_rank)
