"""`kvskim serve`, `kvskim doctor` and what `kvskim check` compares."""

import sys

import pytest
import typer
from typer.testing import CliRunner

from kvskim import cli_vllm
from kvskim.config import ConfigError
from kvskim.engines.vllm.check import Agreement, compare
from kvskim.errors import KvskimError


@pytest.fixture
def app(monkeypatch):
    for name in ("KVSKIM_CONFIG", "KVSKIM_DISABLE", "LOCKS_CONFIG", "AMASS_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cli_vllm, "version", lambda name: "0.24.0")
    result = typer.Typer()
    result.command("serve", context_settings=cli_vllm.PASS_THROUGH)(cli_vllm.serve)
    result.command("doctor")(cli_vllm.doctor)
    return result


@pytest.fixture
def executed(monkeypatch):
    calls = []
    monkeypatch.setattr(cli_vllm.os, "execv", lambda program, arguments: calls.append((program, arguments)))
    return calls


def invoke(app, *arguments):
    return CliRunner().invoke(app, arguments)


def test_serve_sets_the_backend_and_passes_the_rest(app, executed):
    result = invoke(app, "serve", "meta/model", "--max-model-len", "4096", "-tp", "2", "--enforce-eager")
    assert result.exit_code == 0, result.output
    program, arguments = executed[0]
    assert program == sys.executable
    assert arguments[1:] == [
        "-m", "vllm.entrypoints.cli.main", "serve", "meta/model", "--attention-backend", "CUSTOM", "--max-model-len", "4096", "-tp", "2", "--enforce-eager",
    ]


@pytest.mark.parametrize("given", [("--attention-backend", "CUSTOM"), ("--attention-backend=custom",)])
def test_serve_leaves_the_backend_where_it_is_given(app, executed, given):
    assert invoke(app, "serve", "m", *given).exit_code == 0
    assert executed[0][1][4:] == ["m", *given]


def test_serve_hands_its_configuration_to_the_workers(app, executed, monkeypatch):
    monkeypatch.setenv("KVSKIM_CONFIG", "{}")  # restored afterwards
    assert invoke(app, "serve", "m", "--config", '{"tau": 0.01}').exit_code == 0
    assert cli_vllm.os.environ["KVSKIM_CONFIG"] == '{"tau": 0.01}'


@pytest.mark.parametrize(("arguments", "environment", "error", "word"), [
    (("--attention-backend", "TRITON_ATTN"), {}, KvskimError, "TRITON_ATTN"),
    (("--config", '{"tau": 3}'), {}, ConfigError, "tau=3"),
    ((), {"KVSKIM_DISABLE": "1"}, KvskimError, "KVSKIM_DISABLE"),
])
def test_serve_refuses_what_would_not_be_sparse(app, executed, monkeypatch, arguments, environment, error, word):
    monkeypatch.setenv("KVSKIM_CONFIG", "{}")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = invoke(app, "serve", "m", *arguments)
    assert isinstance(result.exception, error)
    assert word in str(result.exception)
    assert not executed


def test_serve_without_vllm(app, executed, monkeypatch):
    def missing(name):
        raise cli_vllm.PackageNotFoundError(name)

    monkeypatch.setattr(cli_vllm, "version", missing)
    result = invoke(app, "serve", "m")
    assert "kvskim[vllm]" in str(result.exception)


def test_doctor_reports_every_finding(app, monkeypatch):
    monkeypatch.setattr(cli_vllm, "nvcc_path", lambda: 1 / 0)
    result = invoke(app, "doctor")
    assert result.exit_code == 0, result.output
    for word in ("torch", "0.24 to 0.33", "kernels", "configuration", "GPU", "vLLM plugin"):
        assert word in result.output
    # A finding that fails is shown and hides no other.
    assert "ZeroDivisionError" in result.output


def test_doctor_shows_a_path_that_looks_like_markup_as_it_is(app, monkeypatch):
    monkeypatch.setenv("KVSKIM_CONFIG", "/no[/red]where")
    result = invoke(app, "doctor")
    assert result.exit_code == 0, result.output
    assert "/no[/red]where" in "".join(result.output.split())


def output(tokens, logprobs, likeliest=None):
    return {"tokens": tokens, "logprobs": logprobs, "likeliest": likeliest or [{} for _ in tokens]}


def test_compare():
    dense = {"outputs": [
        output([1, 2, 3], [-0.1, -0.2, -0.3]), output([1, 2, 3], [-0.1, -0.2, -0.3], [{}, {"2": -0.2, "9": -0.25}, {}]), output([5], [-1.0]),
    ]}
    same = {"outputs": [output([1, 2, 3], [-0.1, -0.2, -0.4]), output([1, 9, 9], [-0.1, -0.2, -5.0]), output([6], [-1.0])]}
    result = compare(dense, same)
    assert (result.prompts, result.equal) == (3, 1)
    assert result.tokens == pytest.approx(4 / 7)
    assert result.logprob == pytest.approx(0.1)
    # The third prompt's other token is not among the likeliest.
    assert result.gap == float("inf")
    tie = compare({"outputs": dense["outputs"][:2]}, {"outputs": same["outputs"][:2]})
    assert tie == Agreement(2, 1, pytest.approx(4 / 6), pytest.approx(0.1), pytest.approx(0.05))
    with pytest.raises(ValueError, match=r"longer|shorter"):
        compare(dense, {"outputs": []})
