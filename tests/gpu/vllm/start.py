"""How long an engine takes to start, and its first tokens: vLLM's FLASH_ATTN and kvskim, each with empty caches (cold) and again (warm).

Cold: nothing compiled but a library of kvskim's that a wheel would carry (`python -m kvskim.ops.cuda.build --prebuilt` makes it), no calibration kept.
Warm: the same once more in a new process. A start is the time from the start of the process until the
engine takes requests. Then two long prompts are answered, one after the other, and the time from each token to the next is taken. A cold kvskim
calibrates on the first prompt, which is shown and not judged. Fails when kvskim's start takes more than --cold seconds (warm: --warm) longer than
the dense one, or when one of the first tokens comes --stall times later than usual and later than any in the dense engine; also when the time
(--limit) is over, with what was measured until then. The GPU and the processor must have nothing else to do, so the engines start one after the other:
about 60 s each with empty caches, half of it vLLM's own compilation, and 25 s without.

    python tests/gpu/vllm/start.py --model /tmp/smollm2
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import engine, exit_status, parser, table, text_ids

TOKENS = (64, 21)
"""Of each prompt: calibration fits one layer in a step, so the first one lasts until it has come to its end."""
CACHES = ("KVSKIM_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
SPARSE = {"full_pages": 0}
"""Short requests are sparse too, or this model's longest ones would be attended whole."""
RUNS = [("dense", "cold"), ("kvskim", "cold"), ("dense", "warm"), ("kvskim", "warm")]

Results = dict[str, dict[str, Any]]
"""What `run_worker` found, by side and temperature: ``dense cold``."""


