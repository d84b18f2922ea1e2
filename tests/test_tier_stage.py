"""Contexts whose values, or keys and values, are in host memory, copied together for the attention of prompts."""

from __future__ import annotations

import importlib
import math
import os
from typing import Any

import pytest
import torch

from kvskim.ops.stage import stage
from kvskim.tier.pages import HostTier, make_tier
from tier_data import Sizes, pages_of, poisoned_tier

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
IMPLEMENTATIONS = ["torch", pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1"))]
DIM = 24


def filled(blocks: int, block_size: int, parts: int) -> tuple[torch.Tensor, torch.Tensor, HostTier]:
    """Keys with strides of another order, values, and a tier of values, or of both, with pages 6 and 7 of kv head 1 hot and nowhere else."""
    keys = torch.randn(blocks, 2, block_size, DIM).transpose(1, 2)
    values = torch.randn(blocks, block_size, 2, DIM)
    tier = make_tier(pages_of(*(keys.contiguous(), values)[2 - parts :]), 3, "cpu")
    for page, slot in ((6, 2), (7, 0)):
        tier.directory[page, 1], tier.owner[slot] = slot + 1, page * 2 + 1
        tier.hot[slot] = tier.host[page, 1]
        tier.host[page, 1] = math.nan
    return keys, values, tier


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("parts", [1, 2])
def test_contexts_come_together_in_the_order_of_their_tokens(kernels: str, block_size: int, parts: int) -> None:
    blocks = 512 // block_size
    keys, values, tier = filled(blocks, block_size, parts)
    # A prompt with three blocks and more to come, a new prompt, a row without tokens, a short context, and a whole block.
    contexts = [2 * block_size + 17, 0, 0, 5, block_size]
    room = [4, 2, 0, 1, 1]
    order = torch.randperm(blocks)
    table = torch.full((5, 6), 2**30, dtype=torch.int32)
    for row, context in enumerate(contexts):
        used = -(-context // block_size)
        table[row, :used] = order[row : row + used]
    table[0, 1:3] = torch.tensor([6, 7] if block_size == 16 else [1, 0])  # the blocks of the hot pages
    starts = torch.tensor([0, *torch.tensor(room).cumsum(0).tolist()], dtype=torch.int32)
    staged = torch.full((9, 2, block_size, 2, DIM), 9.0)
    stage(tier, keys if parts == 1 else None, table, torch.tensor(contexts, dtype=torch.int32), starts, staged, blocks=8, kernels=kernels)
    written = torch.zeros(9, block_size, dtype=torch.bool)
    for row, context in enumerate(contexts):
        for token in range(context):
            own, block = int(starts[row]) + token // block_size, int(table[row, token // block_size])
            assert torch.equal(staged[own, 0, token % block_size], keys[block, token % block_size])
            assert torch.equal(staged[own, 1, token % block_size], values[block, token % block_size])
        for page in range(-(-context // 16)):
            written[int(starts[row]) + page * 16 // block_size, page * 16 % block_size :][:16] = True
    assert (staged.transpose(1, 2)[~written] == 9.0).all(), "nothing is written beyond the pages of a context"


def arguments(**changes: Any) -> dict[str, Any]:
    sizes = Sizes()
    given: dict[str, Any] = dict(
        tier=poisoned_tier(sizes, 2), key_cache=torch.zeros(sizes.blocks, 32, 2, 16), block_table=torch.zeros(1, 2, dtype=torch.int32),
        context_lens=torch.ones(1, dtype=torch.int32), starts=torch.tensor([0, 1], dtype=torch.int32), staged=torch.zeros(3, 2, 32, 2, 16), blocks=1,
        kernels="torch",
    )
    return given | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(staged=torch.zeros(3, 32, 2, 16)), "staged is"),
        (dict(staged=torch.zeros(3, 2, 32, 2, 16, dtype=torch.float16)), "staged is"),
        (dict(staged=torch.zeros(3, 2, 32, 2, 32)[..., ::2]), "staged is"),
        (dict(blocks=4), "4 blocks .* room for 3"),
        (dict(block_table=torch.zeros(1, 2, dtype=torch.int64)), "block_table is"),
        (dict(block_table=torch.zeros(1, 4, dtype=torch.int32)[:, ::2]), "block_table must be contiguous"),
        (dict(context_lens=torch.ones(2, dtype=torch.int32)), "is torch.int32"),
        (dict(starts=torch.zeros(1, dtype=torch.int32)), "starts is"),
        (dict(key_cache=torch.zeros(9, 16, 2, 16)), "the tier holds"),
        (dict(kernels="numpy"), "kernels is"),
        (dict(key_cache=None), "pass key_cache"),
        (dict(tier=poisoned_tier(Sizes(), 2, parts=2)), "leave key_cache out"),
        (dict(tier=poisoned_tier(Sizes(), 2, parts=2), key_cache=None, staged=torch.zeros(3, 2, 24, 2, 16)), "staged is"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    stage(**arguments())
    with pytest.raises(ValueError, match=message):
        stage(**arguments(**changes))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_few_prompts_share_one_compiled_kernel() -> None:
    """While serving, no prompt that comes along with up to 15 others waits for a compiler."""
    from kvskim.ops.triton.host_stage import padded_rows

    assert {padded_rows(rows) for rows in range(1, 17)} == {16}
    assert [padded_rows(rows) for rows in (17, 32, 33)] == [32, 32, 64]
