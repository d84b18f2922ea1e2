"""How much each query head counts in a calibration: what its attention looks like on the pages that can be chosen."""

import pytest
import torch

from kvskim.calibration import fit_layer
from kvskim.calibration_heads import SAMPLED_QUERIES, head_weights
from kvskim.selectors import get_selector


def keys_and_queries(tokens: int = 640, dim: int = 32, group: int = 2, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(heads, tokens, dim, generator=generator), torch.randn(heads * group, 40, dim, generator=generator)


def test_weights_are_the_squared_mean_concentration_of_each_head() -> None:
    """Against one query, one page at a time. The pages begin at position 16; the newest two of a query are in the total only."""
    keys, queries = keys_and_queries()
    positions = torch.arange(40) * 16 + 5
    weights = head_weights(keys.unflatten(1, (-1, 16)), queries, torch.arange(16, 656, 16), positions)
    for head in range(2):
        means = []
        for query in queries[2 * head : 2 * head + 2]:
            total = 0.0
            for q, position in zip(query, positions.tolist()):
                masses = {16 * p + 16: float((keys[head, 16 * p : 16 * p + 16].double() @ q.double()).exp().sum()) for p in range(40)}
                seen = {first: mass for first, mass in masses.items() if first <= position}
                total += sum((mass / sum(seen.values())) ** 2 for first, mass in seen.items() if first // 16 <= position // 16 - 2)
            means.append(total / 40)
        expected = torch.tensor(means) ** 2 / (torch.tensor(means) ** 2).mean()
        torch.testing.assert_close(weights[2 * head : 2 * head + 2], expected, atol=1e-4, rtol=1e-4)
    assert weights.unflatten(0, (2, 2)).mean(1).tolist() == pytest.approx([1, 1])


def test_queries_that_are_not_looked_at_lie_evenly_between_the_others() -> None:
    keys, queries = keys_and_queries()
    many = queries.repeat_interleave(-(-2 * SAMPLED_QUERIES // 40), 1)[:, : 2 * SAMPLED_QUERIES]
    other = many.clone()
    other[:, 1::2] = 0
    pages, first = keys.unflatten(1, (-1, 16)), torch.arange(0, 640, 16)
    assert torch.equal(head_weights(pages, many, first, None), head_weights(pages, other, first, None))
    other[:, ::2] *= 2
    assert not torch.allclose(head_weights(pages, many, first, None), head_weights(pages, other, first, None), atol=0.01)


def test_heads_count_alike_where_no_query_has_a_page_before_it() -> None:
    keys, queries = keys_and_queries()
    assert head_weights(keys.unflatten(1, (-1, 16)), queries, torch.arange(16, 656, 16), torch.arange(40)).tolist() == [1, 1, 1, 1]


def retrieval_and_broad_head() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys ``[1, T, 32]`` of two halves of channels, and queries: one head finds single tokens by the first half, the other looks at all by the second."""
    generator = torch.Generator().manual_seed(7)
    keys = torch.randn(1, 2048, 32, generator=generator)
    positions = torch.arange(1024, 2048, 8)
    wanted = torch.randint(0, 900, (len(positions),), generator=generator)
    queries = torch.zeros(2, len(positions), 32)
    queries[0, :, :16] = keys[0, wanted, :16]
    queries[1, :, 16:] = 0.3 * torch.randn(len(positions), 16, generator=generator)
    return keys, queries, positions


def test_a_head_that_looks_for_single_pages_gets_most_of_the_record() -> None:
    """Its scores are better than those of a fit that lets it look like its neighbour, whose attention hardly depends on the choice."""
    keys, queries, positions = retrieval_and_broad_head()
    pages = keys.unflatten(1, (-1, 16)).transpose(0, 1)
    weights = head_weights(keys.unflatten(1, (-1, 16)), queries, torch.arange(0, 2048, 16), positions)
    assert weights[0] > 1.9

    def error(calibration_queries: torch.Tensor, head: int) -> float:
        tables = fit_layer(keys, calibration_queries, record_bytes=128, query_positions=positions).sketch
        selector, q = get_selector("sketch", record_bytes=128), queries[None, :, :64].permute(2, 0, 1, 3)
        exact = torch.einsum("nhgd,phtd->nhpgt", q, pages).logsumexp(-1)
        return float((selector.score(q, selector.encode(pages, tables), tables) - exact)[..., head].std() / exact[..., head].std())

    # Queries of the same directions, all so short that every head attends to everything alike.
    alike = queries / queries.norm(dim=-1, keepdim=True) * 1e-3
    assert error(queries, 0) < 0.8 * error(alike, 0)
    assert error(queries, 1) > error(alike, 1)
