"""Values, or keys and values, in host memory give the tokens of GPU memory: 64 prompts, with prefix hits, preemption and a hot cache of a few pages.

Engines of variant ``fast`` and of the variants asked for run the same prompts by the same rule, all on one GPU side by side. With ``--blocks`` they have
few blocks, so that requests are preempted, and the tiny hot cache makes pages come from the host again and again. Tokens must be equal, every one. At
the end the hot caches are compared with the host, and the records of all live pages with fresh ones; on the way too, as `tier_trace.py` says, which also
tells in which step and layer an engine first computed something else than ``fast``. Without a number of blocks all variants
have the same memory for their cache: there the script prints how many blocks each makes, and a second engine of ``fast`` says what two of them have in common.

All engines score with the same kernels, or what they select would not be the same; the table says which. All have the same steps: other batches take other
kernels of matrix products, which round differently. So scheduling is not asynchronous here, where it depends on the time that steps take; `soak.py`
has it. FlashAttention shares out long contexts by what else is in a batch, too. Prompts whose contexts do not fit together into the room for them are
other batches than those of ``fast``, so it runs with one split, which makes a row's sums its own. That room holds NaN wherever a step has not written.

    python tests/gpu/vllm/tier.py --model /tmp/smollm2 --variant mem-kv
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import MODES, ended, engine, exit_status, parser, print_memory_lines, table, text_ids

SELECTOR = "minmax"
"""It needs no calibration, and its records of a block fill 16-byte pieces. Of records that don't, the number of blocks decides which kernels score them, see
`kvskim.ops.score.fills_pieces`; they round differently, so engines with other numbers of blocks select other pages now and then."""
RULES = {
    "few pages": {"selector": SELECTOR, "rule": "budget", "budget_pages": 16, "full_pages": 0},
    "all pages": {"selector": SELECTOR, "rule": "budget", "budget": 1.0, "full_pages": 0},
}
VARIANTS = ("mem-v", "mem-kv")
TINY = 0.004
"""GiB of hot cache for all layers: 69 slots in each of the 30 layers of SmolLM2-135M for values, 34 for keys and values."""
LARGE = {"mem-v": {}, "mem-kv": {"host_memory_gib": 12.0, "hot_cache_gib": 1.0}}
"""Settings of the engines that size their cache by themselves. Without keys the GPU has room for more blocks than all engines' host memory."""
STEP_TOKENS = 1024
"""Of a step, at most: long prompts come in several chunks, and read earlier ones back."""
RECORDS_EVERY = 64
"""Steps from one look at all live records to the next."""


