"""`kvskim config`: the effective configuration and where each value came from."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from kvskim.cli_config import config
from kvskim.config import SkimConfig

app = typer.Typer()
app.command("config")(config)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSKIM_CONFIG", "KVSKIM_DISABLE", "LOCKS_CONFIG", "AMASS_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def rows(output: str) -> dict[str, list[str]]:
    """The cells of the table by setting."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in cells}


def test_the_table_shows_values_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSKIM_CONFIG", '{"tau": 0.5, "dense_layers": [0]}')
    result = CliRunner().invoke(app, ["sink_pages=2"])
    assert result.exit_code == 0
    shown = rows(result.stdout)
    assert set(shown) == set(SkimConfig().model_dump())
    assert shown["tau"] == ["0.5", "KVSKIM_CONFIG, inline"]
    assert shown["dense_layers"] == ["[0]", "KVSKIM_CONFIG, inline"]
    assert shown["sink_pages"] == ["2", "arguments"]
    assert shown["selector"] == ["sketch", "default"]
    assert result.stderr == ""


def test_settings_that_the_rule_does_not_use_are_not_shown() -> None:
    shown = rows(CliRunner().invoke(app, ["rule=budget", "budget_pages=64"]).stdout)
    assert shown["budget_pages"] == ["64", "arguments"]
    assert "tau" not in shown
    assert "coverage" not in shown


def test_json_holds_a_configuration_that_can_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKS_CONFIG", '{"score": "rki4", "r8_rank": 4, "coverage": 0.9}')
    monkeypatch.setenv("KVSKIM_DISABLE", "no")
    result = CliRunner().invoke(app, ["--json", "kernels=torch", "sink_pages=0"])
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    expected = SkimConfig(
        selector="rki4", selector_options={"rank": 4}, rule="coverage", coverage=0.9, kernels="torch", sink_pages=0
    )
    assert SkimConfig(**told["config"]) == expected
    assert told["origins"]["kernels"] == "arguments"
    assert told["origins"]["selector_options"] == "LOCKS_CONFIG, inline, key r8_rank"
    assert told["origins"].keys() == told["config"].keys()
    assert len(told["warnings"]) == 1
    assert told["disabled"] is False


def test_warnings_and_the_switch_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKS_CONFIG", '{"score": "quest"}')
    monkeypatch.setenv("KVSKIM_DISABLE", "1")
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert """KVSKIM_CONFIG='{"selector": "minmax"}'""" in result.stderr
    assert "KVSKIM_DISABLE switches kvskim off" in result.stderr
    assert json.loads(CliRunner().invoke(app, ["--json"]).stdout)["disabled"] is True


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        (["tau=2"], {}, "Error: tau=2 (from arguments) must be a number greater than 0 and at most 1\n"),
        (["tau"], {}, "Error: 'tau' is not a setting: write KEY=VALUE, such as tau=0.005\n"),
        ([], {"KVSKIM_CONFIG": "/no/such/file.yaml"}, "the file /no/such/file.yaml does not exist"),
        ([], {"KVSKIM_DISABLE": "maybe"}, "Error: KVSKIM_DISABLE='maybe' must be 1, true or yes"),
    ],
)
def test_errors_are_one_line_and_exit_two(
    monkeypatch: pytest.MonkeyPatch, words: list[str], variables: dict[str, str], expected: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
