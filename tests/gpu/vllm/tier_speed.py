"""What values, or keys and values, in host memory cost and save: time per token and tokens per second, blocks, hit rate, missing bytes, GPU memory.

Engines are given as VARIANT:GIB:CASES: fast, mem-v, mem-kv, or dense (vLLM's FLASH_ATTN), each with so many GiB of GPU memory for blocks and hot cache
together. All start at once, so their memory must fit side by side, and measure one after the other, while the others wait. A geometry runs without
weights and with a filled cache. A folder with weights prefills a text.

Ahead of that each engine computes a prompt of two full steps. "step" is what such a step takes of GPU memory at once beyond what stays, "room adds" what of
it would not be taken without the room for prompts, which "sum" counts, and "held" what PyTorch's allocator holds for it, unused blocks included.

Without weights the pages of a request look all alike to its queries, so every step selects the same ones and finds them hot. ``--missing`` takes a share of
the hot cache away in each step, at random: then that share of the selected pages is missing in the next one, as on real text. On SmolLM2 it is 14%,
6.6%, 3.4% and 2.0% with slots for 1.2, 2, 4 and 8 times a selection (`benchmarks/page_reuse.py`). What takes them away is a small kernel for each layer.
In captured steps it runs behind the copies of the layer, beside the layers that follow, which do not wait for it. There what is missing crosses the bus
twice: attention reads it where it is, and its copy is made afterwards.

    python tests/gpu/vllm/tier_speed.py fast:40:1x128K,8x32K mem-v:40:1x128K,8x32K --pages 32 --missing 1x128K=0.02,8x32K=0.066
    python tests/gpu/vllm/tier_speed.py --model glm4-9b-1m dense:12:4x32K mem-kv:12:1x1M,32x32K --hot 7 --host 81 --missing 1x1M=0.02,32x32K=0.12
    python tests/gpu/vllm/tier_speed.py --model /tmp/smollm2 fast:2:1x8K,8x4K mem-kv:2:1x8K,8x4K --host 8
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
from typing import Any

from common import ended, exit_status, print_memory_lines, table

GIB = 2**30
HOT = {"mem-v": 0.012, "mem-kv": 0.5}
"""Share of an engine's memory that is hot cache where ``--hot`` is not given, as in an engine."""