def work(spec_file: str, result_file: str, trace_file: str) -> None:
    """One engine."""
    spec = json.loads(Path(spec_file).read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("KVSKIM_DISABLE", None)

    import torch

    from kvskim.engines.vllm import probe
    from kvskim.engines.vllm.check import attention_backend
    from kvskim.engines.vllm.tier import HostCache
    from kvskim.ops.score import fills_pieces, scorer

    room = HostCache.room
    # What other tensors have left there is most often finite: then nobody would see that it is read.
    HostCache.room = lambda *arguments: room(*arguments).fill_(torch.nan)
    backend = attention_backend(spec["llm"]["model"], spec["settings"])
    from tier_trace import Trace

    from vllm import LLM, SamplingParams

    llm = LLM(**spec["llm"], attention_backend=backend, additional_config={"kvskim": spec["settings"]})
    state = probe.state_of(llm)
    assert state is not None
    core = llm.llm_engine.engine_core.engine_core
    preempted: dict[str, int] = {}
    trace, untrue_records = Trace(llm, state), 0

    def after_step() -> None:
        nonlocal untrue_records
        for request in core.scheduler.requests.values():
            if request.num_preemptions:
                preempted[request.request_id] = request.num_preemptions
        trace.after_step()
        if len(trace.steps) % RECORDS_EVERY == 0:
            untrue_records += sum(probe.untrue_records(state, probe.live_pages(llm)).values())

    params = SamplingParams(temperature=0, max_tokens=spec["max_tokens"], ignore_eos=True, detokenize=False, logprobs=2)
    outputs, seconds = [], []
    # The second time the prefix cache has what has not been given to others since.
    for _ in range(2):
        started = time.perf_counter()
        outputs += probe.generate(llm, spec["prompts"], params, after_step)
        seconds.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    counters = [layer.tier.counters.tolist() for layer in state.layers.values() if layer.tier is not None]
    pages = probe.live_pages(llm)
    untrue = sum(probe.untrue_copies(state).values()) + trace.save(trace_file)
    untrue_records += sum(probe.untrue_records(state, pages).values())
    layer, kernels = next(iter(state.layers.values())), state.kernels.kernels
    scored = scorer(state.selector, kernels, layer.head_size, layer.group, state.query_dtype)
    result = dict(
        tokens=[output.tokens for output in outputs], leads=[[lead(place) for place in output.likeliest] for output in outputs],
        hits=sum(output.cached_tokens > 0 for output in outputs), preempted=sum(preempted.values()),
        blocks=int(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks), untrue=untrue, live=len(pages), untrue_records=untrue_records,
        counters=[sum(numbers) for numbers in zip(*counters)], slots=[layer.tier.slots for layer in state.layers.values() if layer.tier is not None][:1],
        seconds=seconds, kernels=kernels, layers=len(state.layers), scored=scored if fills_pieces(layer.records.records) else "triton",
    )
    Path(result_file).write_text(json.dumps(result))


def lead(place: dict[int, float]) -> float:
    """Of the likeliest token over the next one, in log-probability. Logits of eight bits are often the same: then it is 0."""
    first, second, *_ = sorted(place.values(), reverse=True)
    return first - second


def first_differences(own: dict[str, Any], reference: dict[str, Any], prompts: int) -> str:
    """Which prompts have other tokens, from where on, and how sure both engines were there."""
    said = []
    for i, pair in enumerate(zip(own["tokens"], reference["tokens"])):
        at = next((k for k, (x, y) in enumerate(zip(*pair)) if x != y), None)
        if at is not None:
            leads = " and ".join(f"{result['leads'][i][at]:.4f}" for result in (own, reference))
            said.append(f"prompt {i % prompts} of round {1 + i // prompts} from token {at} on (leads {leads})")
    return f"{len(said)} of {len(own['tokens'])} prompts have other tokens: {'; '.join(said[:6])}"


def main() -> int:
    import torch
    from tier_trace import compare

    arguments = parser(__doc__)
    arguments.add_argument("--variant", default="both", choices=[*VARIANTS, "both"])
    arguments.add_argument("--mode", default="full", choices=list(MODES))
    arguments.add_argument("--prompts", type=int, default=64)
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--blocks", type=int, default=1500, help="num_gpu_blocks_override, of 16 tokens: few, so that requests are preempted")
    arguments.add_argument("--only", default="", help="part of the names of the engines to run, as in the table: '8 GiB'")
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
    jobs["fast again, few pages, 8 GiB"] = jobs["fast, few pages, 8 GiB"]
    jobs = {name: job for name, job in jobs.items() if a.only in name}
    if not jobs:
        arguments.error(f"no engine's name has '{a.only}' in it")
    results, problems, traces = {}, [], {}
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
            spec, result, log, trace = (Path(folder, f"{kind}{i}") for kind in ("spec", "result", "log", "trace"))
            spec.write_text(json.dumps(dict(llm=llm, settings={"kernels": a.kernels, **settings}, prompts=prompts, max_tokens=a.tokens)))
            command = [sys.executable, __file__, "--worker", str(spec), str(result), str(trace)]
            with log.open("w") as output:
                processes[name] = (subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), result, log, trace)
        end = time.monotonic() + a.seconds
        for name, (process, result, log, trace) in processes.items():
            outcome = ended(name, process, result, log, end - time.monotonic(), problems)
            if outcome is not None:
                results[name] = outcome
                traces[name] = torch.load(trace)
            if name.startswith(VARIANTS):
                print_memory_lines(log)
    rows, differences = [], []
    for name, result in results.items():
        variant = name.partition(",")[0]
        of_fast = name.replace(variant, "fast").replace(", tiny hot cache", "")
        reference = results.get(of_fast)
        if reference and name != of_fast:
            differences.append(f"{name}: {compare(traces[name], traces[of_fast]) or 'no difference'}; {len(traces[name])} steps")
        equal = sum(x == y for x, y in zip(result["tokens"], reference["tokens"])) if reference else 0
        count = len(result["tokens"])
        selected, missing, copied = result["counters"] or (0, 0, 0)
        rows.append([
            name, result["kernels"], result["scored"], str(result["blocks"]), f"{equal}/{count}", str(result["hits"]), str(result["preempted"]),
            str(result["slots"] or ""),
            f"{1 - missing / selected:.1%}" if selected else "", str(missing - copied) if selected else "", str(result["untrue"]),
            f"{result['untrue_records']} of {result['live']} pages", " ".join(f"{seconds:.1f}" for seconds in result["seconds"]),
        ])
        if reference and result["scored"] != reference["scored"]:
            problems.append(f"{name}: pages are scored by {result['scored']}, and by {reference['scored']} in the engine of fast: its tokens prove nothing")
        if reference and equal < count:
            problems.append(f"{name}: {first_differences(result, reference, a.prompts)}")
        if variant in VARIANTS and not selected:
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
    header = ["engine", "kernels", "scored by", "blocks", "equal", "hits", "preempted", "slots", "hot", "homeless", "untrue", "untrue records", "seconds"]
    print(table(header, rows))
    print("computed otherwise than by fast:", *differences, sep="\n  ")
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
