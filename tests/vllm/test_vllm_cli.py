"""`kvskim serve`, `kvskim doctor` and `kvskim check`."""

import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from kvskim import cli_vllm
from kvskim.config import ConfigError, configured_by
from kvskim.engines.vllm import check
from kvskim.engines.vllm.check import Agreement, compare, run_engine
from kvskim.errors import KvskimError


def configuration_of(model, revision="main"):
    """In the place of the model hub."""
    if model == "unknown":
        raise OSError("there is no such model")
    latent = model == "latent/model" and revision == "main"
    return {"text_config": {"kv_lora_rank": 512}} if latent else {"kv_lora_rank": None}, {}


@pytest.fixture
def app(monkeypatch):
    for name in ("KVSKIM_CONFIG", "KVSKIM_DISABLE", "LOCKS_CONFIG", "AMASS_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cli_vllm, "version", lambda name: "0.24.0")
    monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", configuration_of)
    result = typer.Typer()
    result.command("serve", context_settings=cli_vllm.PASS_THROUGH)(cli_vllm.serve)
    result.command("doctor")(cli_vllm.doctor)
    result.command("check")(cli_vllm.check)
    return result


@pytest.fixture
def executed(monkeypatch):
    calls = []
    monkeypatch.setattr(cli_vllm.os, "execv", lambda program, arguments: calls.append((program, arguments)))
    return calls


def invoke(app, *arguments):
    return CliRunner().invoke(app, arguments)


def test_fault_21_serve_sets_the_backend_and_passes_the_rest(app, executed):
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


@pytest.mark.parametrize(("model", "options", "backend"), [
    ("latent/model", (), "FLASH_ATTN_MLA"), ("latent/model", ("--revision", "main"), "FLASH_ATTN_MLA"), ("latent/model", ("--revision=older",), "CUSTOM"),
    ("meta/model", (), "CUSTOM"), ("unknown", (), "CUSTOM"),
])
def test_serve_takes_the_place_of_vllms_latent_attention(app, executed, monkeypatch, model, options, backend):
    monkeypatch.setenv("KVSKIM_CONFIG", "{}")  # restored afterwards
    monkeypatch.delenv("KVSKIM_CONFIG")
    assert invoke(app, "serve", model, *options).exit_code == 0
    assert executed[0][1][4:] == [model, "--attention-backend", backend, *options]
    # Without a configuration the plugin would leave FLASH_ATTN_MLA to vLLM.
    assert cli_vllm.os.environ.get("KVSKIM_CONFIG") == ("{}" if backend == "FLASH_ATTN_MLA" else None)
    assert configured_by() == ("KVSKIM_CONFIG" if backend == "FLASH_ATTN_MLA" else None)


def test_serve_of_latent_attention_keeps_the_users_choices(app, executed, monkeypatch):
    monkeypatch.setenv("KVSKIM_CONFIG", '{"tau": 0.02}')
    assert invoke(app, "serve", "latent/model", "--attention-backend", "flash_attn_mla").exit_code == 0
    assert executed[0][1][4:] == ["latent/model", "--attention-backend", "flash_attn_mla"]
    assert cli_vllm.os.environ["KVSKIM_CONFIG"] == '{"tau": 0.02}'
    result = invoke(app, "serve", "latent/model", "--attention-backend", "CUSTOM")
    assert "kvskim serve sets it to FLASH_ATTN_MLA" in str(result.exception)


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


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return str(tmp_path)


@pytest.mark.parametrize(("arguments", "error", "words"), [
    (("nowhere",), KvskimError, "there is no model folder at nowhere"),
    (("MODEL", "--config", '{"tau": 3}'), ConfigError, "tau=3"),
    (("MODEL", "--config", "nowhere.json"), ConfigError, "nowhere.json"),
    (("MODEL", "--context", "4000"), KvskimError, "--context is 4000, and the model has 4096 positions, of which decode takes 129: set it to at most 3967"),
    (("MODEL", "--tokens", "5000"), KvskimError, "--tokens is 5000, and the model has 4096 positions"),
])
def test_check_refuses_before_an_engine_is_started(app, model, monkeypatch, arguments, error, words):
    monkeypatch.setattr(check, "run_engine", lambda *_, **__: pytest.fail("an engine was started"))
    result = invoke(app, "check", *(model if word == "MODEL" else word for word in arguments))
    assert isinstance(result.exception, error), result.output
    assert words in str(result.exception)


@pytest.mark.parametrize("option", [("--context", "10"), ("--prompts", "0"), ("--tokens", "1")])
def test_check_refuses_numbers_out_of_range(app, model, option):
    result = invoke(app, "check", model, *option)
    assert result.exit_code == 2
    assert option[0] in result.output


def test_check_needs_a_supported_vllm(app, model, monkeypatch):
    monkeypatch.setattr(cli_vllm, "version", lambda name: "0.23.0")
    assert "this is vLLM 0.23.0" in str(invoke(app, "check", model).exception)

    def missing(name):
        raise cli_vllm.PackageNotFoundError(name)

    monkeypatch.setattr(cli_vllm, "version", missing)
    assert "kvskim[vllm]" in str(invoke(app, "check", model).exception)


def engine_result(tokens, attended=100, ready=True):
    outputs = [output(tokens, [-0.1] * len(tokens))]
    activity = dict(attended=attended, total=100, covered=9.0, count=10)
    return dict(outputs=outputs, start_seconds=2.0, seconds=1.0, ready=ready, activity=activity, log=["kvskim was here"])


@pytest.mark.parametrize(("everything", "ruled", "code", "words"), [
    (engine_result([1, 2, 3]), engine_result([1, 2, 9], attended=30), 0, "30.0%"),
    # With all pages selected the tokens are others.
    (engine_result([4, 5, 6]), engine_result([1, 2, 3], attended=30), 1, "should be those of FLASH_ATTN"),
    # The rule selected everything, or nothing was measured, or calibration did not end.
    (engine_result([1, 2, 3]), engine_result([1, 2, 3]), 1, "NOT active"),
    (engine_result([1, 2, 3]), engine_result([1, 2, 3], attended=0), 1, "NOT active"),
    (engine_result([1, 2, 3]), engine_result([1, 2, 3], attended=30, ready=False), 1, "NOT active"),
    # Equal tokens prove nothing where not all pages were selected, or none because vLLM's own attention ran.
    (engine_result([1, 2, 3], attended=99), engine_result([1, 2, 3], attended=30), 1, "proves nothing"),
    (engine_result([1, 2, 3], attended=0), engine_result([1, 2, 3], attended=30), 1, "proves nothing"),
])
def test_fault_29_check_passes_only_where_sparse_attention_ran_and_full_selection_agrees(app, model, monkeypatch, everything, ruled, code, words):
    asked = []

    def run(llm, prompts, *, settings, max_tokens, **more):
        asked.append((settings, llm["max_model_len"], max(map(len, prompts))))
        return [engine_result([1, 2, 3]), everything, ruled][len(asked) - 1]

    monkeypatch.setattr(check, "run_engine", run)
    monkeypatch.setattr("kvskim.demo.text.tokenize", lambda tokenizer, text: list(range(9000)))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: None)
    result = invoke(app, "check", model, "--config", '{"tau": 0.02}', "--tokens", "8")
    assert result.exit_code == code, (result.output, result.exception)
    assert words in " ".join(result.output.split())
    assert "kvskim was here" in result.output
    # An engine takes its time to start, so the user sees which one is next.
    assert "Engine 3 of 3: the rule" in result.output
    # Full attention without kvskim, then every page, then the rule as given, all on prompts that the model has positions for.
    assert asked[0][0] is None
    assert (asked[1][0]["rule"], asked[1][0]["budget"]) == ("budget", 1.0)
    assert asked[2][0]["tau"] == 0.02
    assert {length for _, length, _ in asked} == {4096}
    assert {longest for _, _, longest in asked} == {4096 - 129}