def work(spec_file: str, result_file: str) -> None:
    """One engine."""
    spec = json.loads(Path(spec_file).read_text())
    sparse = spec["settings"] is not None
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["KVSKIM_DISABLE"] = "0" if sparse else "1"

    import torch

    from kvskim.bench.e2e_engine import EngineBench, Prompts
    from kvskim.bench.e2e_plan import DENSE, KVSKIM, Job
    from kvskim.engines.vllm import probe, sampler
    from kvskim.engines.vllm.check import attention_backend
    from kvskim.ops.triton import host_fetch

    if spec["copies"] is not None:
        host_fetch.COPIES = spec["copies"]

    share = None
    if any(spec["missing"]):
        from tier_missing import WHOLE, lose_for_next_step

        share = lose_for_next_step("cuda")
    backend = attention_backend(spec["llm"]["model"], spec["settings"])
    from tier_memory import step_peaks
    from vllm.model_executor.layers.attention import Attention

    from vllm import LLM

    text = []
    if spec["real"]:
        from common import text_ids

        text = text_ids(spec["llm"]["model"])
    started = time.perf_counter()
    llm = LLM(**spec["llm"], attention_backend=backend, **({"additional_config": {"kvskim": spec["settings"]}} if sparse else {}))
    start = time.perf_counter() - started
    state = probe.state_of(llm) if sparse else None
    assert (state is not None) == sparse
    prompts = Prompts(int(llm.llm_engine.vllm_config.model_config.get_vocab_size()), text)
    bench = EngineBench(llm, KVSKIM if sparse else DENSE, prompts, filled=not spec["real"], repetitions=spec["repetitions"])
    bench.calibrate()
    blocks = int(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    layers = [] if state is None else list(state.layers.values())
    # Bytes of a token in an engine without kvskim, of which vLLM makes blocks of 16 in all the memory.
    token = sum(2 * 2 * layer.num_kv_heads * layer.head_size for layer in layers)
    bound = [getattr(layer, "kv_cache", None) for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()]
    cache = sum(tensor.nbytes for tensor in bound if isinstance(tensor, torch.Tensor))
    hot = sum(layer.tier.hot.nbytes for layer in layers if layer.tier is not None)
    host = sum(layer.tier.host.nbytes for layer in layers if layer.tier is not None)
    room = 0 if state is None or state.host_cache is None else state.host_cache.room_bytes
    config = llm.llm_engine.vllm_config
    implementation = type(next(layer.impl for layer in config.compilation_config.static_forward_context.values() if isinstance(layer, Attention)))
    length = min(2 * int(config.scheduler_config.max_num_batched_tokens), int(config.model_config.max_model_len) - 1)
    bench._generate([prompts.take(length)], 1)  # kernels are compiled
    peaks = step_peaks(implementation, lambda: bench._generate([prompts.take(length)], 1))
    rows: list[dict[str, Any]] = []
    Path(spec["ready"]).touch()
    while not Path(spec["go"]).exists():
        time.sleep(0.05)

    def fetched_in(tokens: int, job: Job, ids: list[list[int]]) -> torch.Tensor:
        before = sampler.fetched(layers, torch.device("cuda"))
        bench._decode_seconds(ids, tokens, 0 if spec["real"] else job.context)
        return sampler.fetched(layers, torch.device("cuda")) - before

    for key, missing_share in zip(spec["jobs"], spec["missing"]):
        job = Job(**key)
        if share is not None:
            share.fill_(round(WHOLE * missing_share))
        row: dict[str, Any] = dict(job=key)
        rows.append(row)
        try:
            value = bench.decode(job)
            row.update(tpot_ms=value["tpot_ms"], runs=value["runs_ms"])
            if hot:
                # As with times: what only the longer outputs fetched is what a step fetches once the hot cache is warm.
                short, long = job.output_lengths
                ids = [prompts.take(job.context - long) for _ in range(job.batch)]
                selected, missing, homeless, nbytes = (-fetched_in(short, job, ids) + fetched_in(long, job, ids)).tolist()
                row.update(hit=1 - missing / selected, homeless=homeless / selected, token_bytes=nbytes / (long - short) / job.batch)
            if spec["profile"]:
                found = bench.profile(job)
                step = {group["group"]: group["us"] for group in found["groups"]}
                step |= {"idle between kernels": found["gaps_us"], "idle, longer gaps": found["waits_us"], "step": found["step_us"]}
                row["layer_us"] = {name: us / spec["layers"] for name, us in step.items()}
        except Exception as error:  # the other cases are worth having
            row["error"] = f"{type(error).__name__}: {error}"
            continue
        activity = value["activity"]
        if activity:
            row["attended"] = activity["attended"] / max(1, activity["total"])
    kernels = "FLASH_ATTN" if state is None else state.kernels.kernels
    dense = int(spec["memory"] * GIB) // (16 * token) if token else blocks
    result = dict(start=start, blocks=blocks, dense=dense, cache=cache, hot=hot, host=host, kernels=kernels, rows=rows)
    result |= dict(added=peaks.added_by(room), step=peaks.peak, held=peaks.held)
    Path(result_file).write_text(json.dumps(result))


def parse_missing(text: str | None) -> dict[tuple[int, int], float]:
    """``--missing`` by batch and context."""
    from kvskim.bench.e2e_plan import parse_shape

    pairs = (word.split("=") for word in text.split(",")) if text else ()
    return {parse_shape(case, "--missing"): float(share) for case, share in pairs}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("engines", nargs="+", metavar="VARIANT:GIB:CASES", help="for example mem-kv:12:1x1M,32x32K")
    arguments.add_argument("--model", default="llama3.1-8b", help="a geometry of `kvskim bench e2e`, or a folder with weights")
    arguments.add_argument("--hot", type=float, default=None, help="GiB of hot cache")
    arguments.add_argument("--host", type=float, default=60.0, help="GiB of host memory")
    arguments.add_argument("--pages", type=int, default=128, help="of a geometry: pages attended")
    arguments.add_argument("--missing", default=None, help="share of the selected pages that is missing in each step, as CASE=SHARE,CASE=SHARE")
    arguments.add_argument("--copies", type=int, default=None, help="programs of each multiprocessor that copy what was missing; left out: as in an engine")
    arguments.add_argument("--settings", default="{}", help="more settings as JSON")
    arguments.add_argument("--profile", action="store_true", help="also say what the kernels of a decode step take, in groups")
    arguments.add_argument("--repetitions", type=int, default=2)
    arguments.add_argument("--seconds", type=float, default=540.0, help="most time for all engines")
    a = arguments.parse_args()

    from kvskim.bench.e2e_plan import decode_jobs, engine_arguments, find_model
    from kvskim.bench.geometries import write_geometry
    from kvskim.bench.random_calibration import write_random_calibration

    real = Path(a.model, "config.json").is_file()
    model, missing = find_model(a.model, real=real), parse_missing(a.missing)
    end, results, problems, running = time.monotonic() + a.seconds, {}, [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = model.folder or write_geometry(model.name, Path(name))
        settings = json.loads(a.settings) if real else {"rule": "budget", "budget_pages": a.pages, **json.loads(a.settings)}
        if not real and settings.get("selector", "sketch") == "sketch":
            write_random_calibration(folder, Path(name, "calibration.safetensors"))
            settings["calibration"] = str(Path(name, "calibration.safetensors"))
        for engine in a.engines:
            variant, gib, cases = engine.split(":")
            jobs, memory = decode_jobs(cases, None, None), float(gib)
            own: dict[str, Any] | None = None if variant == "dense" else {"variant": variant, **settings}
            if own is not None and variant in HOT:
                own |= {"hot_cache_gib": a.hot or HOT[variant] * memory, "host_memory_gib": a.host}
                memory -= own["hot_cache_gib"]
            # Several engines start on one GPU: how much of it each may have is said in bytes.
            llm = engine_arguments(jobs, real=real, memory=0.05, blocks=None)
            llm |= dict(model=str(folder), kv_cache_memory_bytes=int(memory * GIB), seed=0)
            spec, result, log, ready, go = (Path(name, f"{kind}-{len(running)}") for kind in ("spec", "result", "log", "ready", "go"))
            shares = [missing.get((job.batch, job.context), 0.0) if variant in HOT else 0.0 for job in jobs]
            spec.write_text(json.dumps(dict(
                llm=llm, settings=own, memory=float(gib), real=real, repetitions=a.repetitions, jobs=[asdict(job) for job in jobs], missing=shares,
                ready=str(ready), go=str(go), profile=a.profile, copies=a.copies if variant in HOT else None,
                layers=int(json.loads(Path(folder, "config.json").read_text())["num_hidden_layers"]),
            )))
            with log.open("w") as output:
                process = subprocess.Popen([sys.executable, __file__, "--worker", str(spec), str(result)], stdout=output, stderr=subprocess.STDOUT)
            running[engine] = (process, variant, result, log, ready, go)
        while time.monotonic() < end and any(process.poll() is None and not ready.exists() for process, _, _, _, ready, _ in running.values()):
            time.sleep(0.1)
        for engine, (process, variant, result, log, _, go) in running.items():
            go.touch()
            outcome = ended(engine, process, result, log, end - time.monotonic(), problems)
            if outcome is not None:
                results[engine] = (variant, outcome)
            if variant in HOT:
                print_memory_lines(log)
    header = ["engine", "start s", "blocks", "of dense", "GPU GiB: cache", "hot", "room adds", "sum", "step", "held", "host GiB"]
    print(table(header, [
        [
            engine, f"{r['start']:.0f}", str(r["blocks"]), f"{r['blocks'] / r['dense']:.3f}x", *(f"{r[part] / GIB:.2f}" for part in ("cache", "hot", "added")),
            f"{(r['cache'] + r['hot'] + r['added']) / GIB:.2f}", *(f"{r[part] / GIB:.2f}" for part in ("step", "held", "host")),
        ]
        for engine, (_, r) in results.items()
    ]))
    print()
    header = ["case", "engine", "kernels", "ms/token", "of fast", "tokens/s", "attended", "hit", "homeless", "MB/token missing", "runs"]
    fast = {json.dumps(row["job"]): row.get("tpot_ms") for variant, r in results.values() if variant == "fast" for row in r["rows"]}
    rows = []
    for variant, r in results.values():
        for row in r["rows"]:
            batch = row["job"]["batch"]
            title = f"{batch} x {row['job']['context'] >> 10}K"
            if "error" in row:
                rows.append([title, variant, r["kernels"], row["error"], *[""] * (len(header) - 4)])
                problems.append(f"{title} of {variant} gave no time")
                continue
            percent = [f"{row[part]:.1%}" if part in row else "" for part in ("attended", "hit", "homeless")]
            moved = f"{row['token_bytes'] / 1e6:.2f}" if "token_bytes" in row else ""
            reference = fast.get(json.dumps(row["job"]))
            ratio = f"{row['tpot_ms'] / reference:.2f}x" if reference else ""
            runs = " ".join(f"{run:.2f}" for run in row["runs"])
            rows.append([title, variant, r["kernels"], f"{row['tpot_ms']:.2f}", ratio, f"{1000 * batch / row['tpot_ms']:.0f}", *percent, moved, runs])
    print(table(header, rows))
    profiles = {
        f"{variant} {row['job']['batch']} x {row['job']['context'] >> 10}K": row["layer_us"]
        for variant, r in results.values() for row in r["rows"] if "layer_us" in row
    }
    if profiles:
        names = dict.fromkeys(name for of in profiles.values() for name in of if name != "step")
        print()
        print(table(["us of a layer", *profiles], [[name, *(f"{of.get(name, 0.0):.1f}" for of in profiles.values())] for name in (*names, "step")]))
    return exit_status(problems)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
        sys.exit(0)
    sys.exit(main())
