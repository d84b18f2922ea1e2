"""Selectors on latent rows (benchmarks/latent_fidelity): how much attention mass 128 of 1024 pages hold when each of them chooses, and what is measured."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch

FOLDER = str(Path(__file__).parents[1] / "benchmarks" / "latent_fidelity")
sys.path.insert(0, FOLDER)
import joined_heads  # noqa: E402
import latent_fidelity  # noqa: E402
import planted_rows  # noqa: E402

from kvskim.calibration import LayerCalibration  # noqa: E402
from kvskim.rotary import Rotary  # noqa: E402

sys.path.remove(FOLDER)

BUDGET = 128


@functools.lru_cache
def planted() -> planted_rows.PlantedRows:
    torch.set_num_threads(1)
    return planted_rows.PlantedRows(pages=1024, heads=16)


def test_sketch_is_level_with_rki4_and_within_a_percent_of_the_oracle() -> None:
    mass = {name: latent_fidelity.covered(planted(), name, (BUDGET,))[0] for name in ("oracle", "sketch", "rki4", "minmax")}
    assert 0.5 < mass["oracle"] < 0.98, "128 pages must neither be enough nor hopeless"
    assert mass["oracle"] - mass["sketch"] < 0.01
    assert mass["sketch"] > mass["rki4"] - 0.005
    assert mass["oracle"] - mass["minmax"] > 0.1, "a poor selector must be seen as one"


def test_joined_rows_are_the_attention_of_the_model() -> None:
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(3, 48, 8, generator=generator) for _ in range(2))
    queries = torch.randn(6, 5, 8, generator=generator)
    rows, joined = joined_heads.joined_rows(keys, values), joined_heads.joined_queries(queries, 3)
    assert rows.shape == (48, 48)
    assert joined.shape == (6, 5, 48)
    weights = (joined @ rows.T).softmax(-1)
    for head in range(6):
        expected = (queries[head] @ keys[head // 2].T).softmax(-1)
        torch.testing.assert_close(weights[head], expected)
        # Like latent attention, the output is made of the first channels of the same rows.
        own = weights[head] @ rows[:, :24]
        torch.testing.assert_close(own.unflatten(-1, (3, 8))[:, head // 2], expected @ values[head // 2])


def test_joined_rows_are_turned_head_by_head() -> None:
    generator = torch.Generator().manual_seed(4)
    keys, values = (torch.randn(3, 48, 8, generator=generator) for _ in range(2))
    frequency, offset = torch.tensor([1.0, 0.3, 0.1, 0.03]), torch.arange(48) * 7
    turned = joined_heads.JoinedRotary(frequency, heads=3).rotate(joined_heads.joined_rows(keys, values), offset)
    torch.testing.assert_close(turned, joined_heads.joined_rows(Rotary(frequency).rotate(keys, offset), values))


class Given:
    """A problem of one query head and pages whose mass is given: the keys of a page are the logarithms of a sixteenth of it."""

    def __init__(self, mass: list[float]) -> None:
        self.pages = (torch.tensor(mass) / 16).log()[:, None, None, None].expand(-1, 1, 16, 1)
        self.queries = torch.ones(1, 1, 1, 1)

    def calibration(self, record_bytes: int) -> LayerCalibration:
        raise AssertionError("the oracle needs none")


def test_the_first_and_the_newest_pages_count_and_are_in_every_choice() -> None:
    mass = [0.02, 0.3, 0.1, 0.25, 0.2, 0.05, 0.08]
    found = latent_fidelity.covered(Given(mass), "oracle", (3, 4, 5, 7))
    assert found == pytest.approx([0.15, 0.45, 0.7, 1.0], abs=1e-5)
