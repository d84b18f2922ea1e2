"""Plays a vLLM engine for `kvskim eval ruler --engine vllm`: it knows the right answers, and a budget of fewer than `ENOUGH` pages makes it forget them.

As a program it takes the place of `kvskim.eval.ruler.engine_worker`: the engine of the selector minmax fails at its start, that of quad after its first group;
that of sketch does all it is asked and then hangs.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from kvskim.eval.ruler import engine_worker

ENOUGH = 8
STOP, FILLER = 2, 1
"""The first ends texts of the tiny model too."""
TOTAL_PAGES = 100


class PlayedEngine:
    """Words of references are tokens from 3 on. ``calls``: what it was asked, in order."""

    def __init__(self, samples, capacity=1 << 30, block_size=16):
        self.capacity, self.block_size = capacity, block_size
        self.words, self.right, self.calls, self.cache, self.rule = ["", "filler", ""], {}, [], set(), None
        for sample in samples:
            for prompt in sample:
                first = len(self.words)
                self.words += prompt.question.references
                # Prompts of a tokenizer with few words may be the same: then the answers to all of them are written.
                self.right.setdefault(prompt.tokens.tobytes(), []).extend(range(first, len(self.words)))

    def text(self, tokens):
        return " ".join(self.words[token] for token in tokens)

    def use_rule(self, rule, *, whole=False):
        self.rule = None if whole else rule
        self.calls.append("whole" if whole else rule.budget_pages or rule.tau)

    def answer(self, prompts, limits, settled=lambda index, tokens: False):
        import numpy as np

        keys = [np.array(ids, dtype=np.int32).tobytes() for ids in prompts]
        self.calls.append(len(prompts))
        forgets = self.rule is not None and (self.rule.budget_pages or ENOUGH) < ENOUGH
        out = []
        for index, (key, limit) in enumerate(zip(keys, limits)):
            whole = [FILLER, STOP] if forgets else [FILLER, *self.right[key], *[FILLER] * 200]
            written = []
            while len(written) < limit and STOP not in written and not (len(written) % 4 == 0 and settled(index, written)):
                written.append(whole[len(written)])
            out.append(written)
        cached = sum(len(ids) // 16 * 16 for key, ids in zip(keys, prompts) if key in self.cache)
        self.cache.update(keys)
        pages = (self.rule.budget_pages or 12) if self.rule else 0
        return SimpleNamespace(
            tokens=out, prompt_tokens=sum(map(len, prompts)), cached_tokens=cached,
            read=SimpleNamespace(pages=float(pages), total=float(TOTAL_PAGES)) if pages else None,
        )


def main(spec_file, rows_file):
    spec = pickle.loads(Path(spec_file).read_bytes())
    if spec.method.name == "minmax":
        raise RuntimeError("out of memory, as a real engine may be")
    samples = pickle.loads(Path(spec.prompts).read_bytes())
    engine = PlayedEngine(samples)
    assert spec.engine is None or Path(spec.engine["calibration"]).is_file()
    about = {"engine": "vllm 0.0", "device": "a GPU", "torch": "2", "dtype": "bfloat16", "capacity": engine.capacity, "start_seconds": 0.0}
    about["place"] = [spec.gpu, spec.share]
    with Path(rows_file).open("a") as rows:
        rows.write(json.dumps({"about": about}) + "\n")
        for line in engine_worker.run(spec, engine, samples, engine.text):
            if spec.method.name == "quad" and line.get("group"):
                rows.write('{"group": 1, "rows": [')
                rows.flush()
                sys.exit(3)
            rows.write(json.dumps(line) + "\n")
            rows.flush()


    if spec.method.name == "sketch":
        # An engine that does not come to its end.
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
