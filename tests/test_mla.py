"""Latent attention (MLA): the operations on rows of 512 + 64 channels with one kv head, against the reference engine and against each other."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from kvskim.engines.decode import DecodeSettings, decode_attention
from kvskim.engines.decode_kernels import kernel_refusal
from kvskim.layout import PAGE_TOKENS
from kvskim.ops import attend as attend_module
from kvskim.ops.attend import attend, attending_kernels, serves_latent, shares_rows
from kvskim.ops.attend_plan import attend_scratch_sizes
from kvskim.ops.cuda import attend_latent as latent_kernel
from kvskim.ops.join_query import join_query
from kvskim.ops.latent_query import LatentQuery, joined
from kvskim.ops.score import reads_parts, score, scorer
from kvskim.ops.select import select
from kvskim.reference import ReferenceLayer
from kvskim.rules import RuleParameters
from kvskim.selectors import get_selector
from mla_data import LATENT, ROTARY, in_parts, make_latent_batch, run_latent_step
from select_cases import RULES, make_case
from sketch_cases import SketchCase, compare
from step_data import Batch
from test_step import page_table

BUDGET = RuleParameters(rule="budget", budget_pages=6, min_pages=0)
THRESHOLD = RuleParameters(tau=0.02, min_pages=2)
COVERAGE = RuleParameters(rule="coverage", coverage=0.8, min_pages=1)
LENGTHS = [0, 1, 15, 16, 17, 333]
SELECTORS = ["sketch", "rki4", "minmax", "mean", "oracle"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def reference_of(batch: Batch, rule: RuleParameters) -> ReferenceLayer:
    pages, dim = batch.records.shape[0], batch.key_cache.shape[3]
    latent = batch.value_cache.shape[3]
    layer = ReferenceLayer(
        batch.selector, batch.tables, num_pages=pages, num_kv_heads=1, head_dim=dim, value_dim=latent, scale=batch.scale, parameters=rule,
        window_pages=1, dtype=batch.key_cache.dtype,
    )
    layer.keys.copy_(batch.key_cache.reshape(pages, PAGE_TOKENS, 1, dim))
    layer.values.copy_(batch.value_cache.reshape(pages, PAGE_TOKENS, 1, latent))
    layer.records = batch.records
    return layer


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("rule", [BUDGET, THRESHOLD, COVERAGE], ids=lambda r: r.rule)
def test_torch_step_is_the_reference(selector: str, rule: RuleParameters) -> None:
    batch = make_latent_batch(selector, LENGTHS, group=16)
    out, lse, buffers = run_latent_step(batch, rule, kernels="torch")
    expected = reference_of(batch, rule).decode(batch.query, page_table(batch), batch.seq_lens)
    for r, rows in enumerate(expected.rows):
        for row in rows:
            count = int(buffers.counts[r, 0])
            assert count == len(row.pages)
            if not row.dense:
                assert buffers.pages[r, 0, :count].tolist() == row.pages.tolist()
            assert float(buffers.covered[r, 0]) == pytest.approx(row.covered, abs=1e-4)
    assert not expected.rows[-1][0].dense, "the case must be sparse"
    assert out.shape == (len(LENGTHS), 16, LATENT)
    torch.testing.assert_close(out, expected.out, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse, expected.lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rule", [BUDGET, THRESHOLD, COVERAGE], ids=lambda r: r.rule)
def test_budget_means_pages_of_a_request_whatever_the_group(rule: RuleParameters) -> None:
    """One page table per request: 128 query heads share it, and a budget counts its pages, the forced ones included."""
    batch = make_latent_batch("sketch", [700], group=128, latent=64, rotary=32)
    _, _, buffers = run_latent_step(batch, rule, kernels="torch")
    assert buffers.pages.shape[:2] == (1, 1)
    count = int(buffers.counts[0, 0])
    assert (count == 6) if rule is BUDGET else 2 < count < 44


CASES: list[dict[str, Any]] = [
    dict(group=16, selector="sketch", lengths=[0, 1, 15, 16, 17, 150], dtype=torch.bfloat16),
    dict(group=20, selector="sketch", lengths=[17, 0, 150], latent=96, rotary=32, dtype=torch.float16, block_size=32),
    dict(group=128, selector="sketch", record_bytes=128, lengths=[15, 150], latent=32, rotary=16, dtype=torch.bfloat16),
    dict(group=20, selector="rki4", lengths=[1, 200], latent=96, rotary=32, dtype=torch.float16),
    dict(group=64, selector="minmax", lengths=[200], latent=64, rotary=16, dtype=torch.bfloat16),
    dict(group=128, selector="mean", lengths=[200], latent=64, rotary=16, dtype=torch.bfloat16),
    dict(group=17, selector="oracle", lengths=[200], latent=64, rotary=16, dtype=torch.float16),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("settings", CASES, ids=lambda s: f"{s['selector']}-{s['group']}-{s.get('latent', LATENT)}")
@pytest.mark.parametrize("rule", [BUDGET], ids=lambda r: r.rule)
def test_triton_step_is_the_torch_step(settings: dict[str, Any], rule: RuleParameters) -> None:
    pytest.importorskip("triton")
    batch = make_latent_batch(**settings)
    check_step(batch, batch, rule, kernels="triton", truncated=True)


def check_step(batch: Batch, on_cpu: Batch, rule: RuleParameters, *, kernels: str, truncated: bool = False) -> None:
    """Selection equal but for pages at the very edge of the rule, because scores are float16; outputs equal where it is.

    truncated: bfloat16 weights are cut off instead of rounded, as Triton's interpreter does.
    """
    out, lse, buffers = run_latent_step(batch, rule, kernels=kernels)
    expected, expected_lse, expected_buffers = run_latent_step(on_cpu, rule, kernels="torch")
    counts, wanted = buffers.counts.cpu(), expected_buffers.counts
    same = 0
    for r, length in enumerate(on_cpu.seq_lens.tolist()):
        total = -(-length // 16)
        n, m = int(counts[r, 0]), int(wanted[r, 0])
        mine = set(range(total)) if n == total else set(buffers.pages[r, 0, :n].tolist())
        theirs = set(range(total)) if m == total else set(expected_buffers.pages[r, 0, :m].tolist())
        assert len(mine ^ theirs) <= max(2, m // 8), (r, sorted(mine ^ theirs))
        if mine == theirs:
            same += 1
            relative = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[batch.query.dtype] * (2 if truncated else 1)
            size = expected[r].float().abs().amax(-1, keepdim=True)
            error = (out[r].float().cpu() - expected[r].float()).abs()
            assert bool((error <= 2 * relative * size + 1e-6).all()), (r, float((error / size.clamp_min(1e-6)).max()))
            torch.testing.assert_close(lse[r].cpu(), expected_lse[r], atol=2e-3, rtol=1e-3)
            torch.testing.assert_close(buffers.covered[r].cpu(), expected_buffers.covered[r], atol=2e-2, rtol=2e-2)
    assert same >= 0.7 * len(counts)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("apart", [False, True])
def test_attend_with_values_narrower_than_keys(kernels: str, apart: bool) -> None:
    """Values that are the first channels of the rows, and the same values in memory of their own: two ways through the kernels."""
    pytest.importorskip("triton")
    batch = make_latent_batch("oracle", [0, 1, 15, 16, 17, 100], group=20, latent=80, rotary=24, dtype=torch.float32, block_size=32)
    values = batch.value_cache.clone() if apart else batch.value_cache
    assert shares_rows(batch.key_cache, values) is not apart
    pages = torch.full((6, 1, 4), -(2**30), dtype=torch.int32)
    pages[5, 0, :3] = torch.tensor([0, 3, 6])
    counts = torch.tensor([0, 1, 1, 1, 2, 3], dtype=torch.int32)[:, None]
    out = torch.full((6, 20, 80), torch.nan)
    lse = torch.full((6, 20), torch.nan)

    class Scratch:
        attend_partials = torch.full((200_000,), torch.nan)
        attend_tickets = torch.zeros(6, dtype=torch.int32)

    attend(
        batch.query, batch.key_cache, values, batch.block_table, batch.seq_lens, pages, counts, scale=batch.scale, out=out, lse=lse, scratch=Scratch(),
        kernels=kernels,
    )
    for r, length in enumerate(batch.seq_lens.tolist()):
        if length == 0:
            assert not out[r].any()
            assert torch.isneginf(lse[r]).all()
            continue
        listed = pages[r, 0, :3].tolist() if r == 5 else range(-(-length // 16))
        token = torch.tensor([p * 16 + t for p in listed for t in range(16) if p * 16 + t < length])
        rows = batch.key_cache[batch.block_table[r, token // 32].long(), token % 32, 0].double()
        logits = batch.query[r].double() @ rows.T * batch.scale
        torch.testing.assert_close(out[r].double(), logits.softmax(-1) @ rows[:, :80], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lse[r].double(), logits.logsumexp(-1), atol=1e-4, rtol=1e-4)


def test_triton_scores_of_wide_groups_equal_the_reference() -> None:
    """The score op itself on rows of 576 channels: int8 weights, float16 scores, partial sums and exact forced mass, with guards around the outputs."""
    pytest.importorskip("triton")
    from kvskim.ops import score as op
    from kvskim.selectors.sketch import Sketch

    case = SketchCase([0, 50], heads=1, group=20, dim=LATENT + ROTARY, block_size=32, layout="heads", chunks=2)
    out = case.outputs()
    op.score(Sketch(256), case.tables, **case.inputs, **case.settings(), **out, scratch=case.scratch(), kernels="triton")
    assert compare(case, out, score_tolerance=0.015) == []


@pytest.mark.parametrize("group", [20, 128])
@pytest.mark.parametrize("rule", [RULES[0], RULES[4], RULES[7], RULES[8], RULES[9]], ids=lambda r: f"{r.rule}-{r.combine}")
def test_triton_selects_for_wide_groups_as_torch_does(rule: RuleParameters, group: int) -> None:
    pytest.importorskip("triton")
    for flavour in ("plain", "ties"):
        case = make_case(group, heads=1, group=group, flavour=flavour)
        expected = case.copy()
        select(**expected.arguments(), rule=rule, kernels="torch")
        select(**case.arguments(), rule=rule, kernels="triton")
        assert case.guards_intact()
        assert case.counts.tolist() == expected.counts.tolist()
        assert case.pages.tolist() == expected.pages.tolist()
        torch.testing.assert_close(case.covered, expected.covered, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(("heads", "latent", "rotary"), [(16, 512, 64), (6, 40, 24)])
def test_the_parts_of_a_query_are_joined(kernels: str, heads: int, latent: int, rotary: int) -> None:
    """Strided as in an engine: the latent part by heads, the rotary part behind channels that are not rotated."""
    pytest.importorskip("triton")
    check_join("cpu", kernels, heads, latent, rotary)


def check_join(device: str, kernels: str, heads: int, latent: int, rotary: int) -> None:
    for rows in (0, 1, 5):
        first = torch.randn(heads, rows, latent, dtype=torch.bfloat16, device=device).transpose(0, 1)
        second = torch.randn(rows, heads, 128 + rotary, dtype=torch.bfloat16, device=device)[..., 128:]
        room = torch.full((rows * heads * (latent + rotary) + 64,), 7.0, dtype=torch.bfloat16, device=device)
        out = room[: rows * heads * (latent + rotary)].view(rows, heads, latent + rotary)
        join_query(first, second, out=out, kernels=kernels)
        assert torch.equal(out, torch.cat((first, second), -1))
        assert bool((room[out.numel() :] == 7.0).all())


def test_parts_of_a_query_that_do_not_fit_are_refused() -> None:
    latent, rotary = torch.zeros(2, 4, 8), torch.zeros(2, 4, 3)
    for first, second, out, message in (
        (latent, rotary, torch.zeros(2, 4, 12), "do not fit rows of"), (latent, rotary.half(), torch.zeros(2, 4, 11), "must be of one type"),
        (latent.mT.contiguous().mT, rotary, torch.zeros(2, 4, 11), "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            join_query(first, second, out=out, kernels="torch")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(("selector", "group", "latent", "rotary"), [("sketch", 16, LATENT, ROTARY), ("rki4", 20, 96, 32), ("oracle", 3, 40, 24)])
def test_a_query_in_parts_gives_the_same_step(kernels: str, selector: str, group: int, latent: int, rotary: int) -> None:
    pytest.importorskip("triton")
    lengths = [0, 1, 17, 150] if selector != "sketch" else [0, 100]
    batch = make_latent_batch(selector, lengths, group=group, latent=latent, rotary=rotary, dtype=torch.bfloat16)
    check_parts(batch, BUDGET, kernels)


def check_parts(batch: Batch, rule: RuleParameters, kernels: str) -> None:
    """Bit for bit, as the query has the same bits and nothing is added up in another order."""
    out, lse, buffers = run_latent_step(batch, rule, kernels=kernels)
    same, same_lse, others = run_latent_step(batch, rule, kernels=kernels, parts=True)
    assert torch.equal(buffers.counts, others.counts)
    for pages, of_parts, count in zip(buffers.pages, others.pages, buffers.counts):
        assert torch.equal(pages[0, : int(count)], of_parts[0, : int(count)])
    assert torch.equal(out, same)
    assert torch.equal(lse, same_lse)
    assert torch.equal(buffers.covered, others.covered)


def test_which_parts_are_read_where_they_lie() -> None:
    batch = make_latent_batch("sketch", [40], group=16, dtype=torch.bfloat16)
    query = in_parts(batch.query, LATENT)
    assert query.shape == batch.query.shape
    assert query[0:0].shape == (0, 16, LATENT + ROTARY)
    assert torch.equal(joined(query, "torch"), batch.query)
    assert joined(batch.query, "torch") is batch.query
    assert reads_parts(query, batch.tables, "cuda")
    assert not reads_parts(query, batch.tables, "triton")
    assert not reads_parts(query, make_latent_batch("mean", [40], group=16).tables, "cuda")
    wide = torch.zeros(1, 16, 8 + ROTARY, dtype=torch.bfloat16)
    assert not reads_parts(LatentQuery(query.latent, wide[..., 4:-4]), batch.tables, "cuda"), "rows must begin at multiples of 16 bytes"
    assert not reads_parts(LatentQuery(torch.zeros(1, 16, 528).bfloat16(), wide[..., :48]), batch.tables, "cuda"), "a step of 32 channels has one part"


def test_parts_that_do_not_fit_each_other_or_the_cache_are_refused() -> None:
    latent, rotary = torch.zeros(2, 4, 8), torch.zeros(2, 4, 3)
    with pytest.raises(ValueError, match=r"parts \[2, 4, 8\] and \[1, 4, 3\] of a query do not fit"):
        LatentQuery(latent, rotary[:1])
    with pytest.raises(ValueError, match="must be of one type on one device"):
        LatentQuery(latent, rotary.half())
    batch = make_latent_batch("sketch", [40], group=4, latent=96, rotary=32)
    small = torch.zeros(1, 1, 4)
    turned = LatentQuery(batch.query[..., :96], torch.zeros(1, 32, 4).mT)
    for query, message in ((in_parts(batch.query[..., :-1], 96), "do not fit"), (turned, "must be contiguous")):
        with pytest.raises(ValueError, match=message):
            score(
                batch.selector, batch.tables, query, batch.key_cache, batch.records, batch.block_table, batch.seq_lens, scale=1.0, sink_pages=1, window_pages=1,
                scores=torch.zeros(1, 1, 3, 4), base=small, forced=small, partials=small[None], scratch=None, kernels="torch",
            )


def test_cuda_leaves_to_triton_what_it_has_no_kernels_for() -> None:
    sketch = get_selector("sketch")
    assert [scorer(sketch, "cuda", 576, g) for g in (16, 17, 128)] == ["cuda"] * 3
    assert [scorer(get_selector("mean"), "cuda", 128, g) for g in (16, 17)] == ["cuda", "triton"]
    assert attending_kernels("cuda", 8, 128, 128) == "cuda"
    assert attending_kernels("cuda", 8, 576, 512) == attending_kernels("cuda", 17, 128, 128) == "triton"
    assert attending_kernels("torch", 8, 576, 512) == "torch"


def test_cuda_attends_latent_rows_that_it_can_copy() -> None:
    cache = torch.zeros(3, 16, 1, 584, dtype=torch.bfloat16)[..., :576]
    out = torch.zeros(2, 16, 512, dtype=torch.bfloat16)
    query = torch.zeros(2, 16, 576, dtype=torch.bfloat16)
    parts = in_parts(query, 512)
    assert serves_latent(query, cache, cache[..., :512], out)
    assert serves_latent(parts, cache, cache[..., :512], out)
    assert serves_latent(query.repeat(1, 8, 1), cache, cache[..., :512], out)
    assert not serves_latent(query.repeat(1, 9, 1), cache, cache[..., :512], out)
    assert not serves_latent(query, cache, cache[..., :512].clone(), out)
    assert not serves_latent(query.float(), cache.float(), cache.float()[..., :512], out.float())
    assert not serves_latent(query[..., :448], cache[..., :448], cache[..., :384], out[..., :384])
    odd = torch.zeros(3, 16, 1, 580, dtype=torch.bfloat16)[..., :576]
    assert not serves_latent(query, odd, odd[..., :512], out)
    shifted = torch.zeros(2, 16, 577, dtype=torch.bfloat16)
    assert not serves_latent(shifted[..., 1:], cache, cache[..., :512], out)
    assert not serves_latent(LatentQuery(parts.latent, shifted[..., 1:65]), cache, cache[..., :512], out)
    assert not serves_latent(query, cache, cache[..., :512], torch.zeros(2, 16, 514, dtype=torch.bfloat16)[..., :512])


def test_a_query_that_attend_joins_itself_is_not_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the caller says of the kernel ahead: the one that joins comes after that."""
    batch = make_latent_batch("mean", [40], group=16, dtype=torch.bfloat16)
    heard: list[tuple[bool, bool]] = []

    def launched(*arguments: object) -> None:
        heard.append(arguments[-3:-1])  # type: ignore[arg-type]

    monkeypatch.setattr(attend_module, "joined", lambda query, kernels: joined(query, "torch"))
    monkeypatch.setattr(latent_kernel, "attend_latent_cuda", launched)
    floats, tickets = attend_scratch_sizes(1, 1, 16, 512, 4, 1)
    scratch = SimpleNamespace(attend_partials=torch.zeros(floats), attend_tickets=torch.zeros(tickets, dtype=torch.int32))
    for query in (batch.query, in_parts(batch.query, 512), in_parts(batch.query, 448)):
        attend(
            query, batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens, torch.zeros(1, 1, 1, dtype=torch.int32),
            torch.full((1, 1), 3, dtype=torch.int32), scale=1.0, out=torch.zeros(1, 16, 512, dtype=torch.bfloat16), scratch=scratch, kernels="cuda",
            overlap_previous=True, settled=True, full_pages=3,
        )
    assert heard == [(True, True), (True, True), (True, False)]


