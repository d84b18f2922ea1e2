"""Engines with values, or keys and values, in host memory start as the documentation says it, with vLLM's defaults for everything else, and answer.

    KVSKIM_CONFIG='{"variant": "mem-kv"}' vllm serve MODEL

is what this does, without the server: nothing but the model and that variable is given. So vLLM profiles its memory, takes most of the GPU, schedules
asynchronously, keeps prefixes, and its engine is a process of its own. The prompts are long enough for kvskim to calibrate itself. Engines start one
after the other, and nothing else may be on the GPU.

    python tests/gpu/vllm/tier_start.py --model /tmp/smollm2
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ended, exit_status, table, text_ids

SAID = ("host memory", "page-locked", "hot cache", "are made", "calibration", "Available KV cache memory", "Overriding")


def work(spec_file: str, result_file: str) -> None:
    """One engine."""
    spec = json.loads(Path(spec_file).read_text())
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(spec["model"])
    start = time.perf_counter() - started
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    tokens, hits = [], 0
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in spec["prompts"]], params, use_tqdm=False)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
        hits += sum((output.num_cached_tokens or 0) > 0 for output in outputs)
    blocks = int(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks or 0)
    Path(result_file).write_text(json.dumps(dict(start=start, blocks=blocks, hits=hits, tokens=tokens)))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", required=True, help="Hugging Face folder of SmolLM2-135M (see convert.py)")
    arguments.add_argument("--variants", default="mem-kv,mem-v", help="comma list")
    arguments.add_argument("--seconds", type=float, default=200.0, help="most time for all engines")
    a = arguments.parse_args()
    ids = text_ids(a.model)
    prompts = [ids[4000 * i : 4000 * i + n] for i, n in enumerate((6000, 3000, 5000, 700))]
    end, rows, problems = time.monotonic() + a.seconds, [], []
    with tempfile.TemporaryDirectory() as folder:
        for variant in a.variants.split(","):
            spec, result, log = (Path(folder, f"{kind}-{variant}") for kind in ("spec", "result", "log"))
            spec.write_text(json.dumps(dict(model=a.model, prompts=prompts)))
            environment = {**os.environ, "KVSKIM_CONFIG": json.dumps({"variant": variant}), "KVSKIM_CACHE_DIR": str(Path(folder, f"cache-{variant}"))}
            environment.pop("KVSKIM_DISABLE", None)
            environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
            with log.open("w") as output:
                process = subprocess.Popen([sys.executable, __file__, "--worker", str(spec), str(result)], env=environment, stdout=output, stderr=output)
                outcome = ended(variant, process, result, log, end - time.monotonic(), problems)
            lines = log.read_text(errors="replace").splitlines()
            print("\n".join(line for line in lines if any(words in line for words in SAID)), flush=True)
            if outcome is None:
                continue
            count = sum(len(answer) for answers in outcome["tokens"] for answer in answers)
            rows.append([variant, f"{outcome['start']:.0f}", str(outcome["blocks"]), str(count), str(outcome["hits"])])
            if not any(f"variant {variant}" in line for line in lines):
                problems.append(f"{variant}: kvskim did not say that it runs")
            if count != 2 * 64 * len(prompts):
                problems.append(f"{variant}: {count} tokens came")
            if outcome["hits"] < len(prompts):
                problems.append(f"{variant}: prompts that came before did not hit the prefix cache")
    print(table(["variant", "start s", "blocks", "tokens", "hits"], rows))
    return exit_status(problems)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
        sys.exit(0)
    sys.exit(main())
