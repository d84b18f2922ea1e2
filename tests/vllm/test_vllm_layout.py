"""Views of vLLM's tensors: by rank, with their strides."""

import pytest
import torch

from kvskim.engines.vllm.layout import key_value_views, records_element_dtype, records_shape, records_view

BLOCKS, SIZE, HEADS, DIM = 3, 32, 2, 64


def fill(key, value):
    """Number every element by (block, token, head) so that a wrong view shows."""
    block, token, head = torch.meshgrid(torch.arange(BLOCKS), torch.arange(SIZE), torch.arange(HEADS), indexing="ij")
    number = (block * 1000 + token * 10 + head).float()
    key.copy_(number[..., None].expand(key.shape))
    value.copy_(-number[..., None].expand(value.shape))


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_rank_5(order):
    cache = torch.zeros(BLOCKS, 2, *((SIZE, HEADS) if order == "NHD" else (HEADS, SIZE)), DIM)
    if order == "HND":
        cache = cache.permute(0, 1, 3, 2, 4)
    key, value = key_value_views(cache, DIM)
    fill(key, value)
    assert key.shape == value.shape == (BLOCKS, SIZE, HEADS, DIM)
    assert cache[2, 0, 5, 1, 0] == 2051
    assert cache[1, 1, 31, 0, DIM - 1] == -1310


def test_rank_4_packs_key_and_value_in_the_last_dimension():
    cache = torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM)
    key, value = key_value_views(cache, DIM)
    fill(key, value)
    assert key.shape == value.shape == (BLOCKS, SIZE, HEADS, DIM)
    assert cache[2, 1, 5, 0] == 2051
    assert cache[2, 1, 5, DIM] == -2051


def test_padded_blocks_keep_their_stride():
    backing = torch.zeros(BLOCKS, 2 * SIZE * HEADS * DIM + 128)
    cache = backing.as_strided((BLOCKS, 2, SIZE, HEADS, DIM), (backing.stride(0), SIZE * HEADS * DIM, HEADS * DIM, DIM, 1))
    key, value = key_value_views(cache, DIM)
    fill(key, value)
    assert (backing[:, -128:] == 0).all()


@pytest.mark.parametrize("shape", [(2, BLOCKS, SIZE, HEADS, DIM), (BLOCKS, SIZE, HEADS, DIM), (BLOCKS, 2, SIZE, HEADS, DIM + 8)])
def test_unknown_layouts_are_refused(shape):
    with pytest.raises(ValueError, match="does not know"):
        key_value_views(torch.zeros(shape), DIM)


def test_records_are_bytes_by_physical_page():
    raw = torch.arange(4 * 8 * 3 * 256, dtype=torch.int64).to(torch.uint8)
    bound = raw.view(torch.float16).view(records_shape(4, 128, 3, 256))
    records = records_view(bound, 3, 256)
    assert records.shape == (4 * 8, 3, 256)
    assert torch.equal(records.flatten(), raw)
    records[9, 2, 5] = 77
    assert raw[(9 * 3 + 2) * 256 + 5] == 77


@pytest.mark.parametrize("order", ["pages before heads", "heads before pages"])
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_records_of_a_block_stay_in_its_memory_in_any_order(order, heads):
    """vLLM 0.29 and later bind heads before pages, in either order in memory. Pages of a block come first, so that every record is one run of bytes."""
    pages, elements = 4, 64
    shape = (6, pages, heads, elements) if order == "pages before heads" else (6, heads, pages, elements)
    raw = torch.zeros(6 * pages * heads * elements, dtype=torch.bfloat16)
    memory = raw.view(shape)
    for bound in (memory, memory.transpose(1, 2)):
        raw.zero_()
        records = records_view(bound, heads, 2 * elements)
        assert records.shape == (6 * pages, heads, 2 * elements)
        assert records.is_contiguous()
        records[2 * pages : 3 * pages] = 1
        assert bound[2].ne(0).all()
        assert bound.ne(0).sum() == pages * heads * elements


@pytest.mark.parametrize("bound", [
    torch.zeros(4, 2, 3, 64, dtype=torch.float16), torch.zeros(4, 2, 3, 128), torch.zeros(4, 2, 6, 128, dtype=torch.float16)[:, :, ::2],
    # Two kv heads are not three; and blocks of another layer in between.
    torch.zeros(6, 2, 2, 128, dtype=torch.float16), torch.zeros(4, 2, 2, 3, 128, dtype=torch.float16)[:, 0],
])
def test_other_records_are_refused(bound):
    with pytest.raises(ValueError, match="records of a layer were bound"):
        records_view(bound, 3, 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_records_never_have_the_type_of_the_cache(dtype):
    # Equal specs are taken for one and the same by vLLM's planner.
    assert records_element_dtype(dtype) != dtype
    assert records_element_dtype(dtype).itemsize == 2
