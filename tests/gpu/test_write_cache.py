"""The CUDA kernel that writes new rows into the cache, against what a loop over tokens writes."""

from __future__ import annotations

import pytest
import torch

from kvskim.ops.cuda.library import availability
from kvskim.ops.write_cache import write_cache
from kvskim.tier.host_memory import HostMemory
from write_cases import POISON, TierCase, expected, layouts, rows_of, slots_of

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
AVAILABLE, REASON = availability()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=REASON)


@pytest.mark.parametrize("layout", ["apart", "one row", "heads first", "pairs"])
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 300])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (96, 96), (128, 128), (256, 256), (576, 576), (512, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_go_where_their_slots_say(dtype: torch.dtype, dim: int, value_dim: int, tokens: int, layout: str) -> None:
    generator = torch.Generator().manual_seed(1000 * tokens + dim)
    size, heads = (16, 8) if tokens % 2 else (48, 3)
    blocks = 30
    found = layouts(blocks, size, heads, dim, value_dim, dtype, "cuda")
    if layout not in found:
        pytest.skip("this layout has rows of one length")
    key_cache, value_cache = found[layout]
    # As a projection leaves them: keys and values of a token side by side.
    rows = torch.randn(tokens + 1, heads * (dim + value_dim), generator=generator).to("cuda", dtype)
    keys, values = rows[:, : heads * dim].view(-1, heads, dim), rows[:, heads * dim :].view(-1, heads, value_dim)
    slots = slots_of(tokens, blocks, size, generator).to("cuda")
    after = expected(keys, key_cache, slots), expected(values, value_cache, slots)
    assert write_cache(keys, values, key_cache, value_cache, slots, kernels="cuda", overlap=tokens % 2 == 0)
    assert torch.equal(key_cache, after[0])
    assert torch.equal(value_cache, after[1])


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 200])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("parts", "size"), [(1, 16), (1, 48), (2, 16)])
def test_rows_of_a_tier_go_to_its_pool_and_to_its_hot_copies(parts: int, size: int, dtype: torch.dtype, dim: int, tokens: int, heads: int) -> None:
    generator = torch.Generator().manual_seed(1000 * tokens + dim + heads)
    blocks = 30 * 16 // size
    memory = HostMemory((blocks * size // 16 + 2) * heads * parts * 16 * dim * 2)
    try:
        assert memory.bytes is not None
        case = TierCase.make(parts, blocks, size, heads, dim, memory.bytes.view(dtype), "cuda", generator)
        keys, values = rows_of(tokens, heads, dim, tokens % 2 == 0, generator, dtype, "cuda")
        slots = slots_of(tokens, blocks, size, generator).to("cuda")
        after = case.expected(keys, values, slots)
        assert write_cache(keys, values, case.key_cache, case.tier, slots, kernels="cuda", overlap=tokens % 2 == 1)
        for name, now, wanted in zip(("pool", "hot", "keys"), case.content(), after):
            assert torch.equal(now, wanted), name
        if tokens > 100:
            assert (case.hot != POISON).any()
    finally:
        torch.cuda.synchronize()
        memory.release()


def test_rows_that_are_not_whole_pieces_are_left_to_the_engine() -> None:
    cache = torch.full((2, 16, 1, 36), POISON, dtype=torch.float16, device="cuda")
    rows = torch.zeros(1, 1, 36, dtype=torch.float16, device="cuda")
    assert not write_cache(rows, rows, cache, cache.clone(), torch.tensor([3], device="cuda"), kernels="cuda")
    assert (cache == POISON).all()


def test_a_cache_with_more_than_four_gigabytes() -> None:
    """Distances of blocks beyond 32 bits."""
    cache = torch.full((1 << 17, 16, 8, 160), POISON, dtype=torch.bfloat16, device="cuda")
    keys, values = (torch.randn(2, 8, 80, device="cuda").to(torch.bfloat16) for _ in range(2))
    slots = torch.tensor([(1 << 21) - 1, 5], device="cuda")
    assert write_cache(keys, values, cache[..., :80], cache[..., 80:], slots, kernels="cuda")
    assert torch.equal(cache[-1, -1], torch.cat([keys[0], values[0]], -1))
    assert torch.equal(cache[0, 5], torch.cat([keys[1], values[1]], -1))
    assert (cache[1:-1] == POISON).all()
