"""Looking into a vLLM engine: what its workers say of themselves, its sparse state, which blocks are alive, whether their records are true.

For `kvskim check` and for tests. All but `look` needs ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` and one worker, so that the engine is in the caller's process.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvskim.engines.vllm.calibrate import ENCODE_PAGES
from kvskim.engines.vllm.layer_state import LayerState
from kvskim.engines.vllm.report import Activity, last_step
from kvskim.engines.vllm.state import SkimState
from kvskim.layout import PAGE_TOKENS
from kvskim.ops.encode import encode, encoders
from kvskim.rules import RuleParameters


@dataclass(frozen=True)
class Generated:
    """What one request gave: its tokens, the log-probability of each, the likeliest tokens at each place (with the request's ``logprobs`` set), and
    how many prompt tokens came from the prefix cache."""

    tokens: list[int]
    logprobs: list[float]
    likeliest: list[dict[int, float]]
    cached_tokens: int = 0


@dataclass(frozen=True)
class Look:
    """What is sparse in an engine: whether all workers are calibrated, their kernels, the names of the sparse layers, and what the last decode step
    attended, summed over layers, rows and the kv heads of all workers."""

    ready: bool
    kernels: str
    layers: tuple[str, ...]
    activity: Activity


class WorkerProbe:
    """What vLLM adds to its workers (argument ``worker_extension_cls``) so that `look` can ask them. The answer is a JSON text, which every vLLM can send
    between its processes."""

    vllm_config: Any

    def kvskim_look(self) -> str:
        """The fields of `Look` for this worker."""
        state = SkimState.find(self.vllm_config.compilation_config.static_forward_context)
        if state is None or not state.layers:
            return json.dumps(dict(ready=False, kernels="", layers=[], activity=asdict(Activity())))
        activity = sum((last_step(state) or {}).values(), Activity())
        ready = state.ready is not None and bool(state.ready.item())
        return json.dumps(dict(ready=ready, kernels=state.kernels.kernels, layers=list(state.layers), activity=asdict(activity)))


def look(llm: Any) -> Look:
    """Ask all workers of a `vllm.LLM` that was made with `WorkerProbe`."""
    everyone = [json.loads(text) for text in llm.collective_rpc("kvskim_look")]
    # A part of a pipeline may have no layer that is sparse.
    answers = [answer for answer in everyone if answer["layers"]]
    return Look(
        ready=bool(answers) and all(answer["ready"] for answer in answers),
        kernels=" and ".join(sorted({answer["kernels"] for answer in answers})),
        layers=tuple(dict.fromkeys(name for answer in answers for name in answer["layers"])),
        activity=sum((Activity(**answer["activity"]) for answer in answers), Activity()),
    )


def state_of(llm: Any) -> SkimState | None:
    """The sparse state of a `vllm.LLM`; None where no layer is kvskim's."""
    return SkimState.find(llm.llm_engine.vllm_config.compilation_config.static_forward_context)


def use_rule(llm: Any, rule: RuleParameters) -> None:
    """Let another rule decide from the next step on; see `SkimState.use_rule`. An engine without sparse layers has none to change."""
    state = state_of(llm)
    if state is not None:
        state.use_rule(rule)


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
    """Re-encode pages from the keys in the cache and compare with their stored records, byte by byte, by each encoder that may have made them.

    Args:
        state: of an engine whose calibration is ready.
        pages: int64, physical pages.

    Returns:
        for each sparse layer, how many (page, kv head) have another record than a fresh one.
    """
    return {name: _untrue(state, layer, pages) for name, layer in state.layers.items()}


@torch.inference_mode()
def untrue_copies(state: SkimState) -> dict[str, int]:
    """For each layer with values in host memory, in how many ways its hot cache is not what the directory says; see `kvskim.tier.pages.HostTier`.

    Counted are copies that differ from the host, pages that share a slot, and slots whose owner does not know of them.
    """
    result = {}
    for name, layer in state.layers.items():
        tier = layer.tier
        if tier is None:
            continue
        directory = tier.directory.view(-1)
        hot = torch.nonzero(directory).view(-1)
        slots = directory[hot].long() - 1
        if tier.device.type == "cuda":
            torch.cuda.synchronize()  # the host reads the pool past the GPU
        there = tier.host.view(-1, *tier.hot.shape[1:])[hot.to(tier.host.device)].to(tier.device)
        wrong = int((directory < 0).sum()) + len(slots) - len(torch.unique(slots)) + int((tier.owner[slots].long() != hot).sum())
        wrong += int((tier.owner >= 0).sum()) - len(slots)
        result[name] = wrong + int((there.view(torch.uint8) != tier.hot[slots].view(torch.uint8)).flatten(1).any(1).sum())
    return result


def _untrue(state: SkimState, layer: LayerState, pages: Tensor) -> int:
    stored = layer.records.records
    assert stored is not None, "vLLM has not bound the records"
    pages = pages.to(stored.device)
    fresh = torch.zeros_like(stored)
    key_cache = layer.caches()[0]
    kernels = state.kernels.kernels
    untrue = torch.ones(len(pages), stored.shape[1], dtype=torch.bool, device=stored.device)
    # Steps of few and of many tokens may have made them by encoders that differ in codes next to a boundary.
    for encoder in encoders(layer.tables, key_cache, kernels):
        for part in pages.split(ENCODE_PAGES):
            encode(state.selector, layer.tables, key_cache, part * PAGE_TOKENS + (PAGE_TOKENS - 1), fresh, kernels=kernels, encoder=encoder)
        untrue &= (fresh[pages] != stored[pages]).any(-1)
    return int(untrue.sum())
