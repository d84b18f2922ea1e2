"""The encode kernels on a GPU, CUDA and Triton, against the torch reference on the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from encode_cases import LAYOUTS, POISON, EncodeCase, slot_lists
from kvskim.ops.cuda.library import availability
from kvskim.ops.encode import EncodeLayer, encode_layers, encoded_together

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

on_hopper = pytest.mark.skipif(not (torch.cuda.is_available() and availability()[0]), reason="needs the CUDA library and its GPU")
KERNELS = [pytest.param("cuda", marks=on_hopper), "triton"]
ENCODERS = [pytest.param("cuda few", marks=on_hopper), pytest.param("cuda many", marks=on_hopper)]
"""The CUDA kernels of sketch records: for few slots, as in decode steps, and for many."""
FLOAT8 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16, FLOAT8]
PAGE_SELECTORS: list[tuple[str, dict[str, Any]]] = [
    ("mean", {}), ("minmax", {}), ("minmax", {"bits": 4}), ("r8", {}), ("r8", {"rank": 16}), ("rki4", {}), ("rki4", {"rank": 2}), ("quad", {}),
    ("quad", {"bits": 8}), ("clse", {}),
]


def with_kernels(*selectors: str, cuda_only: bool = False) -> Any:
    """Parametrize by selector and the kernels that make its records."""
    cases = []
    for selector in selectors:
        for kernels in ("cuda few", "cuda many", "triton") if selector == "sketch" else ("cuda", "triton"):
            if kernels != "triton":
                cases.append(pytest.param(selector, kernels, marks=on_hopper))
            elif not cuda_only:
                cases.append(pytest.param(selector, kernels))
    return pytest.mark.parametrize(("selector", "kernels"), cases)


@pytest.mark.parametrize("name", slot_lists(EncodeCase()))
@with_kernels("sketch", "rki4")
def test_every_kind_of_step(selector: str, name: str, kernels: str) -> None:
    if name == "beyond the records" and selector != "sketch" and kernels == "triton":
        pytest.skip("the Triton page kernels trust slot_mapping")
    case = EncodeCase(selector, dim=128, heads=3, blocks=40, block_size=32, device="cuda")
    slots = slot_lists(case)[name]
    case.run(slots, kernels)
    assert case.problems(slots) == []


@pytest.mark.parametrize("kernels", [*ENCODERS, "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256, 576])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sketch_shapes_dtypes_and_strides(layout: str, dim: int, dtype: torch.dtype, kernels: str) -> None:
    block_size = {"tokens": 16, "heads": 64, "interleaved": 128}[layout]
    case = EncodeCase(dim=dim, dtype=dtype, layout=layout, block_size=block_size, blocks=320 // block_size + 1, seed=dim, device="cuda")
    slots = slot_lists(case)["prompt"]
    case.run(slots, kernels)
    assert case.problems(slots) == []


@pytest.mark.parametrize("kernels", ENCODERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("most_digits", [1, 2])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_more_coefficients_than_registers_hold(dim: int, most_digits: int, dtype: torch.dtype, kernels: str) -> None:
    """Narrow codes: most of the 1024 rows of encode_matrix are used, from every place that holds them."""
    case = EncodeCase(dim=dim, dtype=dtype, blocks=40, seed=dim, most_digits=most_digits, device="cuda")
    slots = slot_lists(case)["prompt"]
    case.run(slots, kernels)
    assert case.problems(slots) == []


@on_hopper
@pytest.mark.parametrize(("heads", "pages"), [(8, 1100), (1, 400), (160, 200)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_windows_of_every_size(dim: int, heads: int, pages: int) -> None:
    """Many tokens and heads: windows from 16 slots to all of them, in which some or all complete a page; pages in many batches or chunks."""
    case = EncodeCase(dim=dim, heads=heads, block_size=16, blocks=pages, device="cuda")
    for name in ("prompt", "decode, all complete"):
        case.records.fill_(POISON)
        slots = slot_lists(case)[name]
        case.run(slots, "cuda many")
        assert case.problems(slots) == [], name


@on_hopper
@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (1, 33), (1, 256), (3, 100), (8, 64), (8, 256), (40, 40)])
@pytest.mark.parametrize("dim", [64, 128, 256, 576])
def test_few_slots_in_windows_of_every_size(dim: int, heads: int, tokens: int) -> None:
    """From one slot a CTA to 32, of which one, some or all complete a page, and some the same one."""
    case = EncodeCase(dim=dim, heads=heads, block_size=32, blocks=20, device="cuda")
    lists = slot_lists(case)
    prompt, last = lists["prompt"][:-2], lists["decode, all complete"]
    for slots in ((prompt * 2)[15 : 15 + tokens], (last * 7)[:tokens], ([-1, *last, prompt[3]] * 7)[:tokens]):
        case.records.fill_(POISON)
        # What lies behind the slots would complete all pages.
        case.encode(case.slots([*slots, *last])[: len(slots)], "cuda few")
        assert case.problems(slots) == []


@on_hopper
def test_the_number_of_slots_chooses_the_encoder() -> None:
    """Each encoder gives the same bytes every time, and other ones than the other: of some codes that lie next to a boundary."""
    case = EncodeCase(dim=128, heads=4, block_size=16, blocks=20, device="cuda")
    slots = slot_lists(case)["prompt"]
    made = {}
    for tokens in (256, 257):
        for kernels in ("cuda", "cuda few", "cuda many"):
            case.records.fill_(POISON)
            case.run(slots[:tokens], kernels)
            made[kernels, tokens] = case.records.clone()
    assert not torch.equal(made["cuda few", 256], made["cuda many", 256]), "the encoders can't be told apart"
    assert torch.equal(made["cuda", 256], made["cuda few", 256])
    assert torch.equal(made["cuda", 257], made["cuda many", 257])


@pytest.mark.parametrize("kernels", ENCODERS)
@pytest.mark.parametrize("magnitude", [1e-8, 1e-3, 1e3, 1e8], ids=str)
def test_keys_of_any_magnitude(magnitude: float, kernels: str) -> None:
    """Keys and the modes made of them are coded as finely whatever their size; 16-bit floats in between must not overflow or vanish."""
    case = EncodeCase(dim=128, blocks=40, device="cuda")
    tables = case.tables
    case.tables = replace(tables, mean=tables.mean * magnitude, encode_matrix=(tables.encode_matrix.float() / magnitude).bfloat16())
    case.key_cache = (case.key_cache.float() * magnitude).bfloat16()
    slots = slot_lists(case)["prompt"]
    case.run(slots, kernels)
    assert case.problems(slots) == []


@pytest.mark.parametrize("kernels", ENCODERS)
@pytest.mark.parametrize("dim", [64, 128])
def test_channels_of_very_different_size(dim: int, kernels: str) -> None:
    case = EncodeCase(dim=dim, blocks=40, device="cuda")
    scale = 10 ** torch.linspace(-2.5, 2.5, dim, device="cuda")
    tables = case.tables
    case.tables = replace(tables, mean=tables.mean * scale, encode_matrix=(tables.encode_matrix.float() / scale).bfloat16())
    case.key_cache = (case.key_cache.float() * scale).bfloat16()
    slots = slot_lists(case)["prompt"]
    case.run(slots, kernels)
    assert case.problems(slots) == []


@pytest.mark.parametrize("kernels", ENCODERS)
@pytest.mark.parametrize("dim", [64, 128])
def test_huge_and_undefined_keys(dim: int, kernels: str) -> None:
    """A page beyond the range of 16-bit floats gets the codes at the ends of their ranges, a NaN the middle ones; pages of the same batch are as ever."""
    case = EncodeCase(dim=dim, blocks=12, device="cuda")
    case.key_cache[0, 3, 0, 5] = torch.nan
    case.key_cache[2, 2, 0, 7:9] = 1e36
    case.key_cache[3, 2, 0, 9] = 1e5
    slots = slot_lists(case)["prompt"]
    case.run(slots, kernels)
    assert case.problems(slots) == []


@on_hopper
def test_more_completed_pages_than_one_list_holds() -> None:
    """More heads than SMs, so that one CTA looks at all slots; every slot completes a page, pages come again and again."""
    case = EncodeCase(dim=64, heads=140, block_size=16, blocks=20, device="cuda")
    slots = slot_lists(case)["decode, all complete"][:19]
    case.run(slots * 250, "cuda many")
    assert case.problems(slots) == []


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 576])
@pytest.mark.parametrize(("selector", "options"), PAGE_SELECTORS, ids=str)
def test_page_selectors(selector: str, options: dict[str, Any], dim: int, dtype: torch.dtype, kernels: str) -> None:
    case = EncodeCase(selector, options, dim=dim, dtype=dtype, block_size=32, blocks=9, seed=dim, device="cuda")
    slots = slot_lists(case)["prompt"]
    case.run(slots, kernels)
    assert case.problems(slots) == []


@with_kernels("sketch", "mean", "minmax", "rki4", "quad", "clse")
def test_fault_04_large_constant_channels_do_not_drown_the_rest(selector: str, kernels: str) -> None:
    case = EncodeCase(selector, dim=128, bias=300.0, block_size=16, blocks=20, device="cuda")
    slots = slot_lists(case)["prompt"]
    case.run(slots, kernels)
    assert case.problems(slots) == []


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("selector", "options"), PAGE_SELECTORS, ids=str)
def test_degenerate_pages(selector: str, options: dict[str, Any], kernels: str) -> None:
    """Equal keys, keys on a line, tiny keys; and keys that are not finite, whose score must be NaN, so that the page is selected."""
    case = EncodeCase(selector, options, dim=128, block_size=16, blocks=6, device="cuda")
    keys = case.key_cache
    keys[0] = keys[0, :1]
    keys[1] = keys[1, :1] * torch.linspace(-1, 1, 16, device="cuda", dtype=keys.dtype)[:, None, None]
    keys[2] = case.tables.offset + 1e-3 * torch.randn_like(keys[2].float())
    keys[4, 7, 0, 3] = torch.nan
    keys[5, 2, 1, 100] = torch.inf
    slots = list(range(6 * 16))
    case.run(slots, kernels)
    queries, tables = case.queries(), case.tables.to("cpu")
    actual, wanted = (case.selector.score(queries, r, tables) for r in (case.records.cpu(), case.expected(slots)))
    assert bool(actual[:, 0, 4].isnan().all())
    assert bool(actual[:, 1, 5].isnan().all())
    torch.testing.assert_close(actual[:, :, :4], wanted[:, :, :4], atol=0.08, rtol=0.01)
    assert bool(torch.equal(actual.isnan(), wanted.isnan()))


@with_kernels("sketch", "rki4", "minmax")
def test_fault_01_a_page_is_recorded_only_after_its_last_token_was_written(selector: str, kernels: str) -> None:
    case = EncodeCase(selector, dim=128, blocks=2, device="cuda")
    final = case.key_cache.clone()
    case.key_cache.fill_(torch.nan)
    for t in range(16):
        assert bool((case.records == POISON).all()), f"recorded after {t} tokens"
        case.key_cache[1, t] = final[1, t]
        case.run([16 + t], kernels)
    assert case.problems([31]) == []


@with_kernels("sketch", "rki4")
def test_replays_in_a_graph_with_other_slots_and_keys(selector: str, kernels: str) -> None:
    """Block reuse under a CUDA graph: the same launch, other slots, rewritten pages."""
    case = EncodeCase(selector, dim=128, blocks=8, device="cuda")
    slots = case.slots([15, -1, 40])

    def step() -> None:
        case.encode(slots, kernels)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for row in ([47, 31, 79], [-1, -1, -1], [14, 16, 30], [15, 127, -1]):
        case.records.fill_(POISON)
        case.key_cache.copy_(torch.randn_like(case.key_cache.float()) * 1.5)
        slots.copy_(torch.tensor(row))
        graph.replay()
        torch.cuda.synchronize()
        assert case.problems(row) == [], row


@with_kernels("sketch", "rki4", cuda_only=True)
def test_overlapping_launches_see_the_keys_of_the_kernel_ahead(selector: str, kernels: str) -> None:
    """With programmatic dependent launch encode starts early; it must still wait for the keys."""
    case = EncodeCase(selector, dim=128, blocks=64, device="cuda")
    slots = slot_lists(case)["prompt"]
    mapping = case.slots(slots)
    source = torch.randn_like(case.key_cache.float()).to(case.dtype)
    torch.cuda.synchronize()
    for _ in range(10):
        case.key_cache.zero_()
        case.key_cache.copy_(source)
        case.encode(mapping, kernels, overlap=True)
    assert case.problems(slots) == []


def many_layers(dim: int, dtype: torch.dtype) -> tuple[list[EncodeCase], list[EncodeLayer], list[torch.Tensor]]:
    """More layers than a launch takes, and two of another form: some complete nothing, some one page, some all. And the records that each gets alone."""
    cases = [EncodeCase(dim=dim, dtype=dtype, heads=2, block_size=32, blocks=6, seed=i, device="cuda") for i in range(51)]
    cases += [EncodeCase(dim=dim, dtype=dtype, heads=1, block_size=16, blocks=12, layout="heads", seed=60 + i, device="cuda") for i in range(2)]
    last = [16 * page + 15 for page in range(12)]
    lists = [[*last, -1, 3], [-1] * 14, [14, 16, *[-1] * 11, 47], [*last[::-1], 31, 31]]
    slots = [lists[i % 4] for i in range(len(cases))]
    layers = [EncodeLayer(case.tables, case.key_cache, case.slots(own), case.records, case.k_scale) for case, own in zip(cases, slots)]
    assert all(encoded_together(layer, "cuda") for layer in layers)
    expected = []
    for case, own in zip(cases, slots):
        case.run(own, "cuda few")
        expected.append(case.records.clone())
        case.records.fill_(POISON)
    return cases, layers, expected


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 576])
def test_layers_get_the_records_that_each_gets_alone(dim: int, dtype: torch.dtype) -> None:
    cases, layers, expected = many_layers(dim, dtype)
    encode_layers(cases[0].selector, layers, kernels="cuda")
    for i, case in enumerate(cases):
        assert torch.equal(case.records, expected[i]), i


@on_hopper
@pytest.mark.parametrize("dim", [64, 128, 576])
def test_layers_get_their_records_in_a_graph(dim: int) -> None:
    cases, layers, expected = many_layers(dim, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        encode_layers(cases[0].selector, layers, kernels="cuda", overlap=True)
    graph.replay()
    torch.cuda.synchronize()
    for i, case in enumerate(cases):
        assert torch.equal(case.records, expected[i]), i
