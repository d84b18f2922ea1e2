"""A soak: many requests of mixed lengths on few blocks, with prefix hits, aborts, preemption and chunked prefill; then the records are checked.

Requests come at random, share beginnings, and some are aborted. While they run and at the end, the record of every full block in the prefix cache
is compared with a fresh one, byte by byte, and the hot cache of the host tier with the host. At the end all blocks must be free and no GPU memory may have
been lost.

    python tests/gpu/vllm/soak.py --model /tmp/smollm2
    python tests/gpu/vllm/soak.py --model /tmp/smollm2 --settings '{"variant": "mem-kv", "hot_cache_gib": 0.002}'
"""

import json
import os
import random
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.pop("KVSKIM_DISABLE", None)

from common import MODES, engine, exit_status, parser, text_ids


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--requests", type=int, default=2000)
    arguments.add_argument("--mode", default="full", choices=list(MODES))
    arguments.add_argument("--blocks", type=int, default=1000, help="num_gpu_blocks_override, of 16 tokens: few, so that requests are preempted")
    arguments.add_argument("--block-size", type=int, default=16)
    arguments.add_argument("--selector", default="sketch")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--settings", default="{}", help="more settings as JSON")
    a = arguments.parse_args()
    ids = text_ids(a.model)

    import torch

    from kvskim.engines.vllm import probe
    from kvskim.engines.vllm.check import attention_backend

    settings = {"selector": a.selector, "kernels": a.kernels, "full_pages": 0, **json.loads(a.settings)}
    backend = attention_backend(a.model, settings)
    from vllm import LLM, SamplingParams

    llm = LLM(
        **engine(
            a.model, a.mode, block_size=a.block_size, num_gpu_blocks_override=a.blocks * 16 // a.block_size, max_num_batched_tokens=1024,
            enable_prefix_caching=True, enable_chunked_prefill=True,
        ),
        attention_backend=backend, additional_config={"kvskim": settings},
    )
    state = probe.state_of(llm)
    assert state is not None
    print(f"async scheduling: {llm.llm_engine.vllm_config.scheduler_config.async_scheduling}")
    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    free_at_start = pool.get_num_free_blocks()
    rng = random.Random(a.seed)
    preempted: dict[str, int] = {}
    waiting, running, finished, aborted, hits, steps, tokens, checks = a.requests, set(), 0, 0, 0, 0, 0, 0
    memory, chunked = 0, set()
    problems = []

    def check_records() -> None:
        nonlocal checks
        pages = probe.live_pages(llm)
        if state.calibrator is None and len(pages):
            wrong = {name: n for name, n in probe.untrue_records(state, pages).items() if n}
            checks += 1
            if wrong:
                problems.append(f"after {finished} requests {sum(wrong.values())} records in {len(wrong)} layers are not those of their keys")
            copies = sum(probe.untrue_copies(state).values())
            if copies:
                problems.append(f"after {finished} requests {copies} values in the hot cache are not those on the host")
            print(
                f"{finished + aborted} requests, {steps} steps: {len(pages)} live pages checked, {sum(wrong.values())} untrue records, {copies} untrue copies",
                flush=True,
            )

    started = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < 40 and (not running or rng.random() < 0.7):
            name = f"soak-{waiting:06d}"
            begin = rng.choice([0, 0, 5_000, rng.randrange(20_000)])
            length = rng.choice([1, 15, 16, 17, rng.randrange(2, 400), rng.randrange(400, 5000)])
            params = SamplingParams(temperature=0.8, seed=waiting, max_tokens=rng.choice([1, 2, 17, 64, 200]), ignore_eos=True, detokenize=False)
            llm.llm_engine.add_request(name, {"prompt_token_ids": ids[begin : begin + length]}, params)
            running.add(name)
            waiting -= 1
        if running and rng.random() < 0.03:
            name = rng.choice(sorted(running))
            llm.llm_engine.abort_request([name])
            running.discard(name)
            aborted += 1
        for output in llm.llm_engine.step():
            if output.finished and output.request_id[:11] in running:
                running.discard(output.request_id[:11])
                finished += 1
                hits += bool(output.num_cached_tokens)
                tokens += len(output.outputs[0].token_ids)
        for request in core.scheduler.requests.values():
            if request.num_preemptions:
                preempted[request.request_id] = request.num_preemptions
            if 0 < request.num_computed_tokens < request.num_prompt_tokens:
                chunked.add(request.request_id)
        steps += 1
        if steps % 1000 == 0:
            check_records()
        if steps == 1500:
            torch.cuda.synchronize()
            memory = torch.cuda.memory_allocated()
    check_records()
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - memory if memory else 0
    seconds = time.perf_counter() - started
    print(
        f"{finished} finished, {aborted} aborted, {hits} with prefix hits, {sum(preempted.values())} preemptions of {len(preempted)} requests, "
        f"{len(chunked)} prompts in several chunks, {tokens} tokens in {steps} steps, {seconds:.0f} s, "
        f"{checks} checks of all live records, memory grew by {grown / 2**20:.1f} MiB"
    )
    tiers = [layer.tier for layer in state.layers.values() if layer.tier is not None]
    if tiers:
        selected, missing, copied = torch.stack([tier.counters for tier in tiers]).sum(0).tolist()
        print(
            f"hot cache of {tiers[0].slots} slots a layer: {selected} pages selected, {missing / max(1, selected):.1%} missing, "
            f"{missing - copied} without a slot"
        )
        if missing == copied:
            problems.append("the hot cache had room for all pages: the soak proves nothing about those without a slot")
    if state.calibrator is not None:
        problems.append("calibration never came to an end")
    if finished + aborted != a.requests:
        problems.append(f"{a.requests - finished - aborted} requests are lost")
    if pool.get_num_free_blocks() != free_at_start:
        problems.append(f"{free_at_start - pool.get_num_free_blocks()} blocks are not free at the end")
    if not hits or not aborted or not preempted or not chunked:
        problems.append("the soak had no prefix hit, no abort, no preemption or no chunked prompt: it proves nothing about them")
    if not checks:
        problems.append("no record was checked")
    if not memory:
        problems.append("the soak was too short to see whether memory is lost")
    if grown > 64 * 2**20:
        problems.append("GPU memory was lost")
    return exit_status(problems)


if __name__ == "__main__":
    sys.exit(main())
