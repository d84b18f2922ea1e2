"""Values, or keys and values, in host memory give the tokens of GPU memory: 64 prompts, with prefix hits, preemption and a hot cache of a few pages.

Engines of variant ``fast`` and of the variants asked for run the same prompts by the same rule, all on one GPU side by side. With ``--blocks`` they have
few blocks, so that requests are preempted, and the tiny hot cache makes pages come from the host again and again. Tokens must be equal, every one. At
the end the hot caches are compared with the host, and the records of all live pages with fresh ones. Without a number of blocks all variants
have the same memory for their cache: there the script prints how many blocks each makes.

All engines have the same steps: other batches take other kernels of matrix products, which round differently. So scheduling is not asynchronous here, where
it depends on the time that steps take; `soak.py` has it. FlashAttention shares out long contexts by what else is in a batch, too. Prompts whose contexts do
not fit together into the room for them are other batches than those of ``fast``, so it runs with one split, which makes a row's sums its own.

    python tests/gpu/vllm/tier.py --model /tmp/smollm2 --variant mem-kv
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import MODES, ended, engine, exit_status, parser, print_memory_lines, table, text_ids

RULES = {
    "few pages": {"selector": "rki4", "rule": "budget", "budget_pages": 16, "full_pages": 0},
    "all pages": {"selector": "rki4", "rule": "budget", "budget": 1.0, "full_pages": 0},
}
VARIANTS = ("mem-v", "mem-kv")
TINY = 0.004
"""GiB of hot cache for all layers: 69 slots in each of the 30 layers of SmolLM2-135M for values, 34 for keys and values."""
LARGE = {"mem-v": {}, "mem-kv": {"host_memory_gib": 12.0, "hot_cache_gib": 1.0}}
"""Settings of the engines that size their cache by themselves. Without keys the GPU has room for more blocks than all engines' host memory."""
STEP_TOKENS = 1024
"""Of a step, at most: long prompts come in several chunks, and read earlier ones back."""


