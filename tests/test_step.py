"""The whole decode step through the public operations against the reference engine."""

import pytest
import torch

from kvskim.layout import PAGE_TOKENS
from kvskim.ops.score import score
from kvskim.ops.step import StepSettings, decode_step
from kvskim.ops.workspace import Workspace, table_capacity
from kvskim.reference import ReferenceLayer
from kvskim.rules import RuleParameters
from kvskim.selectors import SELECTORS
from step_data import Batch, make_batch

BUDGET = RuleParameters(rule="budget", budget_pages=5, min_pages=0)
SHORT_WHOLE = RuleParameters(rule="budget", budget_pages=4, full_pages=7)
"""The rows of 100 tokens, 7 pages, are just short enough to be attended whole."""
RULES = [BUDGET, SHORT_WHOLE, RuleParameters(tau=0.02, min_pages=2), RuleParameters(rule="coverage", coverage=0.8, min_pages=1)]
LENGTHS = [1, 15, 16, 17, 0, 100, 333]


def run_step(batch: Batch, rule: RuleParameters, *, kernels: str = "torch", softcap: float = 0.0, ready: int = 1):
    heads = batch.key_cache.shape[2]
    group = batch.query.shape[1] // heads
    device = batch.query.device
    workspace = Workspace(
        max_requests=batch.query.shape[0] + 1, num_kv_heads=heads, group=group, head_dim=batch.query.shape[2], page_capacity=batch.page_capacity,
        rule=rule, sink_pages=1, window_pages=1, device=device, kernels=kernels,
    )
    for tensor in workspace.__dict__.values():
        if isinstance(tensor, torch.Tensor) and tensor is not workspace.attend_tickets:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 113)
    buffers = workspace.buffers(batch.query.shape[0])
    out = torch.full_like(batch.query, float("nan"))
    lse = torch.full(batch.query.shape[:2], float("nan"), device=device)
    settings = StepSettings(batch.selector, batch.tables, rule, 1, 1, batch.scale, softcap=softcap, kernels=kernels)  # type: ignore[arg-type]
    decode_step(
        settings, batch.query, batch.key_cache, batch.value_cache, batch.records, batch.block_table, batch.seq_lens,
        ready=torch.full((1,), ready, dtype=torch.int32, device=device), workspace=workspace, buffers=buffers, out=out, lse=lse,
    )
    return out, lse, buffers


def reference_of(batch: Batch, rule: RuleParameters, softcap: float = 0.0) -> ReferenceLayer:
    heads, dim = batch.key_cache.shape[2:]
    pages = batch.records.shape[0]
    layer = ReferenceLayer(
        batch.selector, batch.tables, num_pages=pages, num_kv_heads=heads, head_dim=dim, scale=batch.scale, softcap=softcap, parameters=rule,
        window_pages=1, dtype=batch.key_cache.dtype,
    )
    layer.keys.copy_(batch.key_cache.reshape(pages, PAGE_TOKENS, heads, dim))
    layer.values.copy_(batch.value_cache.reshape(pages, PAGE_TOKENS, heads, dim))
    layer.records = batch.records
    return layer


def page_table(batch: Batch) -> torch.Tensor:
    per_block = batch.key_cache.shape[1] // PAGE_TOKENS
    pages = torch.arange(batch.page_capacity)
    return batch.block_table[:, pages // per_block].long() * per_block + pages % per_block


@pytest.mark.parametrize("selector", list(SELECTORS))
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.rule)
def test_torch_step_is_the_reference(selector: str, rule: RuleParameters) -> None:
    batch = make_batch(selector, LENGTHS, block_size=32)
    out, lse, buffers = run_step(batch, rule)
    expected = reference_of(batch, rule).decode(batch.query, page_table(batch), batch.seq_lens)
    for r, rows in enumerate(expected.rows):
        for h, row in enumerate(rows):
            count = int(buffers.counts[r, h])
            assert count == len(row.pages)
            if not row.dense:
                assert buffers.pages[r, h, :count].tolist() == row.pages.tolist()
            assert float(buffers.covered[r, h]) == pytest.approx(row.covered, abs=1e-4)
    torch.testing.assert_close(out, expected.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected.lse, atol=1e-5, rtol=1e-5)
    sparse = [row for rows in expected.rows for row in rows if not row.dense]
    assert sparse, "the case must be sparse somewhere"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("block_size", [16, 64])
def test_layouts_and_softcap(packed: bool, block_size: int) -> None:
    batch = make_batch("sketch", LENGTHS, block_size=block_size, packed=packed, group=3)
    out, _, _ = run_step(batch, BUDGET, softcap=3.0)
    expected = reference_of(batch, BUDGET, softcap=3.0).decode(batch.query, page_table(batch), batch.seq_lens)
    torch.testing.assert_close(out, expected.out, atol=1e-5, rtol=1e-5)
    without, _, _ = run_step(batch, BUDGET)
    assert not torch.allclose(out, without, atol=1e-3)


