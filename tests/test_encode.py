"""The op encode on the CPU: the torch path, and the Triton kernel of the sketch under the interpreter, against the reference."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from encode_cases import LAYOUTS, POISON, EncodeCase, slot_lists
from kvskim.ops import encode as encode_module
from kvskim.ops.encode import EncodeLayer, encode, encode_layers, encoded_together, encoders, page_keys
from kvskim.selectors import get_selector

TRITON = pytest.param("triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it on the GPU"))
KERNELS = ["torch", TRITON]
FLOAT8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _needs_triton(request: pytest.FixtureRequest) -> None:
    if "triton" in request.node.name:
        pytest.importorskip("triton")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", slot_lists(EncodeCase()))
def test_every_kind_of_step(name: str, kernels: str) -> None:
    case = EncodeCase(heads=1, blocks=4, block_size=32)
    slots = slot_lists(case)[name]
    case.run(slots, kernels)
    assert case.problems(slots) == []


CASES: list[dict[str, Any]] = [
    dict(dim=64, dtype=torch.float16, layout="heads", block_size=64),
    dict(dim=96, layout="interleaved", block_size=32),
    dict(dim=128, dtype=FLOAT8, block_size=128),
    dict(dim=256, dtype=torch.float32, heads=1),
    dict(dim=576, heads=1),
    dict(dim=64, bias=300.0),
    dict(dim=64, options={"record_bytes": 128}),
    dict(dim=64, options={"record_bytes": 192}),
    dict(dim=64, options={"record_bytes": 384}),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("settings", CASES, ids=lambda s: "-".join(str(v).removeprefix("torch.") for v in s.values()))
def test_shapes_and_dtypes(settings: dict[str, Any], kernels: str) -> None:
    case = EncodeCase(**{"blocks": 2, "seed": len(str(settings)), **settings})
    slots = [15, 31, -1, 3]
    case.run(slots, kernels)
    assert case.problems(slots) == []


def test_comparison_sees_a_wrong_digit_and_a_written_page() -> None:
    """The comparison must not be so loose that one wrong byte per record, or one touched page, passes."""
    case = EncodeCase(heads=1)
    case.run([15, 31], "torch")
    assert case.problems([15, 31]) == []
    assert case.problems([15]) != []
    case.records[:2, 0, 7] ^= 0xFF
    assert case.problems([15, 31]) != []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FLOAT8], ids=str)
def test_page_keys_are_the_cache_by_slot(layout: str, dtype: torch.dtype) -> None:
    case = EncodeCase(layout=layout, dtype=dtype, block_size=64, blocks=3)
    keys = page_keys(case.key_cache, torch.tensor([7, 0]), case.k_scale)
    for i, page in enumerate((7, 0)):
        for t in (0, 9, 15):
            slot = page * 16 + t
            expected = case.key_cache.float()[slot // 64, slot % 64] * case.k_scale
            assert torch.equal(keys[i, :, t], expected)


@pytest.mark.parametrize("kernels", KERNELS)
def test_fault_01_a_page_is_recorded_only_after_its_last_token_was_written(kernels: str) -> None:
    case = EncodeCase(heads=1, blocks=2)
    final = case.key_cache.clone()
    case.key_cache.fill_(torch.nan)
    for t in range(16):
        assert bool((case.records == POISON).all()), f"recorded after {t} tokens"
        case.key_cache[1, t] = final[1, t]
        case.run([16 + t], kernels)
    assert case.problems([31]) == []


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_page_that_is_written_again_is_recorded_again(kernels: str) -> None:
    case = EncodeCase(heads=1, blocks=2)
    case.run([15], kernels)
    before = case.records.clone()
    case.key_cache[0] = torch.randn_like(case.key_cache[0].float()).to(case.dtype) * 2
    case.run([3, 4], kernels)
    assert torch.equal(case.records, before), "an unfinished page must keep its record"
    case.run([14, 15], kernels)
    assert case.problems([15]) == []
    assert not torch.equal(case.records, before)


@pytest.mark.parametrize("kernels", KERNELS)
def test_fault_07_the_dtype_of_the_cache_is_honoured(kernels: str) -> None:
    """The same bits read as another 16-bit type are other keys, so the records must differ."""
    half = EncodeCase(heads=1, blocks=1, dtype=torch.float16)
    brain = EncodeCase(heads=1, blocks=1, dtype=torch.float16)
    brain.key_cache = brain.key_cache.view(torch.bfloat16)
    for case in (half, brain):
        case.run([15], kernels)
        assert case.problems([15]) == []
    assert not torch.equal(half.records, brain.records)


@pytest.mark.parametrize("kernels", KERNELS)
def test_fault_23_each_chunk_of_a_prompt_records_its_own_pages(kernels: str) -> None:
    """No record may wait for the first decode step: after every chunk exactly the finished pages have records."""
    case = EncodeCase(heads=1, blocks=3, block_size=32)
    request = [block * 32 + t for block in (2, 0, 1) for t in range(32)]
    for start, stop in ((0, 13), (13, 40), (40, 41), (41, 80), (80, 96)):
        case.run(request[start:stop], kernels)
        assert case.problems(request[:stop]) == [], (start, stop)


def test_encoders_are_chosen_only_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the CUDA kernels those of sketch records are two; which one is to run reaches the operator, by default as the choice by tokens."""
    from kvskim.ops.cuda import encode as cuda

    launched = []
    monkeypatch.setattr(cuda, "encode_sketch", lambda *arguments: launched.append(cuda.ENCODERS[arguments[-2]]))
    case = EncodeCase()
    assert encoders(case.tables, case.key_cache, "cuda") == ("few", "many")
    for kernels in ("cuda many", "cuda", "cuda few"):
        case.run([15], kernels)
    assert launched == ["many", "by tokens", "few"]
    one_way = ((case, "torch"), (case, "triton"), *((c, "cuda") for c in (EncodeCase("rki4"), EncodeCase(dtype=torch.float32), EncodeCase(dim=32))))
    for other, kernels in one_way:
        assert encoders(other.tables, other.key_cache, kernels) == (None,)
        with pytest.raises(ValueError, match="encoder is 'few'"):
            other.run([15], f"{kernels} few")


