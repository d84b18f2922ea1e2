"""Engines with values, or keys and values, in host memory start as the documentation says it, with vLLM's defaults for everything else, and answer.

    KVSKIM_CONFIG='{"variant": "mem-kv"}' vllm serve MODEL

is what this does, without the server: nothing but the model and that variable is given. So vLLM profiles its memory, takes most of the GPU, schedules
asynchronously, keeps prefixes, and its engine is a process of its own. The prompts are long enough for kvskim to calibrate itself. Engines start one
after the other, and nothing else may be on the GPU. What an engine has reached is printed in any case: also of one that is not done in time, and when the
script itself is told to end.

    python tests/gpu/vllm/tier_start.py --model /tmp/smollm2
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import exit_status, table, text_ids

BEGUN = time.monotonic()
LAST = 4.0
"""Seconds for what is printed at the end."""
ROUNDS = 2
"""Of the prompts: in the second they hit the prefix cache."""
COLUMNS = ("start", "blocks", "tokens", "hits", "seconds")
SAID = ("host memory", "page-locked", "hot cache", "for prompts", "are made", "calibration", "Available KV cache memory", "Overriding")


def work(spec_file: str, result_file: str) -> None:
    """One engine; what it has reached so far is in the file at any time."""
    spec = json.loads(Path(spec_file).read_text())
    from vllm import LLM, SamplingParams

    reached: dict[str, Any] = {}

    def reach(**more: Any) -> None:
        reached.update(more)
        # Written aside, so that nobody reads a half.
        aside = Path(f"{result_file}.new")
        aside.write_text(json.dumps(reached))
        aside.replace(result_file)

    started = time.perf_counter()
    llm = LLM(spec["model"])
    reach(start=time.perf_counter() - started, blocks=int(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks or 0))
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    count = hits = 0
    for _ in range(ROUNDS):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in spec["prompts"]], params, use_tqdm=False)
        count += sum(len(output.outputs[0].token_ids) for output in outputs)
        hits += sum((output.num_cached_tokens or 0) > 0 for output in outputs)
        reach(tokens=count, hits=hits)
    reach(seconds=time.perf_counter() - started)


def engine(spec: Path, result: Path, log: Path, environment: dict[str, str], end: float) -> tuple[dict[str, Any], str | None]:
    """One engine in a process of its own, whose children end with it: what it has reached, and what is wrong with that."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(spec), str(result)], env=environment, stdout=output, stderr=output, start_new_session=True,
        )
    wrong = None
    try:
        process.wait(timeout=max(1.0, end - time.monotonic()))
    except (subprocess.TimeoutExpired, ToldToEndError):
        wrong = "was not done in time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if wrong is None and process.returncode:
        wrong = f"failed with status {process.returncode}"
    return json.loads(result.read_text()) if result.is_file() else {}, wrong


class ToldToEndError(Exception):
    """By whoever started the script."""


told_to_end: list[int] = []


def end_now(number: int, _: Any) -> None:
    told_to_end.append(number)
    raise ToldToEndError


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", required=True, help="Hugging Face folder of SmolLM2-135M (see convert.py)")
    arguments.add_argument("--variants", default="mem-kv,mem-v", help="comma list")
    arguments.add_argument("--seconds", type=float, default=200.0, help="most time for all of it, from the start of the script on")
    a = arguments.parse_args()
    ids = text_ids(a.model)
    prompts = [ids[4000 * i : 4000 * i + n] for i, n in enumerate((6000, 3000, 5000, 700))]
    end, rows, problems = BEGUN + a.seconds - LAST, [], []
    signal.signal(signal.SIGTERM, end_now)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ToldToEndError):
        for variant in a.variants.split(","):
            if told_to_end or time.monotonic() >= end:
                problems.append(f"{variant}: there was no time left to start it")
                continue
            spec, result, log = (Path(folder, f"{kind}-{variant}") for kind in ("spec", "result", "log"))
            spec.write_text(json.dumps(dict(model=a.model, prompts=prompts)))
            environment = {**os.environ, "KVSKIM_CONFIG": json.dumps({"variant": variant}), "KVSKIM_CACHE_DIR": str(Path(folder, f"cache-{variant}"))}
            environment.pop("KVSKIM_DISABLE", None)
            environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
            reached, wrong = engine(spec, result, log, environment, end)
            lines = log.read_text(errors="replace").splitlines()
            rows.append([variant, *(f"{reached[name]:.0f}" if name in reached else "" for name in COLUMNS)])
            print("\n".join(line for line in lines if any(words in line for words in SAID)), flush=True)
            if wrong is not None:
                problems.append(f"{variant}: {wrong}")
                print(f"--- last lines of '{variant}'", *lines[-30:], sep="\n", flush=True)
                continue
            if not any(f"variant {variant}" in line for line in lines):
                problems.append(f"{variant}: kvskim did not say that it runs")
            if reached["tokens"] != ROUNDS * 64 * len(prompts):
                problems.append(f"{variant}: {reached['tokens']} tokens came")
            if reached["hits"] < len(prompts):
                problems.append(f"{variant}: prompts that came before did not hit the prefix cache")
    print(table(["variant", "start s", "blocks", "tokens", "hits", "all s"], rows))
    return exit_status(problems)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
        sys.exit(0)
    sys.exit(main())