def test_not_ready_attends_everything() -> None:
    batch = make_batch("sketch", LENGTHS)
    out, lse, buffers = run_step(batch, BUDGET, ready=0)
    layer = reference_of(batch, BUDGET)
    layer.tables = None
    expected = layer.decode(batch.query, page_table(batch), batch.seq_lens)
    torch.testing.assert_close(out, expected.out, atol=1e-5, rtol=1e-5)
    totals = (batch.seq_lens + 15) // 16
    assert torch.equal(buffers.counts, totals[:, None].expand_as(buffers.counts))
    assert (lse[4] == -torch.inf).all()


def test_table_capacity_holds_what_a_rule_can_select() -> None:
    assert table_capacity(RuleParameters(rule="budget", budget_pages=128), 8192, 1, 1) == 128
    assert table_capacity(RuleParameters(rule="budget", budget_fraction=0.1), 1000, 1, 1) == 101
    assert table_capacity(RuleParameters(tau=0.01, min_pages=8), 8192, 1, 1) == 103
    assert table_capacity(RuleParameters(tau=0.5, min_pages=8), 8192, 2, 1) == 11
    assert table_capacity(RuleParameters(rule="coverage", coverage=0.9), 8192, 1, 1) == 8192
    assert table_capacity(RuleParameters(rule="coverage", coverage=0.9, max_pages=64), 8192, 1, 1) == 66
    assert table_capacity(RuleParameters(rule="budget", budget_pages=128), 16, 1, 1) == 16


def test_workspace_refuses_what_does_not_fit() -> None:
    workspace = Workspace(
        max_requests=2, num_kv_heads=2, group=2, head_dim=64, page_capacity=8, rule=BUDGET, sink_pages=1, window_pages=1, device="cpu", kernels="torch"
    )
    with pytest.raises(ValueError, match="3 requests with up to 8 pages does not fit a workspace for 2 requests with up to 8 pages"):
        workspace.buffers(3)
    with pytest.raises(ValueError, match="up to 9 pages"):
        workspace.buffers(1, 9)
    assert workspace.nbytes > 0


def test_scorer_says_where_cuda_has_none() -> None:
    from kvskim.ops.score import scorer
    from kvskim.selectors import get_selector

    assert scorer(get_selector("sketch"), "cuda", 128) == "cuda"
    assert scorer(get_selector("sketch", record_bytes=128), "cuda", 128) == "triton"
    assert [scorer(get_selector("rki4"), "cuda", dim) for dim in (64, 96, 128, 256, 576)] == ["cuda", "triton", "cuda", "cuda", "triton"]
    assert [scorer(get_selector("rki4", rank=rank), "cuda", 128) for rank in (2, 3, 8, 10)] == ["cuda", "triton", "cuda", "triton"]
    assert [scorer(get_selector("quad", bits=bits), "cuda", 128, 16) for bits in (4, 8)] == ["cuda", "triton"]
    assert [scorer(get_selector("minmax"), "cuda", 128, 4, dtype) for dtype in (torch.bfloat16, torch.float16)] == ["cuda", "triton"]
    assert scorer(get_selector("r8"), "cuda", 128, 17) == "triton"
    assert scorer(get_selector("rki4"), "torch", 128) == "torch"


def test_page_records_of_an_odd_size_are_scored_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA scorer reads 16 bytes at a time: a cache that does not end at such a border would be read past its end."""
    used: list[str] = []
    monkeypatch.setattr("kvskim.ops.cuda.score_pages.score_pages", lambda *_: used.append("cuda"))
    monkeypatch.setattr("kvskim.ops.triton.score_pages.score_pages", lambda *_, **__: used.append("triton"))
    monkeypatch.setattr("kvskim.ops.triton.forced.forced_mass", lambda *_, **__: None)
    batch = make_batch("rki4", [100, 40], heads=1, group=4, dim=128, dtype=torch.bfloat16)
    rows, columns = (2, 1), 4
    out = dict(
        scores=torch.zeros(*rows, batch.page_capacity, columns, dtype=torch.float16), base=torch.zeros(*rows, columns), forced=torch.zeros(*rows, columns),
        partials=torch.zeros(*rows, 1, columns),
    )
    for pages in (8, 9):
        records = torch.zeros(pages, 1, batch.records.shape[2], dtype=torch.uint8)
        score(
            batch.selector, batch.tables, batch.query, batch.key_cache, records, batch.block_table, batch.seq_lens, scale=batch.scale, sink_pages=1,
            window_pages=1, **out, scratch=None, kernels="cuda",
        )
    assert used == ["cuda", "triton"]
