"""The truth check: one engine per process, run on the same prompts with full attention, with all pages selected, and with the rule.

``python -m kvskim.engines.vllm.check SPEC RESULT`` runs one engine as the JSON file SPEC says, and writes the JSON file RESULT.
`run_engine` starts such a process, and `compare` says how well two results agree.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvskim.config import publish
from kvskim.errors import KvskimError

ALL_PAGES: dict[str, Any] = {"rule": "budget", "budget": 1.0, "full_pages": 0}
"""Settings under which scoring and selection run, and every page is selected."""
WARM_STEPS = 128
"""Tokens decoded at a time to let a calibration from first prompts come to its end: it fits one layer in a step."""
LIKELIEST = 3
"""Likeliest tokens that are kept for each place, to tell a near tie from an error."""


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
        timeout: seconds.

    Returns:
        ``outputs`` (tokens, logprobs, cached_tokens of each prompt), ``start_seconds``, ``seconds``, and of a sparse engine ``activity`` (attended,
        total, covered, count), ``ready``, ``layers``.

    Raises:
        KvskimError: the engine failed; the message ends with what it printed last.
    """
    spec = dict(
        llm=dict(llm), prompts=[list(p) for p in prompts], settings=None if settings is None else dict(settings), max_tokens=max_tokens, batches=list(batches),
        warm_prompt=list(warm_prompt), activity=activity,
    )
    with tempfile.TemporaryDirectory() as folder:
        spec_file, result_file = Path(folder, "spec.json"), Path(folder, "result.json")
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", "kvskim.engines.vllm.check", str(spec_file), str(result_file)]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=timeout)
        except subprocess.TimeoutExpired as expired:
            printed = (expired.stdout or b"").decode(errors="replace") if isinstance(expired.stdout, bytes) else expired.stdout or ""
            raise KvskimError(f"the engine was not done after {timeout:g} seconds; its last lines:\n{printed[-6000:]}") from None
        if done.returncode or not result_file.is_file():
            raise KvskimError(f"the engine stopped with exit status {done.returncode}; its last lines:\n{done.stdout[-6000:]}")
        result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    result["log"] = [line for line in done.stdout.splitlines() if "kvskim" in line]
    return result


def has_latent_attention(model: str) -> bool:
    """Whether the model in this folder has MLA; False where there is no ``config.json`` to tell."""
    file = Path(model, "config.json")
    if not file.is_file():
        return False
    settings = json.loads(file.read_text(encoding="utf-8"))
    return bool(settings.get("text_config", settings).get("kv_lora_rank"))


def attention_backend(model: str, settings: Mapping[str, Any] | None) -> str:
    """Register kvskim with the vLLM of this process, and name the backend for a model folder; settings None: vLLM's own FlashAttention."""
    from kvskim.engines.vllm import plugin

    latent = has_latent_attention(model)
    if latent and settings is not None:
        # There kvskim is no backend by a name of its own: it takes the place of FlashAttention.
        publish("KVSKIM_CONFIG", json.dumps(dict(settings)))
    # vLLM calls it too, where the package is installed and not only on the path.
    plugin.register_plugin()
    return "FLASH_ATTN_MLA" if latent else "FLASH_ATTN" if settings is None else "CUSTOM"


def _run(spec: Mapping[str, Any]) -> dict[str, Any]:
    sparse = spec["settings"] is not None
    # Read by vLLM and by kvskim's plugin, before either is imported.
    publish("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    publish("KVSKIM_DISABLE", "0" if sparse else "1")
    backend = attention_backend(spec["llm"]["model"], spec["settings"])
    from vllm import LLM, SamplingParams

    arguments = dict(spec["llm"], attention_backend=backend)
    if sparse:
        arguments["additional_config"] = {"kvskim": spec["settings"]}
    started = time.perf_counter()
    llm = LLM(**arguments)
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - started}
    params = SamplingParams(temperature=0, max_tokens=spec["max_tokens"], ignore_eos=True, detokenize=False, logprobs=LIKELIEST)
    from kvskim.engines.vllm import probe, report

    state = probe.state_of(llm) if sparse else None
    if state is not None and spec["warm_prompt"]:
        warm = SamplingParams(temperature=0, max_tokens=WARM_STEPS, ignore_eos=True, detokenize=False)
        for _ in range(8):
            if state.calibrator is None:
                break
            probe.generate(llm, [list(spec["warm_prompt"])], warm)
    total = report.Activity()

    def measure() -> None:
        nonlocal total
        assert state is not None
        for layer in (report.last_step(state) or {}).values():
            total += layer

    prompts = spec["prompts"]
    after_step = measure if state is not None and spec["activity"] else None
    outputs = []
    started = time.perf_counter()
    for size in spec["batches"]:
        part = size or max(1, len(prompts))
        for first in range(0, len(prompts), part):
            outputs += probe.generate(llm, prompts[first : first + part], params, after_step)
    result["seconds"] = time.perf_counter() - started
    result["outputs"] = [asdict(output) for output in outputs]
    if state is not None:
        ready = state.ready
        result.update(ready=bool(ready is not None and ready.item()), layers=len(state.layers), kernels=state.kernels.kernels, activity=asdict(total))
    return result


def main(arguments: Sequence[str]) -> None:
    """Run the engine of a spec file and write the result file."""
    spec = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    Path(arguments[1]).write_text(json.dumps(_run(spec)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
