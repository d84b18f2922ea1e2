"""One vLLM engine of `kvskim eval ruler --engine vllm`: a process that answers all prompts with one method, under all settings.

``python -m kvskim.eval.ruler.engine_worker SPEC ROWS`` reads a pickled `Spec` and appends to the file ROWS one line of JSON about the engine, then one for
each group of prompts, and a last one.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from kvskim.config import publish, see_one_gpu
from kvskim.errors import KvskimError
from kvskim.eval.answers import ALL_PAGES, Answer, Scored
from kvskim.eval.methods import FULL, Method, Setting
from kvskim.eval.policy import CACHE_ELEMENT_BYTES
from kvskim.eval.ruler.run import Job
from kvskim.eval.sample import Question
from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.rules import RuleParameters
from kvskim.rules.parameters import DEFAULT_WINDOW_PAGES
from kvskim.selectors import get_selector

ROWS = 64
"""Requests that are decoded side by side: an eager step of a small model takes about as long for one as for so many."""
STEP_TOKENS = 16384
"""Most tokens of a step."""
GROUP_PROMPTS = 128
"""Most prompts of a group: what is lost where an engine is stopped."""
OUTPUT_SHARES = 3
"""Answers of so many settings have room beside the prompts of a group: vLLM takes the block that was left alone for the longest time, and those of a prompt
that waits for its turn must not be among the first."""
FORCED_PAGES = 1 + DEFAULT_WINDOW_PAGES
"""Sink and window: they need no record."""


@dataclass(frozen=True)
class Prompt:
    """The ``index``-th question of a sample. ``tokens``: int32, as the model reads them; ``limit``: most tokens of the answer."""

    job: Job
    index: int
    question: Question
    tokens: np.ndarray
    limit: int


@dataclass(frozen=True)
class Spec:
    """What an engine does.

    Attributes:
        model: folder.
        method: that answers.
        settings: rules, in this order; full attention has none.
        engine: settings of kvskim; None: vLLM's own attention.
        prompts: file with a pickled list of samples, each a list of `Prompt`.
        stop: tokens that end an answer.
        longest: most tokens of a prompt and its answer.
        weights: bytes of the model.
        head_dim: of the model.
        deadline: seconds of `time.time` after which no group is begun.
        gpu: index of the GPU among those that are visible.
        share: of the memory of that GPU.
    """

    model: str
    method: Method
    settings: tuple[Setting, ...]
    engine: dict[str, Any] | None
    prompts: str
    stop: tuple[int, ...]
    longest: int
    weights: int
    head_dim: int
    deadline: float
    gpu: int = 0
    share: float = 0.9


class Engine(Protocol):
    """What `kvskim.engines.vllm.answering.AnsweringEngine` is."""

    @property
    def capacity(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def use_rule(self, rule: RuleParameters, *, whole: bool = False) -> None: ...

    def answer(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], settled: Callable[[int, list[int]], bool] = ...) -> Any: ...


def groups_of(samples: Sequence[Sequence[Prompt]], room: int, block_size: int) -> list[list[Prompt]]:
    """Prompts that are answered under all settings before the next ones, in the order of their first samples.

    The prompts of a group fit the KV cache together, so that all settings but the first find them there. They are of one context, because what steps read is
    measured for the group as a whole. The questions of a sample stay together.

    Args:
        samples: in the order in which they are to be answered.
        room: tokens that fit the KV cache.
        block_size: tokens of a block.

    Raises:
        KvskimError: a sample alone does not fit.
    """
    groups: list[tuple[int, list[Prompt]]] = []
    going: dict[int, tuple[int, list[Prompt], int]] = {}
    for number, sample in enumerate(samples):
        context = sample[0].job.context
        needed = sum(len(prompt.tokens) + OUTPUT_SHARES * (prompt.limit + 2 * block_size) for prompt in sample)
        if needed > room:
            raise KvskimError(
                f"a sample of {context} tokens needs a KV cache of {needed} tokens, and that of an engine has room for {room}: use fewer --workers or a larger "
                "--gpu-memory"
            )
        first, group, taken = going.get(context, (number, [], 0))
        if group and (taken + needed > room or len(group) + len(sample) > GROUP_PROMPTS):
            groups.append((first, group))
            first, group, taken = number, [], 0
        going[context] = (first, [*group, *sample], taken + needed)
    groups += [(first, group) for first, group, _ in going.values()]
    return [group for _, group in sorted(groups, key=lambda found: found[0])]


def cut(tokens: Sequence[int], stop: Sequence[int], question: Question, text: Callable[[list[int]], str]) -> list[int]:
    """An answer as it would be if it were looked at after every token: up to a stop token, or to where no more can change its score."""
    found: list[int] = []
    for token in tokens:
        if token in stop:
            break
        found.append(token)
        if question.settled(text(found)):
            break
    return found


def answer_group(
    engine: Engine, group: Sequence[Prompt], method: Method, settings: Sequence[Setting], text: Callable[[list[int]], str], stop: Sequence[int], head_dim: int
) -> tuple[list[Scored], float | None]:
    """All answers of a method to a group of prompts, scored, and the share of the prompts' tokens that the settings found in the prefix cache.

    settings: none for full attention, and then no share.
    """
    # Those that may take long begin first, or a few of them would be decoded alone at the end.
    group = sorted(group, key=lambda prompt: -prompt.limit)
    prompts, limits = [prompt.tokens.tolist() for prompt in group], [prompt.limit for prompt in group]
    if settings:
        # Read before the first setting, all pages attended: so every setting finds the same, and no setting's rule is used on a piece of a prompt.
        engine.use_rule(settings[0].parameters, whole=True)
        engine.answer(prompts, [1] * len(prompts))
    rows: list[Scored] = []
    cached = total = 0

    def settled(index: int, tokens: list[int]) -> bool:
        return group[index].question.settled(text([token for token in tokens if token not in stop]))

    columns: Sequence[Setting | None] = settings or [None]
    for setting in columns:
        if setting is not None:
            engine.use_rule(setting.parameters)
        answered = engine.answer(prompts, limits, settled)
        cached, total = cached + answered.cached_tokens, total + answered.prompt_tokens
        for prompt, written in zip(group, answered.tokens, strict=True):
            said = text(cut(written, stop, prompt.question, text))
            pages, share, size = _read(method, len(prompt.tokens), answered.read, head_dim)
            answer = Answer(method.label, ALL_PAGES if setting is None else setting.label, said, pages, share, size)
            score = prompt.question.score(said)
            rows.append(Scored(prompt.job.task, prompt.job.context, prompt.job.number, prompt.index, len(prompt.tokens), score, answer))
    return rows, round(cached / max(1, total), 4) if settings else None


def _read(method: Method, tokens: int, read: Any, head_dim: int) -> tuple[float, float, float]:
    """Pages attended, their share, and bytes read, of one (layer, query, kv head), as `kvskim.eval.policy.PolicyStatistics` counts them.

    Full attention: of the prompt; a selector: of the mean step of the group, zeros where no answer had a second token.
    """
    page = 2 * PAGE_TOKENS * head_dim * CACHE_ELEMENT_BYTES
    if method.name == FULL:
        pages = float(ceil_div(tokens, PAGE_TOKENS))
        return pages, 1.0, pages * page
    if read is None:
        return 0.0, 0.0, 0.0
    records = get_selector(method.name, **dict(method.options)).bytes_per_page(head_dim)
    return read.pages, read.pages / read.total, read.pages * page + max(0.0, read.total - FORCED_PAGES) * records


def run(spec: Spec, engine: Engine, samples: Sequence[Sequence[Prompt]], text: Callable[[list[int]], str], now: Callable[[], float] = time.time) -> Iterator[
    dict[str, Any]
]:
    """One dict for each group: its rows, the share of prompt tokens found in the prefix cache, and how many groups there are; at the end ``finished``."""
    groups = groups_of(samples, engine.capacity, engine.block_size)
    for number, group in enumerate(groups):
        if now() > spec.deadline:
            break
        begun = time.perf_counter()
        rows, cached = answer_group(engine, group, spec.method, spec.settings, text, spec.stop, spec.head_dim)
        yield dict(
            group=number, groups=len(groups), prompts=len(group), cached=cached, seconds=round(time.perf_counter() - begun, 2),
            rows=[row.as_dict() for row in rows],
        )
    yield {"finished": True}


def _end_with_parent() -> None:
    """End this process when the one that started it ends, however it does: an engine that is left alone would hold its GPU."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: Sequence[str]) -> None:
    """Answer what the spec file says, and append the results to the file of rows."""
    _end_with_parent()
    spec: Spec = pickle.loads(Path(arguments[0]).read_bytes())
    # Read by vLLM and by kvskim's plugin, before either is imported.
    publish("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    publish("KVSKIM_DISABLE", "1" if spec.engine is None else "0")
    see_one_gpu(spec.gpu)
    # As many engines as cores may be under way: more threads would only wait for each other.
    torch.set_num_threads(1)
    from transformers import AutoTokenizer

    from kvskim.engines.vllm import answering

    begun = time.perf_counter()
    tokenizer: Any = AutoTokenizer.from_pretrained(spec.model, local_files_only=True)
    engine = answering.start(
        spec.model, spec.engine, longest=spec.longest, rows=ROWS, step_tokens=STEP_TOKENS, share=spec.share, weights=spec.weights, stop=spec.stop
    )
    samples: list[list[Prompt]] = pickle.loads(Path(spec.prompts).read_bytes())

    def text(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    with Path(arguments[1]).open("a", encoding="utf-8") as rows:

        def write(line: dict[str, Any]) -> None:
            rows.write(json.dumps(line) + "\n")
            rows.flush()

        write({"about": {**engine.about(), "capacity": engine.capacity, "start_seconds": round(time.perf_counter() - begun, 1)}})
        for line in run(spec, engine, samples, text):
            write(line)


if __name__ == "__main__":
    main(sys.argv[1:])
