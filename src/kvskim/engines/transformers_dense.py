"""Full attention for the steps and layers that are not sparse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvskim.engines.decode import soft_capped

_QUERY_BLOCK = 256


def dense_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The model's own sdpa, or, with a logit soft cap (which sdpa lacks), the same in blocks of queries."""
    if softcap is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return result
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1).float(), value.repeat_interleave(groups, 1).float()
    tokens, length = query.shape[2], key.shape[2]
    blocks = []
    for begin in range(0, tokens, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, tokens)
        logits = soft_capped(query[:, :, begin:end].float() @ keys.transpose(2, 3) * kwargs["scaling"], softcap)
        if mask is None:
            last = torch.arange(length - tokens + begin, length - tokens + end, device=query.device)
            logits = logits.masked_fill(torch.arange(length, device=query.device) > last[:, None], -torch.inf)
        elif mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask[:, :, begin:end], torch.finfo(logits.dtype).min)
        else:
            logits = logits + mask[:, :, begin:end]
        weights = nn.functional.dropout(torch.softmax(logits, -1), kwargs["dropout"], module.training)
        blocks.append((weights @ values).to(query.dtype))
    return torch.cat(blocks, 2).transpose(1, 2).contiguous(), None