def test_float8_latent_rows_are_refused() -> None:
    batch = make_latent_batch("oracle", [40], group=16, latent=64, rotary=16, dtype=torch.bfloat16)
    cache = batch.key_cache.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="float8 cache with keys of 80 and values of 64 channels can't be attended; use a bfloat16 or float16 cache"):
        attend(
            batch.query, cache, cache[..., :64], batch.block_table, batch.seq_lens, torch.zeros(1, 1, 1, dtype=torch.int32),
            torch.full((1, 1), 3, dtype=torch.int32), scale=1.0, out=torch.zeros(1, 16, 64, dtype=torch.bfloat16), scratch=None, kernels="torch",
        )


def test_records_cost_at_most_three_percent_of_the_latent_cache() -> None:
    assert get_selector("sketch").record_bytes(LATENT + ROTARY) <= 0.03 * PAGE_TOKENS * (LATENT + ROTARY) * 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("tokens", [176, 181])
def test_the_transformers_host_decodes_latent_rows_through_the_kernels(tokens: int) -> None:
    pytest.importorskip("triton")
    batch = make_latent_batch("rki4", [tokens], group=6, latent=64, rotary=16, dtype=torch.bfloat16)
    pages = -(-tokens // 16)
    physical = batch.block_table[0, :pages].long()
    key = batch.key_cache[physical].flatten(0, 1)[:tokens].transpose(0, 1).contiguous()
    records = batch.records[physical][: tokens // 16]
    common = (batch.selector, batch.tables, RuleParameters(rule="budget", budget_pages=5, min_pages=0), 1, 1, batch.scale)
    expected = decode_attention(DecodeSettings(*common), batch.query[0], key, key[..., :64], records)
    result = decode_attention(DecodeSettings(*common, kernels="triton"), batch.query[0], key, key[..., :64], records)
    assert torch.equal(result.pages, expected.pages)
    torch.testing.assert_close(result.out.float(), expected.out.float(), atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(result.covered, expected.covered, atol=1e-2, rtol=1e-2)


def test_which_latent_rows_the_kernels_of_the_transformers_host_take() -> None:
    sketch = get_selector("sketch")
    assert kernel_refusal(sketch, 128, 1, 576, 512, torch.bfloat16) is None
    assert kernel_refusal(sketch, 40, 1, 320, 256, torch.bfloat16) is None
    assert "129 query heads" in str(kernel_refusal(sketch, 129, 1, 576, 512, torch.bfloat16))
    assert "head dims 192 and 128" in str(kernel_refusal(sketch, 16, 16, 192, 128, torch.bfloat16))
