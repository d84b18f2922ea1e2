"""Measurements on a running vLLM engine: time per token, time to first token, load, and where the time of a step goes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvskim.bench.e2e_load import Trace, drive, summary
from kvskim.bench.e2e_plan import DENSE, EXTRA_STEPS, Job
from kvskim.errors import KvskimError

WARM_PROMPT = 8192
"""Tokens of the prefill that is not timed; several of these make a prompt, and all take the same kernels."""
WARM_REQUESTS, WARM_OUTPUT = 4, (4, 12)
"""Requests in flight, and shortest and longest output, of the load that is not timed."""
CALIBRATION_ROUNDS, CALIBRATION_STEPS = 8, 128


class Prompts:
    """Prompts as token ids: pieces of one text where there is one, else seeded random tokens. No two begin alike.

    Args:
        vocabulary: tokens of the model.
        text: token ids of a text, for models with real weights.
    """

    def __init__(self, vocabulary: int, text: Sequence[int] = ()) -> None:
        self._vocabulary, self._text = vocabulary, list(text)
        self._given = 0

    def take(self, tokens: int) -> list[int]:
        """A prompt of so many tokens that was not given before."""
        self._given += 1
        if not self._text:
            # The first hundred ids are often special tokens.
            drawn: list[int] = np.random.default_rng(self._given).integers(100, self._vocabulary, tokens).tolist()
            return drawn
        first = self._given * 997 % len(self._text)
        turned = self._text[first:] + self._text[:first]
        return (turned * (tokens // len(turned) + 1))[:tokens]


class EngineBench:
    """Runs jobs on one engine.

    Args:
        llm: a `vllm.LLM`.
        side: dense or kvskim.
        prompts: where prompts come from.
        filled: the engine has `kvskim.bench.e2e_fill.FillConnector`: decode jobs and load jobs fill the cache instead of computing it.
        repetitions: of which the median is taken.
        progress: called with a few words before each part.
    """

    def __init__(
        self, llm: Any, side: str, prompts: Prompts, *, filled: bool, repetitions: int = 3, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        self.llm, self.side, self.prompts, self.filled, self.repetitions, self.progress = llm, side, prompts, filled, repetitions, progress
        self._prefilled = False

    # ------------------------------------------------------------------ asking the engine
    def facts(self) -> dict[str, Any]:
        """Facts of `kvskim.bench.e2e_probe.engine_facts`, and ``kv_blocks``, ``block_tokens``, ``async_scheduling``."""
        config = self.llm.llm_engine.vllm_config
        found: dict[str, Any] = self._ask("kvskim_bench_facts")
        sizes = dict(kv_blocks=int(config.cache_config.num_gpu_blocks), block_tokens=int(config.cache_config.block_size))
        return {**found, **sizes, "async_scheduling": bool(config.scheduler_config.async_scheduling)}

    def _ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """The answer of the first worker: of several, each has an equal part of every layer, and its part is what its GPU reads."""
        answer: dict[str, Any] = json.loads(self.llm.collective_rpc(method, args=arguments)[0])
        return answer

    def _check_room(self, job: Job, requests: int) -> None:
        cache = self.llm.llm_engine.vllm_config.cache_config
        needed = requests * -(-job.tokens // int(cache.block_size))
        # vLLM keeps one block for itself.
        if needed > int(cache.num_gpu_blocks) - 1:
            raise KvskimError(f"{job.title} needs {needed} blocks of KV cache, and the engine has {cache.num_gpu_blocks}: give a smaller case or more memory")

    def _parameters(self, tokens: int, filled_tokens: int = 0, **more: Any) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"filled_tokens": filled_tokens}} if self.filled else None
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra, **more)

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int, filled_tokens: int = 0) -> Any:
        return self.llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], self._parameters(tokens, filled_tokens), use_tqdm=False)

    # ------------------------------------------------------------------ jobs
    def run(self, job: Job) -> dict[str, Any]:
        """The figures of a job; times in milliseconds."""
        return {"decode": self.decode, "ttft": self.ttft, "load": self.load, "profile": self.profile}[job.kind](job)

    def attempt(self, job: Job) -> tuple[dict[str, Any] | None, str, bool]:
        """The figures of a job or None, why there are none, and whether the engine can go on: after an error of its own it may be dead or busy."""
        try:
            return self.run(job), "", True
        except KvskimError as error:
            return None, str(error), True
        except Exception as error:  # whatever vLLM raises belongs into the row of this job, and must not hide the others
            return None, f"{type(error).__name__}: {error}", False

    def calibrate(self) -> None:
        """Let an engine with real weights calibrate on its first prompts, where it has no calibration; raises KvskimError where it does not come to that."""
        if self.side == DENSE:
            return
        length = min(WARM_PROMPT, int(self.llm.llm_engine.vllm_config.model_config.max_model_len) - CALIBRATION_STEPS)
        for _ in range(CALIBRATION_ROUNDS):
            if self._ask("kvskim_bench_activity")["calibrated"]:
                return
            self.progress("calibrating on first prompts")
            self._generate([self.prompts.take(length)], CALIBRATION_STEPS)
        if not self._ask("kvskim_bench_activity")["calibrated"]:
            raise KvskimError("the engine did not calibrate on its first prompts, so no step is sparse: make a calibration with `kvskim calibrate`")

    def decode(self, job: Job) -> dict[str, Any]:
        """Time per token: the difference of two output lengths, so that what happens before the first token and at the start of a batch cancels."""
        self._check_room(job, job.batch)
        short, long = job.output_lengths
        prompts = [self.prompts.take(job.context - long) for _ in range(job.batch)]
        filled = job.context if self.filled else 0
        self.progress("warming up")
        self._decode_seconds(prompts, 8, filled, together=False)
        runs = []
        for repetition in range(self.repetitions):
            self.progress(f"repetition {repetition + 1} of {self.repetitions}")
            seconds = self._decode_seconds(prompts, short, filled), self._decode_seconds(prompts, long, filled)
            runs.append((seconds[1] - seconds[0]) / EXTRA_STEPS * 1e3)
        tpot = statistics.median(runs)
        return dict(tpot_ms=tpot, runs_ms=runs, tokens_s=job.batch / tpot * 1e3, activity=self._ask("kvskim_bench_activity"))

    def _decode_seconds(self, prompts: Sequence[Sequence[int]], tokens: int, filled: int, *, together: bool = True) -> float:
        """Seconds from the moment when all requests have their first token to the last token of the last one."""
        times = [output.metrics for output in self._generate(prompts, tokens, filled)]
        first, last = max(t.first_token_ts for t in times), max(t.last_token_ts for t in times)
        if together and min(t.last_token_ts for t in times) <= first:
            raise KvskimError("the requests of the batch did not run together: some had ended before the last one started")
        return float(last - first)

    def profile(self, job: Job) -> dict[str, Any]:
        """Where the time of a decode step goes, of the same requests as `decode`; see `kvskim.bench.step_profile.step_profile`."""
        self._check_room(job, job.batch)
        long = job.output_lengths[1]
        self.progress("recording")
        self._ask("kvskim_bench_profile", job.batch)
        self._generate([self.prompts.take(job.context - long) for _ in range(job.batch)], long, job.context if self.filled else 0)
        found = self._ask("kvskim_bench_profile_result")
        if "error" in found:
            raise KvskimError(found["error"])
        return found

    def ttft(self, job: Job) -> dict[str, Any]:
        """Time from handing over a prompt of new tokens to its only output token, the prefill computed."""
        self._check_room(job, 1)
        self._warm_prefill(job)
        runs = []
        for repetition in range(self.repetitions):
            self.progress(f"repetition {repetition + 1} of {self.repetitions}")
            prompt = self.prompts.take(job.context)
            start = time.perf_counter()
            self._generate([prompt], 1)
            runs.append((time.perf_counter() - start) * 1e3)
        return dict(ttft_ms=statistics.median(runs), runs_ms=runs)

    def _warm_prefill(self, job: Job) -> None:
        if not self._prefilled:
            self.progress("warming up the prefill")
            self._generate([self.prompts.take(min(job.context, WARM_PROMPT))], 1)
            self._prefilled = True

    def load(self, job: Job) -> dict[str, Any]:
        """Requests that come and go; see `kvskim.bench.e2e_load`."""
        from vllm.sampling_params import RequestOutputKind

        self._check_room(job, 1)
        self._warm_prefill(job)
        filled = 0 if job.prefill < 0 or not self.filled else job.context - job.prefill
        engine = self.llm.llm_engine

        def run(name: str, part: Job) -> list[Trace]:
            self.progress(f"making prompts of {part.requests} requests")
            prompts = [self.prompts.take(part.context) for _ in range(part.requests)]

            def submit(index: int, output: int) -> str:
                parameters = self._parameters(output, filled, output_kind=RequestOutputKind.DELTA)
                engine.add_request(f"{name}-{index:06d}", {"prompt_token_ids": prompts[index]}, parameters)
                return f"{name}-{index:06d}"

            self.progress(f"{name} of {part.requests} requests")
            return drive(engine, part, submit)

        # Steps that mix prefill and decode, of which the engine has run none yet, load kernels and compile some.
        shortest, longest = (min(bound, job.longest) for bound in WARM_OUTPUT)
        context = job.context if filled else min(job.context, WARM_PROMPT)
        few = replace(job, batch=min(job.batch, WARM_REQUESTS), context=context, requests=2 * WARM_REQUESTS, shortest=shortest, longest=longest, rate=0.0)
        run("warm-up", few)
        return dict(summary(job, run("measure", job)))
