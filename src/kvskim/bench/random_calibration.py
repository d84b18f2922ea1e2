"""A calibration for a model without weights: one basis, fitted on random keys, for all layers. For timing only.

The time of a decode step does not depend on what is in the tables, and an engine whose cache is filled without a prefill can't calibrate by itself.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from kvskim.calibration import Calibration, fit_layer, model_fingerprint
from kvskim.engines.vllm.calibration_source import model_settings

FITTED_KEYS, FITTED_QUERIES = 1024, 64


def write_random_calibration(model: Path, output: Path, *, record_bytes: int = 256) -> Calibration:
    """Write a calibration file for the model whose ``config.json`` is in the folder ``model``.

    Args:
        record_bytes: size of the records of selector sketch. Other selectors take the mean of the keys only.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(model), local_files_only=True).get_text_config()
    query_heads, latent = config.num_attention_heads, getattr(config, "kv_lora_rank", None)
    if latent:
        # With latent attention the cache holds one row per token for all heads.
        heads, dim = 1, latent + config.qk_rope_head_dim
    else:
        heads = getattr(config, "num_key_value_heads", None) or query_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    generator = torch.Generator().manual_seed(0)
    # Channels differ in variance, as those of real keys do.
    keys = torch.randn(heads, FITTED_KEYS, dim, generator=generator) * torch.linspace(0.2, 2.0, dim)
    queries = torch.randn(query_heads, FITTED_QUERIES, dim, generator=generator) * dim**-0.5
    fitted = fit_layer(keys, queries, record_bytes=record_bytes)
    settings = model_settings(SimpleNamespace(model=str(model), use_mla=bool(latent)))
    calibration = Calibration(model.name, model_fingerprint(settings), dict.fromkeys(range(config.num_hidden_layers), fitted))
    calibration.save(output)
    return calibration
