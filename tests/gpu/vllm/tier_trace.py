"""What an engine computes, step by step, so that two engines can be told apart where they first differ and not where the first token does.

After each step these stay on the device: of every running request the sum of its newest key in each layer, the estimated mass that each decode row of each
layer has selected, and the sum of each layer's records. A layer whose newest keys are equal and whose masses are not read something else when it scored;
one whose newest keys differ got them from the attention of the layer ahead. Of a host tier, copies that the last fetch has used are compared with the
host, as the GPU reads it, in every few steps: one that is wrong for a moment is not there any more at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvskim.layout import PAGE_TOKENS
from kvskim.tier.pages import HostTier

if TYPE_CHECKING:
    from kvskim.engines.vllm.state import SkimState

Step = dict[str, Tensor]

PAGES = 6000
"""Whose records are summed, so that engines with other numbers of blocks compare: blocks are given out from the first on."""

EVERY = 4
"""Steps from one look at the copies to the next."""

MOST_COPIES = 2048
"""Of a layer, compared at once: more than 32 rows of three kv heads with 16 pages each use."""


class Trace:
    """Of one engine in this process, with blocks of 16 tokens, whose requests were named by `kvskim.engines.vllm.probe.generate`."""

    def __init__(self, llm: Any, state: SkimState) -> None:
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._state = state
        self._layers = list(state.layers.values())
        self._tiers = [(layer.tier, layer.tier.pool) for layer in self._layers if layer.tier is not None]
        self._at_first = self._record_sums()
        self.steps: list[Step] = []

    def after_step(self) -> None:
        """Keep what the step has computed; waits for nothing."""
        running = sorted((prompt_of(name), r.num_computed_tokens, name) for name, r in self._scheduler.requests.items() if r.num_computed_tokens)
        slots = []
        for _, computed, name in running:
            blocks = self._scheduler.kv_cache_manager.get_block_ids(name)[0]
            slots.append(blocks[(computed - 1) // PAGE_TOKENS] * PAGE_TOKENS + (computed - 1) % PAGE_TOKENS)
        lengths = self._state.last_lengths
        rows = 0 if lengths is None else lengths.shape[0]
        looks = self._tiers if len(self.steps) % EVERY == 0 else []
        self.steps.append(dict(
            requests=torch.tensor([entry[:2] for entry in running], dtype=torch.int64).view(-1, 2),
            lengths=torch.zeros(0, dtype=torch.int32) if lengths is None else lengths.clone(),
            keys=self._key_sums(slots),
            masses=torch.stack([layer.covered[:rows] for layer in self._layers]).view(torch.int32),
            records=self._record_sums() - self._at_first,
            untrue=torch.stack([untrue_in_use(tier, pool) for tier, pool in looks]) if looks else torch.zeros(0, dtype=torch.int64),
        ))

    def save(self, path: str) -> int:
        """To a file; returns how many copies were found that are not those on the host."""
        steps = [{name: tensor.cpu() for name, tensor in step.items()} for step in self.steps]
        torch.save(steps, path)
        return sum(int(step["untrue"].sum()) for step in steps)

    def _key_sums(self, slots: list[int]) -> Tensor:
        """int64 ``[layers, requests]``: sums of the bits of the keys in these slots."""
        caches = [layer.caches()[0] for layer in self._layers]
        where = torch.tensor(slots, dtype=torch.int64).to(caches[0].device)
        return torch.stack([bits(cache[where // PAGE_TOKENS, where % PAGE_TOKENS]).flatten(1).sum(1) for cache in caches])

    def _record_sums(self) -> Tensor:
        """int64 ``[layers]``."""
        records = [layer.records.records[:PAGES].reshape(-1) for layer in self._layers]
        return torch.stack([part[: len(part) // 4 * 4].view(torch.int32).sum(dtype=torch.int64) for part in records])


def prompt_of(name: str) -> int:
    """The number of a prompt, from the name of its request: 32 digits of the run, and six of the prompt."""
    return int(name[33:39])


def bits(rows: Tensor) -> Tensor:
    """The same as integers, so that a NaN equals itself."""
    return rows.view({2: torch.int16, 4: torch.int32}[rows.element_size()])


def untrue_in_use(tier: HostTier, pool: Tensor) -> Tensor:
    """int64 ``[]``: slots of the last fetch whose content is not that of ``pool`` ``[pages, H, P, 16, D]``, or that the directory does not know."""
    stamp, slot = tier.stamp.topk(min(tier.slots, MOST_COPIES))
    key = tier.owner[slot].long()
    used = (key >= 0) & (stamp == tier.clock - 1)
    key = torch.where(used, key, 0)
    differ = (bits(pool.view(-1, *tier.hot.shape[1:])[key]) != bits(tier.hot[slot])).flatten(1).any(1) | (tier.directory.view(-1)[key] != slot + 1)
    return (differ & used).sum()


def compare(own: list[Step], reference: list[Step]) -> str | None:
    """Where two engines first differ, in one sentence; None: nowhere."""
    for number, (a, b) in enumerate(zip(own, reference)):
        if not torch.equal(a["requests"], b["requests"]) or a["lengths"].shape != b["lengths"].shape:
            return f"step {number} has other requests or tokens: {_size_of(a)}, and {_size_of(b)}"
        places = {name: (a[name] != b[name]).nonzero() for name in ("keys", "masses", "records")}
        layer = min((int(place[0, 0]) for place in places.values() if len(place)), default=None)
        if layer is None:
            continue
        keys, masses, records = ([rest for first, *rest in place.tolist() if first == layer] for place in places.values())
        parts = []
        if keys:
            prompts = [f"{prompt} ({tokens} tokens)" for prompt, tokens in a["requests"][[k for (k,) in keys[:4]]].tolist()]
            parts.append(f"the newest keys of {len(keys)} requests: prompts {', '.join(prompts)}")
        if masses:
            row, head = masses[0]
            mine, other = (float(x["masses"][layer, row, head].view(torch.float32)) for x in (a, b))
            parts.append(f"{len(masses)} masses: of row {row} ({int(a['lengths'][row])} tokens), kv head {head}, {mine:.9g} and {other:.9g}")
        if records:
            parts.append("records")
        return f"step {number} ({_size_of(a)}) first, in layer {layer}: {'; '.join(parts)}"
    return None if len(own) == len(reference) else f"{len(own)} steps, and {len(reference)}"


def _size_of(step: Step) -> str:
    return f"{len(step['requests'])} requests, {int((step['lengths'] > 0).sum())} of them decoded"
