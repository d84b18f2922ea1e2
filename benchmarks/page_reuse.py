"""How many of the pages that a decode step selects are not in a hot cache of a given size, on real attention; on a CPU, in about a minute.

    python benchmarks/page_reuse.py [MODEL]       a folder, a GGUF file, or nothing for the model of `kvskim demo`

The model decodes a text after 6,144 tokens of it, with full attention. Every third layer's exact page masses give what the threshold rule would select. A
hot cache of each layer, least recently used, has as many slots as so many average selections of the layer have pages. "ahead": after each step the pages
that miss the threshold by less than a factor of two are copied too, so that they are there should the next step select them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import torch
from torch import Tensor

from kvskim.demo.text import reference_text, tokenize
from kvskim.eval.model import EvalModel, load_named
from kvskim.eval.policy import Policy, page_log_mass
from kvskim.layout import PAGE_TOKENS, ceil_div

CONTEXT, STEPS, SKIPPED = 6144, 192, 48
"""Tokens before the first step, steps, and steps that fill the hot cache and are not counted."""
SINK_PAGES, WINDOW_PAGES, MIN_PAGES = 1, 2, 8
NEAR = 0.5
Page = tuple[int, int]
"""kv head, page."""


class Masses(Policy):
    """Full attention that keeps the exact mass of every page: float32 ``[steps, kv heads, pages]`` for each third layer."""

    def __init__(self, model: EvalModel) -> None:
        super().__init__()
        self.found: dict[int, list[Tensor]] = {layer: [] for layer in model.sparse_layers[::3]}

    def choose(self, layer: int, queries: Tensor, keys: Tensor, position: int, causal: Tensor) -> Tensor:
        pages = ceil_div(keys.shape[1], PAGE_TOKENS)
        if layer in self.found:
            mass = page_log_mass(queries, keys, causal).softmax(2).mean(-1)
            self.found[layer].append(torch.nn.functional.pad(mass, (0, ceil_div(CONTEXT + STEPS, PAGE_TOKENS) - pages)))
        return torch.ones(queries.shape[0], queries.shape[1], pages, dtype=torch.bool)


def selected(masses: Tensor, step: int, tau: float) -> set[Page]:
    """What the threshold rule selects of ``masses [kv heads, pages]``."""
    total = (CONTEXT + step) // PAGE_TOKENS + 1
    result = set()
    for head, mass in enumerate(masses):
        candidates = mass[SINK_PAGES : total - WINDOW_PAGES]
        count = max(int((candidates >= tau).sum()), MIN_PAGES)
        chosen = (candidates.topk(count).indices + SINK_PAGES).tolist()
        result |= {(head, page) for page in [*range(SINK_PAGES), *chosen, *range(total - WINDOW_PAGES, total)]}
    return result


def missing(selections: list[set[Page]], near: list[set[Page]] | None, slots: int) -> tuple[int, int]:
    """Pages that were not hot when they were selected, and pages that were copied ahead."""
    hot: OrderedDict[Page, None] = OrderedDict()
    missed = ahead = 0
    for step, wanted in enumerate(selections):
        late = len(wanted - hot.keys())
        early = near[step] - wanted if near is not None else set()
        if step >= SKIPPED:
            missed, ahead = missed + late, ahead + len(early - hot.keys())
        for page in [*sorted(early), *sorted(wanted)]:
            hot[page] = None
            hot.move_to_end(page)
        while len(hot) > slots:
            hot.popitem(last=False)
    return missed, ahead


def main() -> None:
    torch.set_num_threads(1)
    model = load_named(sys.argv[1] if len(sys.argv) > 1 else "demo")
    ids = torch.tensor(tokenize(model.tokenizer, reference_text()))[: CONTEXT + STEPS]
    model.reserve(CONTEXT + STEPS)
    model.prefill(ids[:CONTEXT], chunk=512)
    policy = Masses(model)
    model.decode(ids, CONTEXT, CONTEXT + STEPS, policy)
    print("tau    slots / selection  missing  missing, with copies ahead  copied ahead")
    for tau in (0.007, 0.002):
        layers = []
        for parts in policy.found.values():
            masses = torch.cat(parts)
            layers.append([[selected(masses[step], step, threshold) for step in range(STEPS)] for threshold in (tau, tau * NEAR)])
        for share in (1.2, 2.0, 4.0, 8.0):
            plain = with_near = copied = total = 0
            for selections, near in layers:
                slots = int(share * sum(map(len, selections)) / STEPS)
                plain += missing(selections, None, slots)[0]
                late, ahead = missing(selections, near, slots)
                with_near, copied = with_near + late, copied + ahead
                total += sum(map(len, selections[SKIPPED:]))
            print(f"{tau:<5}  {share:<17g}  {plain / total:<7.1%}  {with_near / total:<26.1%}  {copied / total:.1%}")


if __name__ == "__main__":
    main()
