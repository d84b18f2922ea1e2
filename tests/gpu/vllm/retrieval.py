"""Planted facts: the default rule answers as many questions as full attention, up to one, and attends few pages.

    python tests/gpu/vllm/retrieval.py --model /tmp/smollm2
"""

import json
import sys

from common import engine, exit_status, parser, table

from kvskim.engines.vllm.check import compare, run_engine


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--context", type=int, default=7000)
    arguments.add_argument("--texts", type=int, default=2, help="documents with twelve facts each")
    arguments.add_argument("--settings", default="{}", help="JSON, settings of kvskim")
    arguments.add_argument("--calibration", default="auto", help="auto: calibrate on the first document")
    a = arguments.parse_args()
    from transformers import AutoTokenizer

    from kvskim.eval.texts import other_text, planted_facts, token_ids

    tokenizer = AutoTokenizer.from_pretrained(a.model, local_files_only=True)
    prompts, answers = [], []
    for seed in range(a.texts):
        document, questions = planted_facts(tokenizer, a.context, seed)
        for question in questions:
            prompts.append(document + tokenizer("\n" + question.prompt, add_special_tokens=False).input_ids)
            answers.append(tokenizer(question.answer, add_special_tokens=False).input_ids)
    length = max(map(len, answers))
    warm = token_ids(tokenizer, other_text(), 6000)
    llm = engine(a.model, "full", enable_prefix_caching=True)
    settings = {"kernels": a.kernels, "calibration": a.calibration, "full_pages": 0, **json.loads(a.settings)}
    runs = {
        "FLASH_ATTN": run_engine(llm, prompts, settings=None, max_tokens=length, batches=(8,)),
        "kvskim": run_engine(llm, prompts, settings=settings, max_tokens=length, batches=(8,), warm_prompt=warm, activity=True),
    }
    right = {
        name: sum(output["tokens"][: len(answer)] == answer for output, answer in zip(run["outputs"], answers)) for name, run in runs.items()
    }
    sparse = runs["kvskim"]
    seen = sparse["activity"]
    share, covered = seen["attended"] / max(1, seen["total"]), seen["covered"] / max(1, seen["count"])
    agreement = compare(runs["FLASH_ATTN"], sparse)
    print("\n".join(sparse["log"]))
    print(table(["run", "right", "equal tokens", "pages attended", "mass covered"], [
        ["FLASH_ATTN", f"{right['FLASH_ATTN']}/{len(prompts)}", "", "100%", ""],
        ["kvskim", f"{right['kvskim']}/{len(prompts)}", f"{agreement.tokens:.1%}", f"{share:.1%}", f"{covered:.1%}"],
    ]))
    problems = []
    if right["FLASH_ATTN"] < len(prompts) // 4:
        problems.append("full attention answers too few questions for a comparison")
    if right["kvskim"] < right["FLASH_ATTN"] - 1:
        problems.append("kvskim answers fewer questions than full attention")
    if not sparse["ready"] or not 0 < share < 0.9:
        problems.append("decode was not sparse")
    return exit_status(problems)


if __name__ == "__main__":
    sys.exit(main())
