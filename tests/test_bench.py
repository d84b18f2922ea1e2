"""`kvskim bench`: what it says when measurements fail."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from kvskim import cli_bench
from kvskim.bench import kernels
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


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CliRunner().invoke(cli_bench.app, ["kernels"]).exit_code != 0