def work(spec_file: str, result_file: str) -> None:
    """One engine."""
    spec = json.loads(Path(spec_file).read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("KVSKIM_DISABLE", None)

    import torch

    from kvskim.engines.vllm import probe
    from kvskim.engines.vllm.check import attention_backend

    backend = attention_backend(spec["llm"]["model"], spec["settings"])
    from vllm import LLM, SamplingParams

    llm = LLM(**spec["llm"], attention_backend=backend, additional_config={"kvskim": spec["settings"]})
    state = probe.state_of(llm)
    assert state is not None
    core = llm.llm_engine.engine_core.engine_core
    preempted: dict[str, int] = {}

    def after_step() -> None:
        for request in core.scheduler.requests.values():
            if request.num_preemptions:
                preempted[request.request_id] = request.num_preemptions

    params = SamplingParams(temperature=0, max_tokens=spec["max_tokens"], ignore_eos=True, detokenize=False, logprobs=1)
    outputs, seconds = [], []
    # The second time the prefix cache has what has not been given to others since.
    for _ in range(2):
        started = time.perf_counter()
        outputs += probe.generate(llm, spec["prompts"], params, after_step)
        seconds.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    counters = [layer.tier.counters.tolist() for layer in state.layers.values() if layer.tier is not None]
    pages = probe.live_pages(llm)
    result = dict(
        tokens=[output.tokens for output in outputs], hits=sum(output.cached_tokens > 0 for output in outputs), preempted=sum(preempted.values()),
        blocks=int(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks), untrue=sum(probe.untrue_copies(state).values()),
        live=len(pages), untrue_records=sum(probe.untrue_records(state, pages).values()),
        counters=[sum(numbers) for numbers in zip(*counters)], slots=[layer.tier.slots for layer in state.layers.values() if layer.tier is not None][:1],
        seconds=seconds, kernels=state.kernels.kernels, layers=len(state.layers),
    )
    Path(result_file).write_text(json.dumps(result))


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--variant", default="both", choices=[*VARIANTS, "both"])
    arguments.add_argument("--mode", default="full", choices=list(MODES))
    arguments.add_argument("--prompts", type=int, default=64)
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--blocks", type=int, default=1500, help="num_gpu_blocks_override, of 16 tokens: few, so that requests are preempted")
    arguments.add_argument("--seconds", type=float, default=420.0, help="most time for all engines")
    a = arguments.parse_args()
    ids = text_ids(a.model)
    # Every second prompt begins like the others.
    lengths = [20 + 2500 * (7 * i % a.prompts) // a.prompts for i in range(a.prompts)]
    prompts = [ids[:n] if i % 2 else ids[3000 + 300 * i : 3000 + 300 * i + n] for i, n in enumerate(lengths)]
    jobs = {}
    variants = VARIANTS if a.variant == "both" else (a.variant,)
    for name, rule in RULES.items():
        few = dict(num_gpu_blocks_override=a.blocks)
        jobs[f"fast, {name}, {a.blocks} blocks"] = ({"variant": "fast", **rule}, few)
        for variant in variants:
            jobs[f"{variant}, {name}, {a.blocks} blocks, tiny hot cache"] = ({"variant": variant, "hot_cache_gib": TINY, **rule}, few)
    jobs["fast, few pages, 8 GiB"] = ({"variant": "fast", **RULES["few pages"]}, {})
    for variant in variants:
        jobs[f"{variant}, few pages, 8 GiB"] = ({"variant": variant, **LARGE[variant], **RULES["few pages"]}, {})
    results, problems = {}, []
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        for i, (name, (settings, more)) in enumerate(jobs.items()):
            llm = engine(
                a.model, a.mode, block_size=16, enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=STEP_TOKENS,
                async_scheduling=False, attention_config={"flash_attn_max_num_splits_for_cuda_graph": 1}, **more,
            )
            if "compilation_config" in llm:
                # vLLM keeps to that number of splits up to the largest size of a graph.
                llm["compilation_config"] = {**llm["compilation_config"], "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, STEP_TOKENS]}
            spec, result, log = (Path(folder, f"{kind}{i}") for kind in ("spec", "result", "log"))
            spec.write_text(json.dumps(dict(llm=llm, settings={"kernels": a.kernels, **settings}, prompts=prompts, max_tokens=a.tokens)))
            command = [sys.executable, __file__, "--worker", str(spec), str(result)]
            with log.open("w") as output:
                processes[name] = (subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), result, log)
        end = time.monotonic() + a.seconds
        for name, (process, result, log) in processes.items():
            outcome = ended(name, process, result, log, end - time.monotonic(), problems)
            if outcome is not None:
                results[name] = outcome
            if name.startswith(VARIANTS):
                print_memory_lines(log)
    rows = []
    for name, result in results.items():
        variant = name.partition(",")[0]
        reference = results.get(name.replace(variant, "fast").replace(", tiny hot cache", ""))
        equal = sum(x == y for x, y in zip(result["tokens"], reference["tokens"])) if reference else 0
        count = len(result["tokens"])
        selected, missing, copied = result["counters"] or (0, 0, 0)
        rows.append([
            name, result["kernels"], str(result["blocks"]), f"{equal}/{count}", str(result["hits"]), str(result["preempted"]), str(result["slots"] or ""),
            f"{1 - missing / selected:.1%}" if selected else "", str(missing - copied) if selected else "", str(result["untrue"]),
            f"{result['untrue_records']} of {result['live']} pages", " ".join(f"{seconds:.1f}" for seconds in result["seconds"]),
        ])
        if reference and equal < count:
            first = [next(i for i, (x, y) in enumerate(zip(*pair)) if x != y) for pair in zip(result["tokens"], reference["tokens"]) if pair[0] != pair[1]]
            problems.append(f"{name}: {count - equal} of {count} prompts have other tokens, from their output tokens {first[:8]} on")
        if variant != "fast" and not selected:
            problems.append(f"{name}: nothing was fetched")
        if result["untrue"]:
            problems.append(f"{name}: {result['untrue']} pages in the hot cache are not those on the host")
        if result["untrue_records"] or not result["live"]:
            problems.append(f"{name}: {result['untrue_records']} records of {result['live']} live pages are not those of their keys")
        if not result["hits"]:
            problems.append(f"{name}: no prompt hit the prefix cache")
        if f"{a.blocks} blocks" in name and not result["preempted"]:
            problems.append(f"{name}: no request was preempted")
        if "tiny" in name and missing == copied:
            problems.append(f"{name}: the hot cache had room for all, so it was not tiny")
    print(table(["engine", "kernels", "blocks", "equal", "hits", "preempted", "slots", "hot", "homeless", "untrue", "untrue records", "seconds"], rows))
    one = results.get("fast, few pages, 8 GiB")
    for variant in variants:
        two = results.get(f"{variant}, few pages, 8 GiB")
        if one and two:
            print(f"blocks of {variant} / fast with 8 GiB for the cache: {two['blocks'] / one['blocks']:.3f}")
    return exit_status(problems)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
        sys.exit(0)
    sys.exit(main())
