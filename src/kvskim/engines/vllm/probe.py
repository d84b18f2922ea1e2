"""Looking into a vLLM engine that runs in this process: its sparse state, which blocks are alive, whether their records are true.

For `kvskim check` and for tests. Needs ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, so that the engine is in the caller's process.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvskim.engines.vllm.calibrate import ENCODE_PAGES
from kvskim.engines.vllm.state import LayerState, SkimState
from kvskim.layout import PAGE_TOKENS
from kvskim.ops.encode import encode


@dataclass(frozen=True)
class Generated:
    """What one request gave: its tokens, the log-probability of each, the likeliest tokens at each place (with the request's ``logprobs`` set), and
    how many prompt tokens came from the prefix cache."""

    tokens: list[int]
    logprobs: list[float]
    likeliest: list[dict[int, float]]
    cached_tokens: int = 0


def state_of(llm: Any) -> SkimState | None:
    """The sparse state of a `vllm.LLM`; None where no layer is kvskim's."""
    return SkimState.find(llm.llm_engine.vllm_config.compilation_config.static_forward_context)


def generate(llm: Any, prompts: list[list[int]], params: Any, after_step: Callable[[], None] | None = None) -> list[Generated]:
    """Run all prompts (token ids) together, step by step, and call ``after_step`` after each step of the engine."""
    engine = llm.llm_engine
    run = uuid.uuid4().hex
    names = [f"{run}-{i:06d}" for i in range(len(prompts))]
    for name, ids in zip(names, prompts):
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    finished: dict[str, Generated] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                # Some versions append a suffix to the name.
                finished[output.request_id[: len(run) + 7]] = _generated(output)
        if after_step is not None:
            after_step()
    return [finished[name] for name in names]


def _generated(output: Any) -> Generated:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    likeliest = [{int(token): float(entry.logprob) for token, entry in place.items()} for place in completion.logprobs or []]
    return Generated(tokens, [place[token] for place, token in zip(likeliest, tokens)], likeliest, int(output.num_cached_tokens or 0))


def live_pages(llm: Any) -> Tensor:
    """int64, physical pages of all full blocks in the prefix cache: complete and unchanging pages whose records must be true.

    A step that is still under way comes before what is then asked of the GPU, so requests may be running.
    """
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    per_block = llm.llm_engine.vllm_config.cache_config.block_size // PAGE_TOKENS
    size = per_block * PAGE_TOKENS
    full = [block.block_id for block in pool.blocks if block.block_hash is not None and (getattr(block, "block_hash_num_tokens", None) or 0) % size == 0]
    blocks = torch.tensor(full, dtype=torch.int64)
    return (blocks[:, None] * per_block + torch.arange(per_block)).flatten()


@torch.inference_mode()
def untrue_records(state: SkimState, pages: Tensor) -> dict[str, int]:
    """Re-encode pages from the keys in the cache and compare with their stored records, byte by byte.

    Args:
        state: of an engine whose calibration is ready.
        pages: int64, physical pages.

    Returns:
        for each sparse layer, how many (page, kv head) have another record than a fresh one.
    """
    return {name: _untrue(state, layer, pages) for name, layer in state.layers.items()}


def _untrue(state: SkimState, layer: LayerState, pages: Tensor) -> int:
    stored = layer.records.records
    assert stored is not None, "vLLM has not bound the records"
    pages = pages.to(stored.device)
    fresh = torch.zeros_like(stored)
    key_cache = layer.caches()[0]
    for part in pages.split(ENCODE_PAGES):
        encode(state.selector, layer.tables, key_cache, part * PAGE_TOKENS + (PAGE_TOKENS - 1), fresh, kernels=state.kernels.kernels)
    return int((fresh[pages] != stored[pages]).any(-1).sum())
