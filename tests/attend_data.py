"""Random inputs of attend with everything that must not be read poisoned, and its definition as slow loops in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvskim.ops.attend import attend, required_partials

GUARD = 64
SENTINEL = 12345.0
FP8 = torch.float8_e4m3fn


@dataclass
class Case:
    """Arguments of attend. `inputs` are the positional ones, `options` scale, softcap, k_scale and v_scale."""

    inputs: dict[str, Tensor]
    options: dict[str, float]


def make_case(
    lengths: list[int], *, seed: int = 0, heads: int = 2, group: int = 4, dim: int = 64, dtype: torch.dtype = torch.bfloat16, fp8: bool = False,
    block_size: int = 32, layout: str = "split", select: str = "mixed", capacity: int | None = None, softcap: float = 0.0, logit_scale: float = 1.0,
    device: str = "cpu",
) -> Case:
    """Caches of both vLLM layouts with NaN in every token that is not written, block tables and page tables with absurd unused entries.

    layout: split ``[blocks, 2, block_size, H, D]``, permuted (the same with heads before tokens in memory) or packed ``[blocks, H, block_size, 2 D]``.
    select: identity; with_open or without_open (random ascending pages with or without the last); mixed (one of these per row);
    single (one page).
    """
    rng = torch.Generator().manual_seed(seed)
    requests = len(lengths)
    columns = max(1, max((-(-n // block_size) for n in lengths), default=1)) + 1
    blocks = sum(-(-n // block_size) for n in lengths) + 3
    width = 2 * dim
    if layout == "packed":
        cache = torch.full((blocks, heads, block_size, width), math.nan)
        keys, values = cache.transpose(1, 2).split(dim, -1)
    elif layout == "permuted":
        cache = torch.full((blocks, 2, heads, block_size, dim), math.nan)
        keys, values = cache.transpose(2, 3).unbind(1)
    else:
        cache = torch.full((blocks, 2, block_size, heads, dim), math.nan)
        keys, values = cache.unbind(1)
    order = torch.randperm(blocks, generator=rng)
    table = torch.full((requests, columns), 2**30, dtype=torch.int32)
    used = 0
    for r, length in enumerate(lengths):
        for b in range(-(-length // block_size)):
            block = int(order[used])
            used += 1
            table[r, b] = block
            live = min(block_size, length - b * block_size)
            keys[block, :live] = torch.randn(live, heads, dim, generator=rng)
            values[block, :live] = torch.randn(live, heads, dim, generator=rng) + 0.5
    totals = [-(-n // 16) for n in lengths]
    capacity = capacity or max([1, *totals])
    pages = torch.full((requests, heads, capacity), -(2**30), dtype=torch.int32)
    counts = torch.zeros(requests, heads, dtype=torch.int32)
    for r, total in enumerate(totals):
        for h in range(heads):
            how = select if select != "mixed" else ("identity", "with_open", "without_open", "single")[int(torch.randint(4, (1,), generator=rng))]
            chosen = _choose(how, total, capacity, rng)
            counts[r, h] = total if how == "identity" else len(chosen)
            if how != "identity" and len(chosen) < total:
                pages[r, h, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    stored = cache.to(FP8) if fp8 else cache.to(dtype)
    query = (torch.randn(requests, heads * group, dim, generator=rng) * logit_scale).to(dtype)
    stored = stored.to(device)
    inputs = dict(query=query, block_table=table, seq_lens=torch.tensor(lengths, dtype=torch.int32), pages=pages, counts=counts)
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    inputs["key_cache"] = stored.as_strided(keys.shape, keys.stride(), keys.storage_offset())
    inputs["value_cache"] = stored.as_strided(values.shape, values.stride(), values.storage_offset())
    options = dict(scale=dim**-0.5, softcap=softcap, k_scale=0.75 if fp8 else 1.0, v_scale=1.5 if fp8 else 1.0)
    return Case(inputs, options)


def _choose(how: str, total: int, capacity: int, rng: torch.Generator) -> list[int]:
    if total == 0 or how == "identity":
        return []
    if how == "single":
        return [int(torch.randint(total, (1,), generator=rng))]
    candidates = total - 1
    wanted = min(capacity - 1, int(torch.randint(candidates + 1, (1,), generator=rng))) if candidates else 0
    chosen = torch.randperm(candidates, generator=rng)[:wanted].tolist() if candidates else []
    if how == "with_open" or not chosen:
        chosen.append(total - 1)
    return sorted(chosen)


def expected(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and ``sum_t p_t |v_t|`` (the size that errors are relative to), float64 on the CPU."""
    i = {name: tensor.cpu() for name, tensor in case.inputs.items()}
    query = i["query"].double()
    requests, query_heads, _ = query.shape
    size, heads = i["key_cache"].shape[1], i["key_cache"].shape[2]
    group = query_heads // heads
    out, magnitude = torch.zeros_like(query), torch.zeros_like(query)
    lse = torch.full((requests, query_heads), -math.inf, dtype=torch.float64)
    for r in range(requests):
        length = int(i["seq_lens"][r])
        total = -(-length // 16)
        for h in range(heads):
            count = int(i["counts"][r, h])
            if total == 0 or count == 0:
                continue
            listed = range(total) if count == total else i["pages"][r, h, :count].tolist()
            positions = torch.tensor([p for page in listed for p in range(page * 16, min(page * 16 + 16, length))])
            block = i["block_table"][r, positions // size].long()
            k = i["key_cache"][:, :, h].to(torch.float32)[block, positions % size].double() * case.options["k_scale"]
            v = i["value_cache"][:, :, h].to(torch.float32)[block, positions % size].double() * case.options["v_scale"]
            rows = slice(h * group, (h + 1) * group)
            x = case.options["scale"] * query[r, rows] @ k.T
            if case.options["softcap"]:
                x = case.options["softcap"] * torch.tanh(x / case.options["softcap"])
            lse[r, rows] = torch.logsumexp(x, -1)
            p = torch.softmax(x, -1)
            out[r, rows], magnitude[r, rows] = p @ v, p @ v.abs()
    return out, lse, magnitude


class Buffers:
    """Poisoned out, lse and scratch, each with guard regions that must keep their content."""

    def __init__(self, case: Case) -> None:
        query = case.inputs["query"]
        need = required_partials(query, case.inputs["key_cache"], case.inputs["value_cache"], case.inputs["block_table"])
        pairs = query.shape[0] * case.inputs["key_cache"].shape[2]
        self.whole: list[Tensor] = []
        self.out = self._guarded(query.numel(), query.dtype, query.device, math.nan).view(query.shape)
        self.lse = self._guarded(query.shape[0] * query.shape[1], torch.float32, query.device, math.nan).view(query.shape[:2])
        self.scratch: Any = SimpleNamespace(
            attend_partials=self._guarded(need, torch.float32, query.device, math.nan),
            attend_tickets=self._guarded(pairs, torch.int32, query.device, 0),
        )

    def _guarded(self, elements: int, dtype: torch.dtype, device: torch.device, poison: float) -> Tensor:
        whole = torch.full((elements + 2 * GUARD,), SENTINEL, device=device).to(dtype)
        whole[GUARD : GUARD + elements] = poison
        self.whole.append(whole)
        return whole[GUARD : GUARD + elements]

    def check_guards(self) -> None:
        for whole in self.whole:
            sentinel = torch.full((GUARD,), SENTINEL, device=whole.device).to(whole.dtype)
            assert torch.equal(whole[:GUARD], sentinel)
            assert torch.equal(whole[-GUARD:], sentinel)
        assert not self.scratch.attend_tickets.any()


def run(case: Case, kernels: str, *, buffers: Buffers | None = None, **keywords: Any) -> Buffers:
    buffers = buffers or Buffers(case)
    attend(**case.inputs, **case.options, out=buffers.out, lse=buffers.lse, scratch=buffers.scratch, kernels=kernels, **keywords)  # type: ignore[arg-type]
    return buffers


def check(case: Case, buffers: Buffers, *, lse_tolerance: float = 1e-3, truncated: bool = False) -> None:
    """Errors within what rounding of the weights and of the result to the query's dtype explains.

    truncated: bfloat16 numbers are cut off instead of rounded, as Triton's interpreter does.
    """
    out, lse, magnitude = expected(case)
    relative = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 2e-5, torch.float64: 1e-9}[case.inputs["query"].dtype]
    if truncated and case.inputs["query"].dtype == torch.bfloat16:
        relative *= 2
    error = (buffers.out.cpu().double() - out).abs()
    limit = relative * magnitude + 1e-6
    assert bool((error <= limit).all()), f"largest error {float((error / limit).nan_to_num(1e9).max()):.3g} times the limit"
    got = buffers.lse.cpu().double()
    assert torch.equal(torch.isneginf(got), torch.isneginf(lse))
    difference = torch.where(torch.isneginf(lse), 0.0, got - lse).abs()
    assert bool((difference <= lse_tolerance * (1 + lse.abs().clamp(max=1e4) * 1e-3)).all()), f"lse off by {float(difference.nan_to_num(1e9).max()):.3g}"
    buffers.check_guards()