def run_worker(spec_file: str) -> None:
    """One engine in this process: its start, then the gaps between the first tokens of each prompt, in milliseconds."""
    spec = json.loads(Path(spec_file).read_text(encoding="utf-8"))
    settings = spec["settings"]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["KVSKIM_DISABLE"] = "0" if settings is not None else "1"
    from kvskim.engines.vllm.check import attention_backend

    backend = attention_backend(spec["llm"]["model"], settings)
    from vllm import LLM, SamplingParams

    arguments = dict(spec["llm"], attention_backend=backend)
    if settings is not None:
        arguments["additional_config"] = {"kvskim": settings}
    imported = time.time()
    llm = LLM(**arguments)
    ready = time.time()
    gaps, first = [], []
    for number, (prompt, tokens) in enumerate(zip(spec["prompts"], TOKENS, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        asked, times, seen = time.perf_counter(), [], 0
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                if len(output.outputs[0].token_ids) > seen:
                    seen = len(output.outputs[0].token_ids)
                    times.append(time.perf_counter())
        if len(times) != tokens:
            raise RuntimeError(f"{tokens} tokens came in {len(times)} steps")
        first.append(round(1000 * (times[0] - asked), 2))
        gaps.append([round(1000 * (b - a), 2) for a, b in itertools.pairwise(times)])
    result: dict[str, Any] = {"start": round(ready - spec["started"], 2), "engine": round(ready - imported, 2), "first": first, "gaps": gaps}
    if settings is not None:
        from kvskim.engines.vllm import probe

        state = probe.state_of(llm)
        assert state is not None
        result.update(calibrated=state.calibrator is None, kernels=state.kernels.reason)
    Path(spec["result"]).write_text(json.dumps(result), encoding="utf-8")


def run(folder: Path, llm: dict[str, Any], prompts: list[list[int]], settings: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
    """A worker with its caches in ``folder``. Raises TimeoutError when it was not done after ``timeout`` seconds, RuntimeError when it failed."""
    from kvskim.engines.vllm.check import ending

    spec, result, log = folder / "spec.json", folder / "result.json", folder / "log"
    result.unlink(missing_ok=True)
    environment = dict(os.environ, **{name: str(folder / name.lower()) for name in CACHES})
    spec.write_text(json.dumps(dict(llm=llm, prompts=prompts, settings=settings, result=str(result), started=time.time())), encoding="utf-8")
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(spec)], env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(max(timeout, 0.1))
        except subprocess.TimeoutExpired:
            pass
        finally:
            # What compiles beside it too, and whether it is done or not.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            stopped = process.wait() == -signal.SIGKILL
    printed = log.read_text(encoding="utf-8", errors="replace")
    if stopped:
        raise TimeoutError(f"was not done when the time was over{ending(printed)[:4000]}")
    if process.returncode or not result.is_file():
        raise RuntimeError(f"stopped with exit status {process.returncode}{ending(printed)}")
    return dict(json.loads(result.read_text(encoding="utf-8")))


def line(label: str, result: dict[str, Any]) -> str:
    """One run in one line."""
    parts = [
        f"prompt {number + 1}: first token {result['first'][number]:.0f} ms, then {statistics.median(gaps):.1f} ms, at most {max(gaps):.1f} ms"
        for number, gaps in enumerate(result["gaps"])
    ]
    return f"{label}: start {result['start']:.1f} s, of it the engine {result['engine']:.1f} s; " + "; ".join(parts)


def measure(a: argparse.Namespace, folder: Path, results: Results) -> list[str]:
    """Fill ``results``, one run after the other until the time is over; what went wrong."""
    end = time.monotonic() + a.limit
    ids = text_ids(a.model)
    prompts = [ids[: a.length], ids[20_000 : 20_000 + a.length]]
    llm = engine(a.model, "full", enable_prefix_caching=True)
    # Files that all runs read, vLLM's libraries above all, are in the memory of the machine before the first of them is timed.
    warm_up = [sys.executable, "-c", "import torch, vllm; torch.zeros(1, device='cuda')"]
    subprocess.run(warm_up, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=a.limit)
    for side, temperature in RUNS:
        label = f"{side} {temperature}"
        place = folder / side
        place.mkdir(exist_ok=True)
        settings = {**SPARSE, "kernels": a.kernels} if side == "kvskim" else None
        try:
            results[label] = run(place, llm, prompts, settings, end - time.monotonic())
        except (TimeoutError, RuntimeError) as error:
            return [f"{label} {error}"]
        print(line(label, results[label]), flush=True)
    return []


def judge(a: argparse.Namespace, results: Results) -> tuple[list[list[str]], list[str]]:
    """Rows of the table, and what is wrong with the runs that are there."""
    rows, problems = [], []
    for label, result in results.items():
        side, temperature = label.split()
        for number, gaps in enumerate(result["gaps"]):
            usual, largest = statistics.median(gaps), max(gaps)
            calibrates = label == "kvskim cold" and number == 0
            dense = max(results[f"dense {temperature}"]["gaps"][number])
            if side == "kvskim" and not calibrates and largest > max(a.stall * usual, dense):
                problems.append(f"{label}, prompt {number + 1}: a token came after {largest:.1f} ms; usual are {usual:.1f}, dense at most {dense:.1f} ms")
            rows.append([
                label, f"{result['start']:.1f}", f"{result['engine']:.1f}", f"{number + 1}{' (calibrates)' if calibrates else ''}",
                f"{result['first'][number]:.0f}", f"{gaps[0]:.1f}", f"{usual:.1f}", f"{largest:.1f}", f"{gaps.index(largest) + 2}",
            ])
    for temperature, most in (("cold", a.cold), ("warm", a.warm)):
        if f"kvskim {temperature}" not in results:
            continue
        longer = results[f"kvskim {temperature}"]["start"] - results[f"dense {temperature}"]["start"]
        print(f"{temperature} start: kvskim takes {longer:+.1f} s, allowed are {most:+.1f} s")
        if longer > most:
            problems.append(f"a {temperature} start takes {longer:.1f} s longer than the dense one")
    if "kvskim warm" in results and not results["kvskim warm"]["calibrated"]:
        problems.append("the warm engine had no calibration: its tokens were not sparse")
    return rows, problems


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--cold", type=float, default=20.0, help="seconds that a cold start may take longer than the dense one")
    arguments.add_argument("--warm", type=float, default=2.0, help="the same for a warm start")
    arguments.add_argument("--stall", type=float, default=5.0, help="a token that comes so many times later than the median of its run is a stall")
    arguments.add_argument("--length", type=int, default=7000, help="tokens of the prompt")
    arguments.add_argument("--limit", type=float, default=240.0, help="seconds for everything")
    a = arguments.parse_args()
    results: Results = {}
    with tempfile.TemporaryDirectory() as name:
        problems = measure(a, Path(name), results)
        compiled = any(Path(name, "kvskim", CACHES[0].lower()).glob("cuda/*.so"))
    print(json.dumps(results))
    rows, wrong = judge(a, results)
    source = "compiled in the cold start, as from a source checkout" if compiled else "found prebuilt, as in a wheel"
    for kernels in {result["kernels"] for result in results.values() if "kernels" in result}:
        print(f"kernels: {kernels}, {source}")
    print(table(["run", "start s", "engine s", "prompt", "first token ms", "second", "median", "largest", "at token"], rows))
    return exit_status(problems + wrong)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(sys.argv[2])
        sys.exit()
    sys.exit(main())
