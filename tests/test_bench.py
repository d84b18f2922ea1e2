"""`kvskim bench`: what it says when measurements fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvskim import cli_bench
from kvskim.bench import kernels, problem
from kvskim.errors import KvskimError
from kvskim.ops import dispatch


@pytest.mark.parametrize(("errors", "code"), [([None, None], 0), ([None, "out of memory"], 1), (["no kernel", "no kernel"], 1)])
def test_fault_28_a_failed_measurement_fails_the_command(monkeypatch: pytest.MonkeyPatch, errors: list[str | None], code: int) -> None:
    rows = [kernels.Row(op="score", shape="1 x 1K", kernels="cuda", us=1.0, floor_us=0.5, error=error or "") for error in errors]
    bench = SimpleNamespace(run=lambda: rows, bandwidth=1e12, dense_reason="vLLM is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(dispatch, "choose", lambda *_: dispatch.Choice("cuda", "as asked"))
    monkeypatch.setattr(kernels, "KernelBench", lambda *_, **__: bench)
    result = CliRunner().invoke(cli_bench.app, ["kernels"])
    assert result.exit_code == code, result.output
    for error in filter(None, errors):
        assert error in result.output


def test_only_some_cases_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels.gc, "collect", lambda: 0)
    called: list[tuple[str, Any]] = []
    for operation in ("score", "select", "attend", "step", "encode"):
        monkeypatch.setattr(kernels.KernelBench, f"bench_{operation}", lambda _, shape, *more, operation=operation: called.append((operation, shape)))
    kernels.KernelBench(only="MLA").run()
    assert called == [("step", shape) for shape in kernels.LATENT_SHAPES]
    called.clear()
    kernels.KernelBench(only="whole step", quick=True).run()
    assert [shape.latent for _, shape in called] == [0, 0, 512]
    called.clear()
    kernels.KernelBench().run()
    assert {operation for operation, _ in called} == {"score", "select", "attend", "step", "encode"}
    with pytest.raises(KvskimError, match="--only is 'mla', and no case has it in its title; the titles are: score, 1 x 16K"):
        kernels.KernelBench(only="mla")


def test_select_is_measured_with_scores_that_differ_and_with_scores_that_hardly_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    filled: list[bool] = []
    made: list[tuple[str, str]] = []

    def buffers(_: int) -> SimpleNamespace:
        return SimpleNamespace(**{name: torch.zeros(1) for name in ("scores", "base", "forced", "partials", "pages", "counts", "covered")})

    def measure(_: Any, op: str, shape: Any, make: Any, nbytes: int, **more: Any) -> None:
        make("cuda")
        made.append((op, str(shape)))

    monkeypatch.setattr(kernels, "workspace", lambda *_: SimpleNamespace(columns=4, buffers=buffers))
    monkeypatch.setattr(kernels.problem, "seq_lens", lambda _: torch.zeros(1))
    monkeypatch.setattr(kernels.problem, "fill_scores", lambda *arguments: filled.append(arguments[-1]))
    monkeypatch.setattr(kernels.torch, "ones", lambda *_, **__: torch.zeros(1))
    monkeypatch.setattr(kernels.KernelBench, "measure", measure)
    bench = kernels.KernelBench(only="select budget", quick=True, progress=lambda _: None)
    assert bench.run() == []
    shapes = [str(kernels.SHAPE_16K), str(kernels.SHAPE_8X128K)]
    assert made == [(op, shape) for shape in shapes for op in ("select budget", "select budget, near-equal scores")]
    assert filled == [near_equal for _ in shapes for near_equal in (False, True) for _ in range(8)]
    kernels.KernelBench(only="near-equal", quick=True, progress=lambda _: None).run()
    assert {op for op, _ in made[4:]} == {"select budget, near-equal scores", "select threshold, near-equal scores"}


@pytest.mark.parametrize("near_equal", [False, True])
def test_scores_of_the_select_cases(near_equal: bool) -> None:
    torch.manual_seed(0)
    scores, base, forced = torch.zeros(1, 2, 1024, 4, dtype=torch.float16), torch.ones(1, 2, 4), torch.ones(1, 2, 4)
    partials = torch.full((1, 2, 7, 4), torch.nan)
    problem.fill_scores(scores, base, forced, partials, near_equal)
    assert not base.any()
    assert not forced.any()
    pages = scores[:, :, 1:-1].double()
    torch.testing.assert_close(partials.double().sum(2), pages.exp().sum(2), rtol=1e-5, atol=0)
    mass = pages.exp().mean(-1)
    distinct, ratio = len(pages.unique()), float(mass.max() / mass.min())
    if near_equal:
        assert distinct <= 4
        assert ratio < 1.01
    else:
        assert distinct > 100
        assert ratio > 100


def test_a_case_that_can_not_be_set_up_is_a_row_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels.gc, "collect", lambda: 0)
    monkeypatch.setattr(kernels.KernelBench, "bench_step", lambda *_: 1 / 0)
    rows = kernels.KernelBench(only="MLA, 16", quick=True, progress=lambda _: None).run()
    assert [(row.op, row.error) for row in rows] == [("set-up of whole step, 1 x 128K, MLA, 16 heads, d 576", "ZeroDivisionError: division by zero")]


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CliRunner().invoke(cli_bench.app, ["kernels"]).exit_code != 0
