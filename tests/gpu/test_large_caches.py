"""Requests of four million tokens and caches beyond 2^31: all operations in one step, on a GPU.

The memory that such caches take is mostly not needed: pages of a long request may be the same few physical pages again and again, and blocks of K and
V may all lie at one place (a stride of zero) where only the records are far apart.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from encode_cases import POISON, EncodeCase
from kvskim.layout import PAGE_TOKENS
from kvskim.ops.attend import attend
from kvskim.ops.cuda.library import availability
from kvskim.ops.encode import encode
from kvskim.rules import RuleParameters
from kvskim.selectors import SELECTORS
from step_data import Batch, make_batch
from test_step import run_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

on_hopper = pytest.mark.skipif(not (torch.cuda.is_available() and availability()[0]), reason="needs the CUDA library and its GPU")
KERNELS = [pytest.param("cuda", marks=on_hopper), "triton"]
DEVICE = "cuda"
TOKENS = 2**22
LARGEST_INT = 2**31
BUDGET = RuleParameters(rule="budget", budget_pages=128, min_pages=0)
selectors = pytest.mark.parametrize("selector", [name for name in SELECTORS if name != "oracle"])


def long_batch(selector: str, tokens: int) -> Batch:
    """One request of so many tokens whose blocks are 64 physical ones in random order, many times each."""
    batch = make_batch(selector, [64 * 128], heads=1, group=8, dim=64, block_size=128, dtype=torch.bfloat16, sharpness=1.0)
    generator = torch.Generator().manual_seed(1)
    choice = torch.randint(64, (-(-tokens // 128),), generator=generator)
    return replace(batch, block_table=batch.block_table[:, choice].contiguous(), seq_lens=torch.tensor([tokens], dtype=torch.int32))


@selectors
@pytest.mark.parametrize("kernels", KERNELS)
def test_four_million_tokens(selector: str, kernels: str) -> None:
    batch = long_batch(selector, TOKENS - 5)
    blocks = batch.block_table.shape[1]
    far = batch.to(DEVICE)
    out, lse, buffers = run_step(far, BUDGET, kernels=kernels)

    # Scores of 32 blocks from one end to the other, which as a request of their own are scored in float32.
    sample = torch.cat([torch.tensor([0, 1, blocks - 2]), torch.randint(blocks - 1, (29,), generator=torch.Generator().manual_seed(2))])
    table = batch.block_table[:, [*sample.tolist(), blocks - 1]].contiguous()
    few = replace(batch, block_table=table, seq_lens=torch.tensor([32 * 128 + 123], dtype=torch.int32))
    _, _, wanted = run_step(few, BUDGET)
    pages = (sample[:, None] * 8 + torch.arange(8)).flatten()
    scores, exact = buffers.scores[0, 0, pages.to(DEVICE), :8].float().cpu(), wanted.scores[0, 0, : 32 * 8, :8].float()
    assert bool(((scores - exact).abs() <= 0.04 + exact.abs() * 2.0**-10).all()), float((scores - exact).abs().max())

    # The same physical page has the same score wherever it stands, and of equal ones the first are selected.
    assert buffers.counts.tolist() == [[128]]
    chosen = buffers.pages[0, 0, :128].long().cpu()
    total = -(-(TOKENS - 5) // PAGE_TOKENS)
    assert bool((chosen.diff() > 0).all())
    assert (int(chosen[0]), int(chosen[-1])) == (0, total - 1)
    physical = batch.block_table[0].long().repeat_interleave(8)[:total] * 8 + torch.arange(total) % 8
    selected = torch.zeros(total, dtype=torch.bool)
    selected[chosen] = True
    for page in {int(physical[p]) for p in chosen[1:-1]}:
        copies = selected[1:-1][physical[1:-1] == page]
        assert bool((copies.int().diff() <= 0).all()), f"a later copy of page {page} is selected and an earlier one is not"

    wide = replace(far, query=far.query.float(), key_cache=far.key_cache.float(), value_cache=far.value_cache.float())
    expected, expected_lse = torch.empty_like(wide.query), torch.empty_like(lse)
    attend(
        wide.query, wide.key_cache, wide.value_cache, wide.block_table, wide.seq_lens, buffers.pages, buffers.counts, scale=far.scale, out=expected,
        lse=expected_lse, scratch=None, kernels="torch",
    )
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-3)


@selectors
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_step_reads_records_beyond_two_gigabytes(selector: str, kernels: str) -> None:
    """The same step with its blocks at the low and at the high end of the records."""
    small = make_batch(selector, [3000, 17, 0, 1600], heads=8, group=4, dim=64, block_size=64, dtype=torch.bfloat16).to(DEVICE)
    blocks, page_bytes = small.key_cache.shape[0], small.records[0].numel()
    many = LARGEST_INT // (4 * page_bytes) + 2 * blocks
    near = replace(small, key_cache=small.key_cache[:1].expand(blocks, -1, -1, -1), value_cache=small.value_cache[:1].expand(blocks, -1, -1, -1))
    records = torch.empty(many * 4, *small.records.shape[1:], dtype=torch.uint8, device=DEVICE)
    records[-4 * blocks :] = small.records
    assert records.numel() - blocks * 4 * page_bytes > LARGEST_INT
    table = torch.where(small.block_table < blocks, small.block_table + (many - blocks), small.block_table)
    far = replace(
        small, key_cache=small.key_cache[:1].expand(many, -1, -1, -1), value_cache=small.value_cache[:1].expand(many, -1, -1, -1), records=records,
        block_table=table,
    )
    rule = RuleParameters(rule="budget", budget_pages=24, min_pages=0)
    out, lse, buffers = run_step(far, rule, kernels=kernels)
    expected, expected_lse, wanted = run_step(near, rule, kernels=kernels)
    assert torch.equal(buffers.counts, wanted.counts)
    assert torch.equal(buffers.pages[0, :, :24], wanted.pages[0, :, :24])
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("selector", ["sketch", "rki4", "minmax"])
def test_encode_writes_records_beyond_two_gigabytes(selector: str, kernels: str) -> None:
    case = EncodeCase(selector, dim=128, heads=8, block_size=64, blocks=4, device=DEVICE)
    slots = [15, 47, 63, 128 + 31]  # pages 0, 2, 3 and 9 of 16
    case.run(slots, kernels)
    assert case.problems(slots) == []
    many = LARGEST_INT // case.records[0].numel() // 4 + 8
    for block, pages in ((0, (0, 2, 3)), (2, (9,))):
        records = torch.full((4 * many, *case.records.shape[1:]), POISON, dtype=torch.uint8, device=DEVICE)
        first = records.shape[0] - 4
        assert first * records[0].numel() > LARGEST_INT
        places = [first + page % 4 for page in pages]
        keys, last_slots = case.key_cache[block : block + 1].expand(many, -1, -1, -1), case.slots([16 * place + 15 for place in places])
        encode(case.selector, case.tables, keys, last_slots, records, kernels=kernels)
        assert torch.equal(records[places], case.records[list(pages)])
        written = (records != POISON).flatten(1).any(1).nonzero().flatten().tolist()
        assert written == places


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("selector", ["sketch", "rki4", "minmax"])
def test_encode_reads_keys_beyond_32_bits(selector: str, kernels: str) -> None:
    """A cache of more than 2^32 elements, four million tokens of eight kv heads, whose last blocks are used."""
    case = EncodeCase(selector, dim=128, heads=8, block_size=64, blocks=3, device=DEVICE)
    blocks = 2 * LARGEST_INT // (64 * 8 * 128) + 64
    cache = torch.empty(blocks, 64, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    used = [blocks - 1, 5, blocks - 9]
    cache[used] = case.key_cache
    slots = [page * 16 + 15 for page in range(12)]
    case.run(slots, kernels)
    assert case.problems(slots) == []
    records = torch.full((blocks * 4, *case.records.shape[1:]), POISON, dtype=torch.uint8, device=DEVICE)
    far = [used[page // 4] * 4 + page % 4 for page in range(12)]
    encode(case.selector, case.tables, cache, case.slots([page * 16 + 15 for page in far]), records, kernels=kernels)
    assert torch.equal(records[far], case.records)
    assert int((records != POISON).flatten(1).any(1).sum()) == 12