def test_nan_keys_give_defined_records() -> None:
    case = EncodeCase(heads=1, blocks=1)
    case.key_cache[0, 3, 0, 5] = torch.nan
    case.run([15], "torch")
    assert not bool((case.records == POISON).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(slot_mapping=torch.tensor([15], dtype=torch.int32)), "slot_mapping"),
        (dict(records=torch.zeros(6, 2, 128, dtype=torch.uint8)), "records"),
        (dict(records=torch.zeros(600, 2, 256, dtype=torch.uint8)), "600 records"),
        (dict(key_cache=torch.zeros(6, 16, 2, 64, dtype=torch.float64)), "float64"),
        (dict(key_cache=torch.zeros(6, 24, 2, 64)), "multiple of 16"),
        (dict(key_cache=torch.zeros(6, 16, 2, 128)[..., ::2]), "contiguous last dimension"),
        (dict(tables=None), "NoneType"),
        (dict(k_scale=0.5), "k_scale"),
        (dict(kernels="auto"), "kernels"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    case = EncodeCase()
    arguments: dict[str, Any] = dict(
        selector=case.selector, tables=case.tables, key_cache=case.key_cache, slot_mapping=case.slots([15]), records=case.records, kernels="torch"
    )
    with pytest.raises(ValueError, match=message):
        encode(**(arguments | change))
    assert bool((case.records == POISON).all())


def layer_of(case: EncodeCase, slots: list[int]) -> EncodeLayer:
    return EncodeLayer(case.tables, case.key_cache, case.slots(slots), case.records, case.k_scale)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("selector", ["sketch", "rki4"])
def test_layers_get_the_records_that_each_gets_alone(selector: str, kernels: str) -> None:
    """Every layer its own slots, caches of two forms, one layer that completes nothing."""
    cases = [EncodeCase(selector, heads=1 + i % 2, blocks=3, seed=i) for i in range(4)]
    slots = [[15, 3], [-1, 47], [14, 16], [31, 31]]
    encode_layers(cases[0].selector, [layer_of(case, own) for case, own in zip(cases, slots)], kernels=kernels)
    for case, own in zip(cases, slots):
        assert case.problems(own) == []
    assert (cases[2].records == POISON).all()


def test_layers_are_checked_before_any_record_is_made() -> None:
    good, bad = EncodeCase(), EncodeCase(seed=1)
    layers = [layer_of(good, [15]), EncodeLayer(bad.tables, bad.key_cache, bad.slots([15]).int(), bad.records)]
    with pytest.raises(ValueError, match="slot_mapping must be contiguous int64"):
        encode_layers(good.selector, layers, kernels="torch")
    assert (good.records == POISON).all()


def test_what_shares_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA kernel for few slots takes layers whose caches have one form; the number of slots, the selector and the dtype decide too."""
    case = EncodeCase(dim=128, blocks=20)
    alone = [
        (layer_of(EncodeCase(dim=128, dtype=torch.float32), [15]), "cuda"), (layer_of(EncodeCase(dim=72), [15]), "cuda"),
        (layer_of(EncodeCase(options={"record_bytes": 128}), [15]), "cuda"), (layer_of(EncodeCase("rki4"), [15]), "cuda"),
        (layer_of(case, [-1] * 257), "cuda"), (layer_of(case, [15]), "torch"), (layer_of(case, [15]), "triton"),
    ]
    assert not any(encoded_together(layer, kernels) for layer, kernels in alone)
    assert encoded_together(layer_of(case, [-1] * 256), "cuda")

    from kvskim.ops.cuda import encode as cuda

    launches: list[tuple[int, int]] = []
    monkeypatch.setattr(cuda, "encode_sketch_layers", lambda tables, caches, slots, records, k_scales, flags: launches.append((len(tables), flags)))
    monkeypatch.setattr(encode_module, "encode", lambda *arguments, **more: launches.append((1, -1)))
    same = [EncodeCase(dim=128, blocks=20, seed=i) for i in range(3)]
    others = [EncodeCase(dim=128, blocks=21), EncodeCase(dim=128, blocks=20, layout="heads"), EncodeCase(dim=64, blocks=20)]
    layers = [layer_of(one, [15]) for one in (same[0], others[0], same[1], others[1], others[2], same[2])]
    layers += [layer_of(same[0], [15, 16]), layer_of(same[0], [-1] * 257), layer_of(same[0], [])]
    encode_layers(case.selector, layers, kernels="cuda", overlap=True)
    assert launches == [(3, 1), (1, 1), (1, 1), (1, 1), (1, 1), (1, -1)]


def test_python_and_cuda_agree_how_many_slots_are_few() -> None:
    """Else `encode` and `encode_layers` would take different kernels, whose codes differ next to boundaries."""
    from kvskim.ops.cuda import build
    from kvskim.ops.cuda import encode as cuda

    source = (build.FOLDER / "encode_sketch.cu").read_text(encoding="utf-8")
    assert re.findall(r"constexpr int kFewTokens = (\d+);", source) == [str(cuda.FEW_SLOTS)]


def test_layers_of_another_selector_are_refused() -> None:
    case = EncodeCase("rki4")
    with pytest.raises(ValueError, match="records must be contiguous uint8"):
        encode_layers(get_selector("sketch"), [layer_of(case, [15])], kernels="torch")
