"""One vLLM engine in this process that answers prompts under one rule after the other, for evaluations.

Needs ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` and one worker, as `kvskim.engines.vllm.probe` does. The engine runs eagerly, so that its rule can be changed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvskim.engines.vllm import probe
from kvskim.engines.vllm.check import attention_backend
from kvskim.engines.vllm.sampler import sums
from kvskim.errors import KvskimError
from kvskim.rules import RuleParameters

SETTLED_STEPS = 4
"""After so many steps it is asked which answers are settled: text is made of all tokens each time."""
RESERVED_BYTES = 3 << 30
"""Of an engine beside weights and KV cache: the CUDA context, activations and work buffers."""


@dataclass(frozen=True)
class Read:
    """What the decode steps of several prompts read, means over steps, layers, requests and kv heads: pages attended, and pages there."""

    pages: float
    total: float


@dataclass(frozen=True)
class Answered:
    """Tokens written after each prompt, a stop token included; prompt tokens in all, and those among them that came from the prefix cache; what decode
    steps read, None where no layer is sparse or nothing was decoded."""

    tokens: list[list[int]]
    prompt_tokens: int
    cached_tokens: int
    read: Read | None


def cache_bytes(share: float, weights: int, total: int) -> int:
    """Bytes for the KV cache of an engine that may take a share of a GPU.

    Args:
        share: of the memory of the GPU, all that the engine takes.
        weights: bytes of the model.
        total: bytes of the GPU.

    Raises:
        KvskimError: nothing is left.
    """
    left = int(share * total) - weights - RESERVED_BYTES
    if left <= 0:
        raise KvskimError(
            f"{share:.1%} of {total / 2**30:.0f} GiB is not enough for an engine with {weights / 2**30:.1f} GiB of weights: let fewer engines share a GPU"
        )
    return left


def start(
    model: str, settings: Mapping[str, Any] | None, *, longest: int, rows: int, step_tokens: int, share: float, weights: int, stop: Sequence[int]
) -> AnsweringEngine:
    """Start an engine on the first GPU that this process sees.

    Args:
        model: folder of the model.
        settings: of kvskim; None: vLLM's own attention.
        longest: most tokens of a prompt and its answer.
        rows: most requests that are decoded side by side.
        step_tokens: most tokens of a step.
        share, weights: as for `cache_bytes`.
        stop: tokens that end an answer.
    """
    backend = attention_backend(model, settings)
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = dict(
        model=model, attention_backend=backend, max_model_len=longest, max_num_seqs=rows, max_num_batched_tokens=step_tokens, enforce_eager=True,
        enable_prefix_caching=True, seed=0, disable_log_stats=True,
        # A step that is under way while another is planned would be counted twice, or not at all.
        async_scheduling=False,
        # Without a measurement of what is free, which engines that start side by side would disturb.
        kv_cache_memory_bytes=cache_bytes(share, weights, torch.cuda.get_device_properties(0).total_memory), gpu_memory_utilization=0.01,
    )
    if settings is not None:
        arguments["additional_config"] = {"kvskim": dict(settings)}
    llm = LLM(**arguments)
    if settings is not None:
        check_sparse(llm)
    return AnsweringEngine(llm, SamplingParams, stop)


def check_sparse(llm: Any) -> None:
    """Refuse an engine whose answers would be those of full attention; raises KvskimError."""
    state = probe.state_of(llm)
    if state is None or not state.layers:
        raise KvskimError("no layer of this engine is sparse, so its answers would be those of full attention: see the lines of kvskim in its log")
    if state.ready is None or not state.ready.item():
        raise KvskimError("this engine has no calibration, so its answers would be those of full attention: give it a file of `kvskim calibrate`")


class AnsweringEngine:
    """Answers prompts with a `vllm.LLM`.

    Args:
        llm: as `start` makes it.
        parameters: ``vllm.SamplingParams``, or what stands for it in tests.
        stop: tokens that end an answer.
    """

    def __init__(self, llm: Any, parameters: Callable[..., Any], stop: Sequence[int]) -> None:
        self.llm, self._parameters, self._stop = llm, parameters, list(stop)
        self._sums = torch.zeros(0)

    def about(self) -> dict[str, str]:
        """The version of vLLM, the GPU, the version of torch and the type of the model, in words."""
        import vllm

        dtype = str(self.llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")
        return {"engine": f"vllm {vllm.__version__}", "device": torch.cuda.get_device_name(0), "torch": str(torch.__version__), "dtype": dtype}

    @property
    def capacity(self) -> int:
        """Tokens that fit the KV cache."""
        cache = self.llm.llm_engine.vllm_config.cache_config
        # The first counts groups of layers with blocks of their own; some versions don't have it.
        return int(getattr(cache, "kv_cache_size_tokens", None) or cache.num_gpu_blocks * cache.block_size)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self.llm.llm_engine.vllm_config.cache_config.block_size)

    def use_rule(self, rule: RuleParameters, *, whole: bool = False) -> None:
        """Let a rule decide from now on. whole: every page is attended, whatever the rule."""
        state = probe.state_of(self.llm)
        probe.use_rule(self.llm, replace(rule, full_pages=state.page_capacity) if whole and state is not None else rule)

    def answer(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], settled: Callable[[int, list[int]], bool] = lambda index, tokens: False
    ) -> Answered:
        """Greedy answers to all prompts, side by side.

        Args:
            prompts: token ids.
            limits: most tokens of each answer.
            settled: given the number of a prompt and the tokens so far; true ends the answer, some tokens later. Asked of unfinished answers.
        """
        engine, run = self.llm.llm_engine, uuid.uuid4().hex
        names = [f"{run}-{index:06d}" for index in range(len(prompts))]
        for name, ids, limit in zip(names, prompts, limits, strict=True):
            parameters = self._parameters(temperature=0, max_tokens=limit, stop_token_ids=self._stop, ignore_eos=True, detokenize=False)
            engine.add_request(name, {"prompt_token_ids": list(ids)}, parameters)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        cached: dict[str, int] = {}
        going = dict.fromkeys(names)
        state = probe.state_of(self.llm)
        self._sums, steps = torch.zeros(0), 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                # Some versions append a suffix to the name.
                name = output.request_id[: len(run) + 7]
                tokens[name] = list(output.outputs[0].token_ids)
                cached.setdefault(name, int(output.num_cached_tokens or 0))
                if output.finished:
                    going.pop(name, None)
            if state is not None:
                self._measure(state)
            steps += 1
            if steps % SETTLED_STEPS == 0:
                done = [name for name in going if tokens[name] and settled(int(name[len(run) + 1 :]), tokens[name])]
                for name in done:
                    del going[name]
                if done:
                    engine.abort_request(done)
        read = None
        if len(self._sums):
            attended, total, _, count, _ = self._sums.tolist()
            read = Read(attended / count, total / count) if count else None
        return Answered([tokens[name] for name in names], sum(map(len, prompts)), sum(cached.values()), read)

    @torch.inference_mode()
    def _measure(self, state: Any) -> None:
        """Add what the last step has attended, without waiting for the GPU."""
        if state.last_lengths is None:
            return
        found = sums(state.layers.values(), state.last_lengths)
        self._sums = self._sums + found if len(self._sums) else found
        # A step without a forward pass would count the one before it again.
        state.last_lengths = None
