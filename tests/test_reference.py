"""The reference engine against brute force in float64."""

import math

import pytest
import torch

from kvskim.calibration import fit_layer
from kvskim.reference import ReferenceLayer
from kvskim.rules import RuleParameters
from kvskim.selectors import SELECTORS, get_selector
from kvskim.selectors.base import PageTables


def brute_force(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float, pages: torch.Tensor | None = None):
    """q [Hq, D], k, v [T, H, D] -> out [Hq, D], lse [Hq], in float64, over the tokens of ``pages [H, ...]`` (None: all)."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[0] // k.shape[1]
    out, lse = [], []
    for i in range(q.shape[0]):
        h = i // group
        logits = torch.stack([scale * torch.dot(q[i], k[t, h]) for t in range(k.shape[0])])
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if pages is not None:
            kept = torch.isin(torch.arange(k.shape[0]) // 16, pages[h])
            logits = torch.where(kept, logits, torch.tensor(-torch.inf, dtype=torch.float64))
        m = logits.max()
        w = (logits - m).exp()
        out.append((w[:, None] * v[:, h]).sum(0) / w.sum())
        lse.append(m + w.sum().log())
    return torch.stack(out), torch.stack(lse)


def filled_layer(selector: str, lengths: list[int], *, heads: int = 2, group: int = 2, dim: int = 32, softcap: float = 0.0,
                 parameters: RuleParameters | None = None, seed: int = 0, calibrated: bool = True, **options: int):
    generator = torch.Generator().manual_seed(seed)
    keys = [torch.randn(n, heads, dim, generator=generator) for n in lengths]
    values = [torch.randn(n, heads, dim, generator=generator) for n in lengths]
    query = torch.randn(len(lengths), heads * group, dim, generator=generator) * 2
    scale = dim**-0.5
    chosen = get_selector(selector)
    tables = None
    if calibrated:
        sample = torch.randn(heads, 256, dim, generator=generator)
        tables = fit_layer(sample, torch.randn(heads * group, 64, dim, generator=generator) * scale).sketch \
            if selector == "sketch" else PageTables(torch.zeros(heads, dim))
    pages = [-(-n // 16) for n in lengths]
    order = torch.randperm(sum(pages) + 3, generator=generator)[: sum(pages)]
    layer = ReferenceLayer(
        chosen, tables, num_pages=sum(pages) + 3, num_kv_heads=heads, head_dim=dim, scale=scale, softcap=softcap,
        parameters=parameters or RuleParameters(min_pages=0), **options,
    )
    table = torch.zeros(len(lengths), max([*pages, 1]), dtype=torch.int64)
    at = 0
    for r, n in enumerate(lengths):
        table[r, : pages[r]] = order[at : at + pages[r]]
        at += pages[r]
        slots = table[r][torch.arange(n) // 16] * 16 + torch.arange(n) % 16
        layer.write(keys[r], values[r], slots)
    return layer, query, table, torch.tensor(lengths), keys, values


@pytest.mark.parametrize("selector", list(SELECTORS))
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_everything_selected_is_dense_attention(selector: str, softcap: float) -> None:
    lengths = [1, 15, 16, 17, 0, 100]
    everything = RuleParameters(min_pages=10_000)
    layer, query, table, seq_lens, keys, values = filled_layer(selector, lengths, softcap=softcap, parameters=everything)
    result = layer.decode(query, table, seq_lens)
    for r, n in enumerate(lengths):
        if n == 0:
            assert (result.out[r] == 0).all()
            assert (result.lse[r] == -math.inf).all()
            assert result.rows[r] == []
            continue
        out, lse = brute_force(query[r], keys[r], values[r], layer.scale, softcap)
        torch.testing.assert_close(result.out[r].double(), out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result.lse[r].double(), lse, atol=1e-5, rtol=1e-5)
        assert all(row.dense and row.covered == 1.0 for row in result.rows[r])


@pytest.mark.parametrize("group", [1, 3])
def test_oracle_with_a_budget_takes_the_heaviest_pages(group: int) -> None:
    n, budget = 16 * 12 + 5, 5
    parameters = RuleParameters(rule="budget", budget_pages=budget, min_pages=0)
    layer, query, table, seq_lens, keys, values = filled_layer("oracle", [n], group=group, parameters=parameters)
    result = layer.decode(query, table, seq_lens)
    pages = []
    for h in range(2):
        logits = torch.einsum("gd,td->gt", query[0, h * group : (h + 1) * group].double(), keys[0][:, h].double()) * layer.scale
        mass = logits.softmax(-1).mean(0)
        by_page = torch.zeros(13, dtype=torch.float64).index_add_(0, torch.arange(n) // 16, mass)
        best = by_page[1:11].topk(budget - 3).indices + 1
        expected = torch.tensor(sorted([0, 11, 12, *best.tolist()]))
        row = result.rows[0][h]
        assert torch.equal(row.pages, expected)
        assert row.exact_covered == pytest.approx(float(by_page[expected].sum()), abs=1e-5)
        assert row.covered == pytest.approx(row.exact_covered, abs=1e-4)  # the oracle's estimate is exact
        pages.append(expected)
    out, lse = brute_force(query[0], keys[0], values[0], layer.scale, 0.0, torch.stack(pages))
    torch.testing.assert_close(result.out[0].double(), out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.lse[0].double(), lse, atol=1e-5, rtol=1e-5)


def test_uncalibrated_layer_attends_everything() -> None:
    layer, query, table, seq_lens, keys, values = filled_layer("sketch", [200], calibrated=False,
                                                               parameters=RuleParameters(rule="budget", budget_pages=4, min_pages=0))
    result = layer.decode(query, table, seq_lens)
    out, _ = brute_force(query[0], keys[0], values[0], layer.scale, 0.0)
    torch.testing.assert_close(result.out[0].double(), out, atol=1e-5, rtol=1e-5)


def test_fault_01_a_page_is_recorded_only_when_its_last_token_is_written() -> None:
    layer, *_ = filled_layer("mean", [16])
    layer.records.fill_(0xAA)
    keys = torch.randn(16, 2, 32)
    for t in range(16):
        assert (layer.records[2] == 0xAA).all()
        layer.write(keys[t : t + 1], keys[t : t + 1], torch.tensor([2 * 16 + t]))
    expected = layer.selector.encode(keys.transpose(0, 1)[None], layer.tables)[0]
    assert torch.equal(layer.records[2], expected)


def test_reused_page_is_recorded_anew_and_padding_is_inert() -> None:
    layer, *_ = filled_layer("mean", [16])
    a, b = torch.randn(16, 2, 32), torch.randn(16, 2, 32)
    slots = torch.arange(16) + 16
    layer.write(a, a, slots)
    first = layer.records[1].clone()
    before = layer.records.clone()
    layer.write(b, b, torch.full((16,), -1))
    assert torch.equal(layer.records, before)
    layer.write(b, b, slots)
    assert not torch.equal(layer.records[1], first)
    assert torch.equal(layer.records[1], layer.selector.encode(b.transpose(0, 1)[None], layer.tables)[0])


def test_requests_of_a_batch_do_not_see_each_other() -> None:
    lengths = [100, 260, 33]
    parameters = RuleParameters(rule="budget", budget_pages=4, min_pages=0)
    layer, query, table, seq_lens, *_ = filled_layer("sketch", lengths, parameters=parameters)
    together = layer.decode(query, table, seq_lens)
    for r in range(3):
        alone = layer.decode(query[r : r + 1], table[r : r + 1], seq_lens[r : r + 1])
        torch.testing.assert_close(alone.out[0], together.out[r])
        assert [row.pages.tolist() for row in alone.rows[0]] == [row.pages.tolist() for row in together.rows[r]]


def test_fault_12_the_window_must_hold_the_open_page() -> None:
    with pytest.raises(ValueError, match="window_pages is 0; it must be at least 1"):
        filled_layer("mean", [16], window_pages=0)
