"""The forward pass of the training: causal attention without a mask, and predictions only where something is learnt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ATTENTION_NAME = "long-smollm"


class Attention:
    """Which kernel of torch computes attention. Batches are filled at their end only, so every row is plainly causal."""

    backends: tuple[SDPBackend, ...] = ()


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    if Attention.backends:
        with sdpa_kernel(list(Attention.backends), set_priority=True):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    else:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make the attention of this module known to transformers (idempotent)."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)


def fuse_norms(model: nn.Module) -> None:
    """Compute the root-mean-square norms in one kernel: less memory and time than the five operations of transformers, the same up to rounding."""
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            size, epsilon = tuple(module.weight.shape), module.variance_epsilon
            module.forward = lambda x, weight=module.weight, size=size, epsilon=epsilon: F.rms_norm(x, size, weight, epsilon)


def predictions(model: Any, ids: Tensor, roles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits float32 ``[n, vocabulary]`` for the n tokens that have a role, the tokens ``[n]``, and their roles ``[n]``, in the order of ``roles``.

    The token at place i is predicted from the hidden state at i - 1; only these states go through the large output layer.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    learnt = roles[:, 1:] > 0
    return model.lm_head(hidden[:, :-1][learnt]).float(), ids[:, 1:][learnt], roles[:, 1:][learnt]


def choose_attention(shape: tuple[int, int, int, int], log: Callable[[str], None]) -> None:
    """Time the flash kernel of torch and that of cuDNN, forward and backward on ``[batch, heads, tokens, dim]``, and take the faster one.

    cuDNN's is taken only if its result and gradient agree with the other's.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_() for _ in range(3)]
    results, seconds = {}, {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            for _ in range(3):
                for x in inputs:
                    x.grad = None
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                with sdpa_kernel([backend]):
                    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
                out.square().sum().backward()
                stop.record()
                torch.cuda.synchronize()
                seconds[backend] = start.elapsed_time(stop) / 1000
            results[backend] = [out.detach(), *(x.grad for x in inputs)]
        except RuntimeError as error:
            seconds.pop(backend, None)
            log(f"attention by {backend.name} does not run here: {str(error).splitlines()[0]}")
    known = results.get(SDPBackend.FLASH_ATTENTION)
    other = results.get(SDPBackend.CUDNN_ATTENTION)
    if known and other:
        worst = max(((a - b).float().norm() / a.float().norm()).item() for a, b in zip(known, other))
        log(f"attention of cuDNN differs from flash by {worst:.4f}")
        if not worst < 0.02:
            del seconds[SDPBackend.CUDNN_ATTENTION]
    if not seconds:
        Attention.backends = ()
        return
    best = min(seconds, key=lambda backend: seconds[backend])
    log("attention forward and backward, seconds: " + ", ".join(f"{k.name} {v:.4f}" for k, v in seconds.items()) + f"; taken: {best.name}")
    # The others behind it serve shapes that the best one refuses.
    Attention.backends = tuple(dict.fromkeys((best, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)))
