"""What values, or keys and values, in host memory cost and save: time per token beside variant ``fast``, blocks, hit rate, bytes over the bus, GPU memory.

One engine after the other, each with the same memory for its cache: what the hot cache takes comes off the memory for blocks. A geometry runs without
weights and with a filled cache; there selections change from step to step as they do with random keys. A folder with weights prefills a text.

    python tests/gpu/vllm/tier_speed.py --variant fast,mem-kv
    python tests/gpu/vllm/tier_speed.py --model /tmp/smollm2 --cases 1x8K,8x4K --memory 2 --host 8
    python tests/gpu/vllm/tier_speed.py --model glm4-9b-1m --cases 1x1M --variant fast,mem-kv --memory 12 --fast-memory 90 --hot 6 --host 90
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from common import ended, print_memory_lines, table

GIB = 2**30
HOT = {"mem-v": 0.012, "mem-kv": 0.5}
"""Share of ``--memory`` that is hot cache where ``--hot`` is not given, as in an engine."""


def work(spec_file: str, result_file: str) -> None:
    """One engine."""
    spec = json.loads(Path(spec_file).read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("KVSKIM_DISABLE", None)

    import torch

    from kvskim.bench.e2e_engine import EngineBench, Prompts
    from kvskim.bench.e2e_plan import KVSKIM, Job
    from kvskim.engines.vllm import probe, sampler
    from kvskim.engines.vllm.check import attention_backend

    backend = attention_backend(spec["llm"]["model"], spec["settings"])
    from vllm import LLM

    text = []
    if spec["real"]:
        from common import text_ids

        text = text_ids(spec["llm"]["model"])
    started = time.perf_counter()
    llm = LLM(**spec["llm"], attention_backend=backend, additional_config={"kvskim": spec["settings"]})
    start = time.perf_counter() - started
    state = probe.state_of(llm)
    assert state is not None
    prompts = Prompts(int(llm.llm_engine.vllm_config.model_config.get_vocab_size()), text)
    bench = EngineBench(llm, KVSKIM, prompts, filled=not spec["real"], repetitions=spec["repetitions"])
    bench.calibrate()
    blocks = int(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    layers = list(state.layers.values())
    bound = [getattr(layer, "kv_cache", None) for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()]
    cache = sum(tensor.nbytes for tensor in bound if isinstance(tensor, torch.Tensor))
    hot = sum(layer.tier.hot.nbytes for layer in layers if layer.tier is not None)
    host = sum(layer.tier.host.nbytes for layer in layers if layer.tier is not None)
    rows = []

    def fetched_in(tokens: int, job: Job, ids: list[list[int]]) -> torch.Tensor:
        before = sampler.fetched(layers, torch.device("cuda"))
        bench._decode_seconds(ids, tokens, 0 if spec["real"] else job.context)
        return sampler.fetched(layers, torch.device("cuda")) - before

    for key in spec["jobs"]:
        job = Job(**key)
        try:
            value = bench.decode(job)
            # As with times: what only the longer outputs fetched is what a step fetches once the hot cache is warm.
            short, long = job.output_lengths
            ids = [prompts.take(job.context - long) for _ in range(job.batch)]
            selected, missing, homeless, nbytes = (-fetched_in(short, job, ids) + fetched_in(long, job, ids)).tolist()
        except Exception as error:  # the other cases are worth having
            rows.append(dict(job=key, error=f"{type(error).__name__}: {error}"))
            continue
        activity = value["activity"]
        rows.append(dict(
            job=key, tpot_ms=value["tpot_ms"], runs=value["runs_ms"], attended=activity["attended"] / max(1, activity["total"]),
            hit=1 - missing / selected if selected else None, homeless=homeless / selected if selected else None,
            token_bytes=nbytes / (long - short) / job.batch if selected else None,
        ))
    room = 0 if state.host_cache is None else state.host_cache.room_bytes
    result = dict(start=start, blocks=blocks, cache=cache, hot=hot, host=host, room=room, kernels=state.kernels.kernels, rows=rows)
    Path(result_file).write_text(json.dumps(result))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="llama3.1-8b", help="a geometry of `kvskim bench e2e`, or a folder with weights")
    arguments.add_argument("--variant", default="fast,mem-v,mem-kv", help="comma list")
    arguments.add_argument("--cases", default="1x128K,8x32K")
    arguments.add_argument("--memory", type=float, default=40.0, help="GiB of GPU memory for blocks and hot cache together")
    arguments.add_argument("--fast-memory", type=float, default=None, help="the same of variant fast, where it needs more")
    arguments.add_argument("--hot", type=float, default=None, help="GiB of hot cache")
    arguments.add_argument("--host", type=float, default=60.0, help="GiB of host memory")
    arguments.add_argument("--settings", default=None, help="more settings as JSON; for a geometry 400 pages if nothing is said")
    arguments.add_argument("--repetitions", type=int, default=2)
    arguments.add_argument("--seconds", type=float, default=540.0, help="most time for all engines")
    a = arguments.parse_args()

    from kvskim.bench.e2e_plan import decode_jobs, engine_arguments, find_model
    from kvskim.bench.geometries import write_geometry
    from kvskim.bench.random_calibration import write_random_calibration

    real = Path(a.model, "config.json").is_file()
    model, jobs = find_model(a.model, real=real), decode_jobs(a.cases, None, None)
    end, results, problems = time.monotonic() + a.seconds, {}, []
    with tempfile.TemporaryDirectory() as name:
        folder = model.folder or write_geometry(model.name, Path(name))
        settings = json.loads(a.settings) if a.settings else {} if real else {"rule": "budget", "budget_pages": 400}
        if not real and settings.get("selector", "sketch") == "sketch":
            write_random_calibration(folder, Path(name, "calibration.safetensors"))
            settings["calibration"] = str(Path(name, "calibration.safetensors"))
        for variant in a.variant.split(","):
            memory = a.fast_memory if variant == "fast" and a.fast_memory else a.memory
            own = {"variant": variant, **settings}
            if variant != "fast":
                own |= {"hot_cache_gib": a.hot or HOT[variant] * memory, "host_memory_gib": a.host}
                memory -= own["hot_cache_gib"]
            llm = engine_arguments(jobs, real=real, memory=0.9, blocks=None)
            llm |= dict(model=str(folder), kv_cache_memory_bytes=int(memory * GIB), seed=0)
            spec, result, log = (Path(name, f"{kind}-{variant}") for kind in ("spec", "result", "log"))
            spec.write_text(json.dumps(dict(llm=llm, settings=own, real=real, repetitions=a.repetitions, jobs=[asdict(job) for job in jobs])))
            with log.open("w") as output:
                process = subprocess.Popen([sys.executable, __file__, "--worker", str(spec), str(result)], stdout=output, stderr=subprocess.STDOUT)
                outcome = ended(variant, process, result, log, end - time.monotonic(), problems)
            if outcome is not None:
                results[variant] = outcome
            if variant != "fast":
                print_memory_lines(log)
    header = ["engine", "start s", "blocks", "GPU GiB: cache", "hot", "prompts", "sum", "host GiB"]
    print(table(header, [
        [
            variant, f"{r['start']:.0f}", str(r["blocks"]), *(f"{r[part] / GIB:.2f}" for part in ("cache", "hot", "room")),
            f"{(r['cache'] + r['hot'] + r['room']) / GIB:.2f}", f"{r['host'] / GIB:.2f}",
        ]
        for variant, r in results.items()
    ]))
    print()
    header = ["case", "engine", "kernels", "ms/token", "of fast", "attended", "hit", "homeless", "MB/token over the bus", "runs"]
    rows = []
    for i, job in enumerate(jobs):
        fast = results.get("fast", {}).get("rows", [{}] * len(jobs))[i].get("tpot_ms")
        for variant, r in results.items():
            row = r["rows"][i]
            if "error" in row:
                rows.append([job.title, variant, r["kernels"], row["error"]])
                rows[-1] += [""] * (len(header) - len(rows[-1]))
                problems.append(f"{job.title} of {variant} gave no time")
                continue
            percent = [f"{row[part]:.1%}" if row[part] is not None else "" for part in ("attended", "hit", "homeless")]
            moved = f"{row['token_bytes'] / 1e6:.2f}" if row["token_bytes"] is not None else ""
            ratio = f"{row['tpot_ms'] / fast:.2f}x" if fast else ""
            runs = " ".join(f"{run:.2f}" for run in row["runs"])
            rows.append([job.title, variant, r["kernels"], f"{row['tpot_ms']:.2f}", ratio, *percent, moved, runs])
    print(table(header, rows))
    for problem in problems:
        print(f"FAIL: {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
        sys.exit(0)
    sys.exit(main())
