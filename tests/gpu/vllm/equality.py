"""All pages selected gives the greedy tokens of FLASH_ATTN: 32 prompts of 200 to 7,000 tokens, eager, PIECEWISE and FULL, batch 1 and 16.

Prefix caching is on: every second prompt begins like the others, and the second batch size finds all prompts in the cache. Two kernels
round differently, so a token may differ where the two likeliest are nearly equal, and after that the texts differ. How often that happens is
seen from FLASH_ATTN itself, run again in another order of batch sizes. A difference counts as an error when the lead of FLASH_ATTN's token is
larger than --tie (natural logarithm), when fewer tokens agree than with FLASH_ATTN's second run by more than --slack, or when log-probabilities before
the first difference are further apart than --spread times those of FLASH_ATTN's two runs. An engine that runs without the graphs that were asked for
is an error too, and so is a model whose next tokens are so close that FLASH_ATTN does not agree with itself (--decisive).

With latent attention vLLM has two ways to read a prompt, which round differently: keys and values expanded, or, in pieces of up to 512 tokens, queries
absorbed. kvskim always takes the first, FLASH_ATTN_MLA either. So its second run there reads all prompts in such pieces, and the two ways are in what it
differs from itself.

    python tests/gpu/vllm/equality.py --model /tmp/smollm2
    python tests/gpu/vllm/equality.py --model /tmp/mla --dtype float16      # a model made by mla_model.py
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from common import MODES, engine, parser, table, text_ids

from kvskim.engines.vllm.check import ALL_PAGES, compare, has_latent_attention, run_engine

TIES = {"bfloat16": 0.26, "float16": 0.04}
ABSORBED = {"max_num_batched_tokens": 512}
"""Of the second dense engine of a latent model: `FlashAttnMLAMetadataBuilder.reorder_batch_threshold` of vLLM."""
GRAPHS = {"eager": "NONE", "piecewise": "PIECEWISE", "full": "FULL_AND_PIECEWISE", "decode": "FULL_DECODE_ONLY"}


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--modes", default=",".join(MODES))
    arguments.add_argument("--prompts", type=int, default=32)
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument("--dtype", choices=list(TIES), default="bfloat16")
    arguments.add_argument("--tie", type=float, help=f"default: {TIES}, twice the spacing of logits from 16 to 32 and a little")
    arguments.add_argument("--slack", type=float, default=0.1)
    arguments.add_argument("--spread", type=float, default=1.5)
    arguments.add_argument("--decisive", type=float, default=0.7, help="least share of tokens that FLASH_ATTN's two runs must have in common")
    arguments.add_argument("--block-size", type=int, default=16)
    arguments.add_argument("--settings", default="sketch", help="selector")
    a = arguments.parse_args()
    tie = TIES[a.dtype] if a.tie is None else a.tie
    ids = text_ids(a.model)
    lengths = [200 + (7000 - 200) * i // max(1, a.prompts - 1) for i in range(a.prompts)]
    prompts = [ids[:n] if i % 2 else ids[3000 + 500 * i : 3000 + 500 * i + n] for i, n in enumerate(lengths)]
    warm = ids[40_000:46_000]
    dense_name, differently = ("FLASH_ATTN_MLA again", ABSORBED) if has_latent_attention(a.model) else ("FLASH_ATTN again", {})
    rows, failed = [], False
    for mode in a.modes.split(","):
        llm = engine(a.model, mode, block_size=a.block_size, enable_prefix_caching=True, dtype=a.dtype)
        common = dict(max_tokens=a.tokens, batches=(1, 16))
        with ThreadPoolExecutor() as side_by_side:  # each engine is a process; most of its time is its start
            engines = [
                side_by_side.submit(run_engine, llm, prompts, settings=None, **common),
                side_by_side.submit(run_engine, {**llm, **differently}, prompts, settings=None, max_tokens=a.tokens, batches=(16, 1)),
                side_by_side.submit(
                    run_engine, llm, prompts, settings={**ALL_PAGES, "selector": a.settings, "kernels": a.kernels}, warm_prompt=warm, activity=True,
                    **common,
                ),
            ]
            dense, again, sparse = (one.result() for one in engines)
        # The same prompts in the other order of batch sizes: how far FLASH_ATTN agrees with itself.
        swapped = dict(again, outputs=again["outputs"][a.prompts :] + again["outputs"][: a.prompts])
        itself = compare(dense, swapped)
        floor, widest = itself.tokens - a.slack, a.spread * itself.logprob
        for name, result in ((dense_name, swapped), (f"all pages, {sparse['kernels']}", sparse)):
            agreement = compare(dense, result)
            bad = result is sparse and (
                agreement.gap > tie or agreement.tokens < floor or agreement.logprob > widest or not sparse["ready"]
                or sparse["activity"]["attended"] != sparse["activity"]["total"]
            )
            failed |= bad
            rows.append([
                mode, name, f"{agreement.equal}/{agreement.prompts}", f"{agreement.tokens:.2%}", f"{agreement.gap:.3f}", f"{agreement.logprob:.3f}",
                f"{result['start_seconds']:.0f}", "FAIL" if bad else "ok",
            ])
        cached = sum(output["cached_tokens"] > 0 for output in sparse["outputs"])
        count = len(sparse["outputs"])
        print(f"{mode}: {sparse['layers']} sparse layers, ready {sparse['ready']}, {cached} of {count} prompts hit the prefix cache", flush=True)
        graphs = {result["graphs"] for result in (dense, again, sparse)}
        if graphs != {GRAPHS[mode]}:
            failed = True
            print(f"FAIL: the engines ran with graphs {', '.join(sorted(graphs))}, not {GRAPHS[mode]}")
        if itself.tokens < a.decisive:
            failed = True
            print(
                f"FAIL: {dense_name.removesuffix(' again')} has only {itself.tokens:.0%} of its tokens in common with itself, so equality proves nothing: "
                "take a model with more decisive next tokens, or --dtype float16"
            )
        if not cached:
            failed = True
            print("FAIL: no prompt hit the prefix cache")
    print("\n".join(sparse["log"]))
    print(table(["graphs", "run", "equal", "tokens", "largest lead", "logprob diff", "start s", ""], rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
