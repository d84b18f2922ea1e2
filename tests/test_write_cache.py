"""The op write_cache in torch, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from kvskim.ops.cuda.write_cache import write_kernel_serves
from kvskim.ops.write_cache import write_cache
from tier_data import Sizes, poisoned_tier
from write_cases import POISON, TierCase, expected, layouts, rows_of, slots_of


@pytest.mark.parametrize("layout", ["apart", "one row", "heads first", "pairs"])
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17])
def test_rows_go_where_their_slots_say(tokens: int, layout: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    key_cache, value_cache = layouts(5, 16, 3, 8, 8, torch.float32, "cpu")[layout]
    keys, values = (torch.randn(tokens + 2, 3, 8, generator=generator) for _ in range(2))
    slots = slots_of(tokens, 5, 16, generator)
    after = expected(keys, key_cache, slots), expected(values, value_cache, slots)
    assert write_cache(keys, values, key_cache, value_cache, slots, kernels="torch")
    assert torch.equal(key_cache, after[0])
    assert torch.equal(value_cache, after[1])


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17])
@pytest.mark.parametrize(("parts", "size"), [(1, 16), (1, 48), (2, 16)])
def test_rows_of_a_tier_go_to_its_pool_and_to_its_hot_copies(parts: int, size: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(10 * tokens + size)
    case = TierCase.make(parts, 5, size, 3, 8, torch.empty(20_000), "cpu", generator)
    keys, values = rows_of(tokens, 3, 8, tokens % 2 == 0, generator)
    slots = slots_of(tokens, 5, size, generator)
    after = case.expected(keys, values, slots)
    assert write_cache(keys, values, case.key_cache, case.tier, slots, kernels="torch")
    for name, now, wanted in zip(("pool", "hot", "keys"), case.content(), after):
        assert torch.equal(now, wanted), name
    if tokens > 1:
        assert (case.hot != POISON).any()


def test_a_cache_of_another_dtype_is_left_alone() -> None:
    cache = torch.full((2, 16, 1, 8), POISON, dtype=torch.float16)
    rows = torch.randn(1, 1, 8)
    assert not write_cache(rows, rows, cache, cache.clone(), torch.tensor([3]), kernels="torch")
    assert (cache == POISON).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(kernels="triton"), "use 'cuda' or 'torch'"),
        (dict(slot_mapping=torch.tensor([1], dtype=torch.int32)), "contiguous int64"),
        (dict(slot_mapping=torch.arange(3)), "3 or more, heads, dim"),
        (dict(keys=torch.zeros(1, 2, 8)), "keys have shape"),
        (dict(values=torch.zeros(1, 1, 4)), "values have shape"),
        (dict(value_cache=torch.zeros(3, 16, 1, 8)), "must have the same blocks"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], words: str) -> None:
    arguments = dict(
        keys=torch.zeros(1, 1, 8), values=torch.zeros(1, 1, 8), key_cache=torch.zeros(2, 16, 1, 8), value_cache=torch.zeros(2, 16, 1, 8),
        slot_mapping=torch.tensor([1]), kernels="torch",
    )
    with pytest.raises(ValueError, match=words):
        write_cache(**{**arguments, **change})  # type: ignore[arg-type]


def test_keys_of_another_cache_than_that_of_the_tier_are_refused() -> None:
    sizes = Sizes(block_size=16)
    rows, slots = torch.zeros(1, sizes.heads, sizes.dim), torch.tensor([1])
    of_values, of_keys = (poisoned_tier(sizes, 2, parts) for parts in (1, 2))
    cache = torch.zeros(sizes.pages, 16, sizes.heads, sizes.dim)
    for tier, keys, words in (
        (of_values, cache[1:], "the tier holds"), (of_values, cache.half(), "the tier holds"), (of_keys, cache, "must be its own"),
    ):
        with pytest.raises(ValueError, match=words):
            write_cache(rows, rows, keys, tier, slots, kernels="torch")
    assert not write_cache(rows.half(), rows.half(), cache, of_values, slots, kernels="torch")
    assert of_values.host.isnan().all()


def test_the_cuda_kernel_serves_rows_of_whole_pieces_only() -> None:
    cache, rows = torch.zeros(2, 16, 2, 64, dtype=torch.float16), torch.zeros(3, 2, 64, dtype=torch.float16)
    assert write_kernel_serves(rows, cache)
    assert write_kernel_serves(rows[1:], cache[1:])
    assert not write_kernel_serves(rows[..., 1:9], cache)  # an odd start
    assert not write_kernel_serves(rows[..., :4], cache)  # half a piece
    assert not write_kernel_serves(rows.transpose(1, 2), cache)  # rows that are not contiguous
    assert not write_kernel_serves(torch.zeros(3, 2, 68, dtype=torch.float16)[..., :64], cache)  # odd distances
