"""The random problems of `kvskim bench kernels`: a whole step on them computes attention, reads nothing but its own pages, and more than a cache holds."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from kvskim.bench import flash_attention, kernels, problem, whole_step
from kvskim.bench.problem import Shape
from kvskim.bench.whole_step import StepProblem
from kvskim.rules import RuleParameters
from kvskim.selectors import get_selector

SHAPES = [Shape(2, 200, 2, 3, 32), Shape(3, 200, 1, 4, 48, 32)]
ALL_PAGES = RuleParameters(rule="budget", budget_pages=13, min_pages=0)


@pytest.fixture
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StepProblem:
    monkeypatch.setattr(whole_step, "SMALLEST_BYTES", 400_000)
    torch.manual_seed(0)
    return StepProblem(get_selector("rki4"), request.param, ALL_PAGES, "cpu")


def attention(step: StepProblem, table: torch.Tensor) -> torch.Tensor:
    """Dense attention of all tokens."""
    shape = step.shape
    keys, values = (t[table.long()].flatten(1, 2)[:, : shape.context].float().transpose(1, 2) for t in (step.cache.keys, step.cache.values))
    query = step.query.float().unflatten(1, (shape.heads, shape.group))
    weights = torch.softmax(query @ keys.transpose(2, 3) * shape.scale, -1)
    return (weights @ values).flatten(1, 2)


@pytest.mark.parametrize("step", SHAPES, indirect=True, ids=str)
def test_a_step_of_all_pages_is_dense_attention(step: StepProblem) -> None:
    launches = step.launches("torch")
    assert len(launches) == len(step.cache.block_tables) > 2
    for launch, table in zip(launches, step.cache.block_tables):
        launch()
        torch.testing.assert_close(step.out.float(), attention(step, table), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("step", SHAPES, indirect=True, ids=str)
def test_sets_share_no_block_and_have_their_records(step: StepProblem) -> None:
    used = torch.cat([table.flatten() for table in step.cache.block_tables])
    assert len(set(used.tolist())) == used.numel() == step.cache.keys.shape[0]
    # One block is one page here: every page that a table names has a record.
    assert step.records.shape[0] == step.cache.pages == used.numel()
    assert step.read_bytes * len(step.cache.block_tables) >= whole_step.SMALLEST_BYTES
    assert (step.cache.values.data_ptr() == step.cache.keys.data_ptr()) is bool(step.shape.latent)


def test_bytes_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tables are not needed for sizes, and take long to fit.
    monkeypatch.setattr(problem, "sketch_tables", lambda *_: None)
    monkeypatch.setattr(whole_step, "SMALLEST_BYTES", 1)
    sketch, latent = get_selector("sketch"), Shape(1, 1600, 1, 16, 576, 512)
    few = RuleParameters(rule="budget", budget_pages=10, min_pages=0)
    assert (latent.row_bytes, latent.kv_bytes, latent.value_dim) == (1152, 1600 * 1152, 512)
    # 100 records, and 10 pages of 16 latent rows.
    assert StepProblem(sketch, latent, few, "cpu").read_bytes == 100 * sketch.record_bytes(576) + 10 * 16 * 1152
    assert (Shape(1, 1600, 8, 4).row_bytes, Shape(2, 1600, 8, 4).kv_bytes) == (512, 2 * 1600 * 8 * 512)
    with pytest.raises(ValueError, match="page budget"):
        StepProblem(sketch, latent, RuleParameters(rule="threshold", tau=0.01), "cpu")
    assert str(latent) == "1 x 1K, MLA, 16 heads, d 576"


def test_latent_shapes_are_measured() -> None:
    described = [(s.requests, s.context, s.group, s.dim, s.latent) for s in kernels.LATENT_SHAPES]
    expected = [(1, 131072), (16, 65536)]
    assert described == [(*shape, heads, 576, 512) for heads in (16, 128) for shape in expected]


@pytest.mark.parametrize("step", SHAPES[1:], indirect=True, ids=str)
def test_dense_latent_decode_is_called_as_vllm_calls_it(step: StepProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled: dict[str, Any] = {}

    def attend(q: Any, k: Any, v: Any, q_v: Any, block_table: Any, seqused_k: Any, softmax_scale: float, **more: Any) -> torch.Tensor:
        assert more["scheduler_metadata"] == "schedule"
        assert (more["num_splits"], more["fa_version"], more["causal"], more["max_seqlen_k"]) == (32, 3, True, 200)
        keys, values = (t[block_table.long()].flatten(1, 2)[:, : step.shape.context, 0].float() for t in (k, v))
        logits = q.float() @ keys.transpose(1, 2) + q_v.float() @ values.transpose(1, 2)
        return torch.softmax(logits * softmax_scale, -1) @ values

    module = ModuleType("flash_attn_interface")
    module.flash_attn_varlen_func = attend  # type: ignore[attr-defined]
    module.get_scheduler_metadata = lambda **asked: scheduled.update(asked) or "schedule"  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.vllm_flash_attn"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", module)
    table = step.cache.block_tables[0]
    out = flash_attention.dense_latent_decode(step.query, step.cache.keys, 32, table, step.lengths, step.shape.scale)()
    torch.testing.assert_close(out, attention(step, table), atol=1e-4, rtol=1e-4)
    assert (scheduled["headdim"], scheduled["headdim_v"], scheduled["num_heads_q"], scheduled["num_heads_kv"]) == (16, 32, 4, 1)
