"""Top-1 agreement of the default rule with full attention: how often sparse decode gives the same next token after the very same text.

FLASH_ATTN goes on after passages of a text. Then each engine is given a passage and the first i of these tokens, for every i, and asked for two tokens:
the first one comes from prefill, which is the same in both, and the second one from a decode step. It is compared where the first one is FLASH_ATTN's,
so that both have the same text before them. How often FLASH_ATTN agrees with itself, in other batches, stands beside it.

    python tests/gpu/vllm/agreement.py --model /tmp/smollm2
"""

import json
import sys

from common import engine, parser, table, text_ids

from kvskim.engines.vllm.check import run_engine


def agreement(continuations: list[list[int]], outputs: list[dict]) -> tuple[int, int]:
    """(equal, compared) second tokens; ``outputs`` are in the order of `cut`."""
    wanted = [tokens[i : i + 2] for tokens in continuations for i in range(len(tokens) - 1)]
    pairs = [(output["tokens"][1], after) for output, (now, after) in zip(outputs, wanted, strict=True) if output["tokens"][0] == now]
    return sum(a == b for a, b in pairs), len(pairs)


def cut(prompts: list[list[int]], continuations: list[list[int]]) -> list[list[int]]:
    """Every passage with the first 0, 1, ... tokens of its continuation, so that two more are known."""
    return [prompt + tokens[:i] for prompt, tokens in zip(prompts, continuations, strict=True) for i in range(len(tokens) - 1)]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--prompts", type=int, default=12)
    arguments.add_argument("--context", type=int, default=7000)
    arguments.add_argument("--tokens", type=int, default=40)
    arguments.add_argument("--settings", default="{}", help="JSON, settings of kvskim")
    arguments.add_argument("--least", type=float, default=0.85, help="smallest agreement that passes")
    a = arguments.parse_args()
    ids = text_ids(a.model)
    step = max(1, (len(ids) - a.context) // max(1, a.prompts))
    prompts = [ids[step * i : step * i + a.context] for i in range(a.prompts)]
    llm = engine(a.model, "full", enable_prefix_caching=True)
    dense = run_engine(llm, prompts, settings=None, max_tokens=a.tokens)
    continuations = [output["tokens"] for output in dense["outputs"]]
    parts = cut(prompts, continuations)
    again = run_engine(llm, parts, settings=None, max_tokens=2, batches=(32,))
    settings = {"kernels": a.kernels, "full_pages": 0, **json.loads(a.settings)}
    sparse = run_engine(llm, parts, settings=settings, max_tokens=2, batches=(32,), warm_prompt=prompts[-1], activity=True)
    rows, shares = [], {}
    seen = sparse["activity"]
    share = seen["attended"] / max(1, seen["total"])
    for name, result in (("FLASH_ATTN again", again), ("kvskim", sparse)):
        equal, compared = agreement(continuations, result["outputs"])
        shares[name] = equal / max(1, compared)
        attended = f"{share:.1%}" if result is sparse else "100%"
        rows.append([name, f"{equal} of {compared}", f"{shares[name]:.1%}", attended])
    print("\n".join(sparse["log"]))
    print(table(["run", "equal next tokens", "top-1 agreement", "pages attended"], rows))
    problems = []
    if not sparse["ready"] or not 0 < share < 0.9:
        problems.append("decode was not sparse")
    if shares["FLASH_ATTN again"] < 0.95:
        problems.append("FLASH_ATTN does not agree with itself: the comparison says nothing")
    if shares["kvskim"] < a.least:
        problems.append(f"kvskim gives the next token of full attention in {shares['kvskim']:.1%} of places, less than {a.least:.0%}")
    for problem in problems:
        print(f"FAIL: {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