def test_an_engine_that_stops_or_hangs_is_an_error_with_its_last_lines(monkeypatch, tmp_path):
    python = tmp_path / "python"
    monkeypatch.setattr(check.sys, "executable", str(python))
    for script, timeout, words in (
        ("echo out of memory; exit 3", 30.0, r"stopped with exit status 3; its last lines:\nout of memory"),
        ("echo still loading; exec sleep 20", 0.5, r"not done after 0\.5 seconds; its last lines:\nstill loading"),
    ):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        with pytest.raises(KvskimError, match=words):
            run_engine({}, [[1]], settings=None, max_tokens=1, timeout=timeout)


MEMORY = (
    "AssertionError: Error in memory profiling. Initial free memory 138.31 GiB, current free memory 138.51 GiB. This happens when other processes sharing "
    "the same container release GPU memory while vLLM is profiling during initialization."
)


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        (f"[rank0]:   File 'a.py', line 3, in b\n[rank0]:     raise AssertionError: of another line\n[rank0]: {MEMORY}\n[rank0]:[W1130] Warning: c", MEMORY),
        (
            "(EngineCore pid=7) ERROR 11-30 01:32:45 [core.py:866] torch.OutOfMemoryError: CUDA out of memory\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        ("ValueError: first\n\nDuring handling of the above exception\n\nKeyError: 'second'", "KeyError: 'second'"),
        ("RuntimeError: Engine core initialization failed", "RuntimeError: Engine core initialization failed"),
        ("INFO 11-30 01:32:45 [core.py:1] no Error: here\n  ValueError: indented", None),
    ],
)
def test_the_exception_of_an_engine_is_found_among_its_lines(printed, line):
    assert check.exception_line(printed) == line
    noise = "INFO a line of the log\n" * 1000
    text = check.ending(printed + "\n" + noise)
    if line is not None:
        assert text.startswith(f" ({line}); its last lines:\nINFO")
        assert text.endswith(line)
    assert len(text) < check.LAST_CHARACTERS + 700
