"""The truth check: one engine per process, run on the same prompts with full attention, with all pages selected, and with the rule.

``python -m kvskim.engines.vllm.check SPEC RESULT`` runs one engine as the JSON file SPEC says, and writes the JSON file RESULT.
`run_engine` starts such a process, and `compare` says how well two results agree.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvskim.config import publish
from kvskim.engines.vllm.latent_model import backend_name, is_latent
from kvskim.errors import KvskimError

ALL_PAGES: dict[str, Any] = {"rule": "budget", "budget": 1.0, "full_pages": 0}
"""Settings under which scoring and selection run, and every page is selected."""
WARM_STEPS = 128
"""Tokens decoded at a time to let a calibration from first prompts come to its end: it fits one layer in a step."""
LIKELIEST = 10
"""Likeliest tokens that are kept for each place, to tell a near tie from an error. A model that is sure of nothing has more than a few near ties."""
LAST_CHARACTERS = 6000
"""Of what an engine printed, where it failed."""
_EXCEPTION = re.compile(
    # What torchrun, vLLM's workers and vLLM's log put before a line.
    r"(?:\[rank\d+\]: ?|\([^()]*pid=\d+\) ?|ERROR \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] ?)+)*"
    r"(?P<error>(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Expired)(?::.*)?)$"
)
_SECOND_HAND = re.compile("root cause|stack trace|EngineDeadError|initialization failed")
"""In messages of vLLM about a process that failed."""


def tokens_beside(max_tokens: int) -> int:
    """Positions that an engine of `run_engine` needs beside those of its longest prompt."""
    return max(max_tokens, WARM_STEPS) + 1


@dataclass(frozen=True)
class Agreement:
    """How far two runs of the same prompts agree.

    ``equal``: prompts with the same tokens throughout; ``tokens``: share of tokens before the first difference, over all prompts;
    ``logprob``: largest difference of a log-probability before the first difference; ``gap``: largest lead, in the log-probabilities of the first run,
    of its own token over the one that the second run chose at the first difference (infinite where that is not among its likeliest).
    """

    prompts: int
    equal: int
    tokens: float
    logprob: float
    gap: float


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Agreement:
    """Agreement of two results of `run_engine` on the same prompts; the first one is the reference."""
    equal = same = total = 0
    largest = gap = 0.0
    for x, y in zip(a["outputs"], b["outputs"], strict=True):
        length = max(len(x["tokens"]), len(y["tokens"]))
        prefix = next((i for i, (s, t) in enumerate(zip(x["tokens"], y["tokens"])) if s != t), min(len(x["tokens"]), len(y["tokens"])))
        equal += prefix == length
        same, total = same + prefix, total + length
        largest = max([largest, *(abs(p - q) for p, q in list(zip(x["logprobs"], y["logprobs"]))[:prefix])])
        if prefix < min(len(x["tokens"]), len(y["tokens"])):
            # JSON has made text of the tokens.
            other = x["likeliest"][prefix].get(str(y["tokens"][prefix]), -math.inf)
            gap = max(gap, x["logprobs"][prefix] - other)
    return Agreement(len(a["outputs"]), equal, same / max(1, total), largest, gap)


def run_engine(
    llm: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    settings: Mapping[str, Any] | None,
    max_tokens: int,
    batches: Sequence[int] = (0,),
    warm_prompt: Sequence[int] = (),
    activity: bool = False,
    environment: Mapping[str, str] | None = None,
    timeout: float = 900.0,
) -> dict[str, Any]:
    """Run one engine in a process of its own.

    Args:
        llm: arguments of `vllm.LLM`.
        prompts: token ids.
        settings: of kvskim, as the backend CUSTOM; None: vLLM's own FLASH_ATTN, kvskim disabled.
        max_tokens: tokens per prompt, greedy.
        batches: how many prompts are given to the engine at a time, 0 for all; more than one number: all prompts once for each of them.
        warm_prompt: a long prompt that is run first, until calibration is ready.
        activity: measure what is attended after each step.
        environment: variables for this process and those of its workers, beside the ones of the caller.
        timeout: seconds.

    Returns:
        ``outputs`` (tokens, logprobs, cached_tokens of each prompt), ``start_seconds``, ``seconds``, ``graphs`` (the name of vLLM's graph mode), and of a
        sparse engine ``activity`` (attended,
        total, covered, count), ``ready``, ``layers``, ``kernels``, of all its workers together.

    Raises:
        KvskimError: the engine failed; the message ends with what it printed last.
    """
    spec = dict(
        llm=dict(llm), prompts=[list(p) for p in prompts], settings=None if settings is None else dict(settings), max_tokens=max_tokens, batches=list(batches),
        warm_prompt=list(warm_prompt), activity=activity, environment=dict(environment or {}),
    )
    with tempfile.TemporaryDirectory() as folder:
        spec_file, result_file = Path(folder, "spec.json"), Path(folder, "result.json")
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", "kvskim.engines.vllm.check", str(spec_file), str(result_file)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
        try:
            printed, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _end_group(process)
            printed, _ = process.communicate()
            raise KvskimError(f"the engine was not done after {timeout:g} seconds{ending(printed)}") from None
        finally:
            _end_group(process)
        if process.returncode or not result_file.is_file():
            raise KvskimError(f"the engine stopped with exit status {process.returncode}{ending(printed)}")
        result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    result["log"] = [line for line in printed.splitlines() if "kvskim" in line]
    return result


def exception_line(printed: str) -> str | None:
    """The exception that ended a process, as its traceback states it: the last one that says more than that another process failed."""
    found = [match["error"] for match in map(_EXCEPTION.match, printed.splitlines()) if match]
    return next((error for error in reversed(found) if not _SECOND_HAND.search(error)), found[-1] if found else None)


def ending(printed: str) -> str:
    """For an error message: the last lines that an engine printed, and the exception among all its lines both before and after them."""
    error, last = exception_line(printed), printed[-LAST_CHARACTERS:]
    if len(last) < len(printed):
        last = last.partition("\n")[2] or last
    if error is None:
        return f"; its last lines:\n{last}"
    return f" ({error}); its last lines:\n{last.rstrip()}\n{error}"


def _end_group(process: subprocess.Popen[str]) -> None:
    """End the process and what is left of its workers, which hold the memory of their GPUs and its output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def has_latent_attention(model: str) -> bool:
    """Whether the model in this folder has MLA; False where there is no ``config.json`` to tell."""
    file = Path(model, "config.json")
    if not file.is_file():
        return False
    return is_latent(json.loads(file.read_text(encoding="utf-8")))


def attention_backend(model: str, settings: Mapping[str, Any] | None) -> str:
    """Register kvskim with the vLLM of this process, and name the backend for a model folder; settings None: vLLM's own FlashAttention."""
    from kvskim.engines.vllm import plugin

    latent = has_latent_attention(model)
    if latent and settings is not None:
        # There kvskim is no backend by a name of its own: it takes the place of FlashAttention.
        publish("KVSKIM_CONFIG", json.dumps(dict(settings)))
    # vLLM calls it too, where the package is installed and not only on the path.
    plugin.register_plugin()
    return "FLASH_ATTN" if settings is None and not latent else backend_name(latent=latent)


def _run(spec: Mapping[str, Any]) -> dict[str, Any]:
    sparse = spec["settings"] is not None
    # Read by vLLM and by kvskim's plugin, before either is imported.
    publish("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    publish("KVSKIM_DISABLE", "0" if sparse else "1")
    for name, value in spec["environment"].items():
        publish(name, value)
    backend = attention_backend(spec["llm"]["model"], spec["settings"])
    from vllm import LLM, SamplingParams

    arguments = dict(spec["llm"], attention_backend=backend)
    if sparse:
        # The engine may have several workers, each a process of its own.
        arguments.update(additional_config={"kvskim": spec["settings"]}, worker_extension_cls="kvskim.engines.vllm.probe.WorkerProbe")
    started = time.perf_counter()
    llm = LLM(**arguments)
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - started}
    # What vLLM has made of what it was asked for: a backend that can't be captured takes graphs away without an error.
    result["graphs"] = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name
    params = SamplingParams(temperature=0, max_tokens=spec["max_tokens"], ignore_eos=True, detokenize=False, logprobs=LIKELIEST)
    from kvskim.engines.vllm import probe, report

    if sparse and spec["warm_prompt"]:
        warm = SamplingParams(temperature=0, max_tokens=WARM_STEPS, ignore_eos=True, detokenize=False)
        for _ in range(8):
            if probe.look(llm).ready:
                break
            probe.generate(llm, [list(spec["warm_prompt"])], warm)
    total = report.Activity()

    def measure() -> None:
        nonlocal total
        total += probe.look(llm).activity

    prompts = spec["prompts"]
    after_step = measure if sparse and spec["activity"] else None
    outputs = []
    started = time.perf_counter()
    for size in spec["batches"]:
        part = size or max(1, len(prompts))
        for first in range(0, len(prompts), part):
            outputs += probe.generate(llm, prompts[first : first + part], params, after_step)
    result["seconds"] = time.perf_counter() - started
    result["outputs"] = [asdict(output) for output in outputs]
    if sparse:
        found = probe.look(llm)
        result.update(ready=found.ready, layers=len(found.layers), kernels=found.kernels, activity=asdict(total))
    return result


def main(arguments: Sequence[str]) -> None:
    """Run the engine of a spec file and write the result file."""
    spec = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    Path(arguments[1]).write_text(json.dumps(_run(spec)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
