"""Where settings are read from: their order, files and variables, and the configurations of the two predecessors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvskim.config import (
    ConfigError,
    SkimConfig,
    cache_directory,
    configured_by,
    is_disabled,
    load_config,
    nvcc_path,
)
from kvskim.config_legacy import PREDECESSOR_KEYS

VARIABLES = (
    "KVSKIM_CONFIG", "KVSKIM_DISABLE", "KVSKIM_CACHE_DIR", "KVSKIM_NVCC", "LOCKS_CONFIG", "AMASS_CONFIG", "XDG_CACHE_HOME", "CUDA_HOME",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def origins(loaded: Any) -> dict[str, str]:
    return {name: origin for name, origin in loaded.origins.items() if origin != "default"}


def test_without_any_source_everything_is_a_default() -> None:
    loaded = load_config()
    assert loaded.config == SkimConfig()
    assert loaded.origins == dict.fromkeys(SkimConfig.model_fields, "default")
    assert loaded.warnings == []
    assert configured_by() is None


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml", ""])
def test_a_file_is_read_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    path = tmp_path / f"kvskim{suffix}"
    settings = {"rule": "coverage", "coverage": 0.9, "dense_layers": [0, 1]}
    path.write_text(json.dumps(settings) if suffix == ".json" else yaml.safe_dump(settings))
    monkeypatch.setenv("KVSKIM_CONFIG", str(path))
    loaded = load_config()
    assert loaded.config == SkimConfig(**settings)
    assert origins(loaded) == dict.fromkeys(settings, f"KVSKIM_CONFIG, {path}")
    assert configured_by() == "KVSKIM_CONFIG"


def test_a_path_may_start_at_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvskim.yaml").write_text("tau: 0.5")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVSKIM_CONFIG", "~/kvskim.yaml")
    assert load_config().config.tau == 0.5


def test_inline_json_then_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSKIM_CONFIG", ' {"tau": 0.5, "kernels": "torch"}')
    loaded = load_config({"tau": 0.25, "sink_pages": None})
    assert (loaded.config.tau, loaded.config.kernels, loaded.config.sink_pages) == (0.25, "torch", 1)
    assert origins(loaded) == {"tau": "arguments", "kernels": "KVSKIM_CONFIG, inline"}
    assert loaded.warnings == []


@pytest.mark.parametrize(
    ("earlier", "later", "dropped"),
    [
        ({"rule": "coverage", "coverage": 0.9}, {"rule": "threshold"}, ["coverage"]),
        ({"tau": 0.1, "max_pages": 50}, {"rule": "coverage"}, ["tau"]),
        ({"tau": 0.1, "max_pages": 50}, {"rule": "budget", "budget": 0.5}, ["tau", "max_pages"]),
        ({"rule": "budget", "budget": 0.5, "combine": "peak"}, {"rule": "threshold"}, ["budget", "combine"]),
        ({"rule": "budget", "budget": 0.5}, {"budget_pages": 9}, ["budget"]),
        ({"rule": "budget", "budget_pages": 9}, {"budget": 0.5}, ["budget_pages"]),
        ({"selector": "rki4", "selector_options": {"rank": 2}}, {"selector": "mean"}, ["selector_options"]),
        ({"variant": "mem-v", "host_memory_gib": 2.0}, {"variant": "fast"}, ["host_memory_gib"]),
        ({"selector": "rki4", "selector_options": {"rank": 2}}, {"selector": "rki4"}, []),
        ({"rule": "budget", "budget": 0.5, "combine": "peak"}, {"rule": "budget"}, []),
    ],
)
def test_arguments_replace_a_choice_together_with_its_settings(
    monkeypatch: pytest.MonkeyPatch, earlier: dict[str, Any], later: dict[str, Any], dropped: list[str]
) -> None:
    monkeypatch.setenv("KVSKIM_CONFIG", json.dumps(earlier))
    loaded = load_config(later)
    assert loaded.config == SkimConfig(**{name: value for name, value in {**earlier, **later}.items() if name not in dropped})
    assert sorted(warning.split("=")[0] for warning in loaded.warnings) == sorted(dropped)
    assert all("KVSKIM_CONFIG, inline" in warning and "is dropped" in warning for warning in loaded.warnings)
    assert all(loaded.origins[name] == "default" for name in dropped)


def test_a_dumped_configuration_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSKIM_CONFIG", SkimConfig(rule="budget", budget=0.5).model_dump_json())
    loaded = load_config({"budget_pages": 9})
    assert loaded.config == SkimConfig(rule="budget", budget_pages=9)
    assert len(loaded.warnings) == 1


@pytest.mark.parametrize("source", ["KVSKIM_CONFIG", "arguments"])
def test_errors_say_which_source_a_value_came_from(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    if source == "arguments":
        call = {"coverage": 0.9}
    else:
        call = {}
        monkeypatch.setenv("KVSKIM_CONFIG", '{"coverage": 0.9}')
    with pytest.raises(ConfigError, match=rf"^coverage=0.9 \(from {source}.*\) needs rule 'coverage', but rule is 'threshold'"):
        load_config(call)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("- tau\n- 0.1\n", "holds ['tau', 0.1], but a mapping of setting names to values is needed"),
        ("", "holds nothing, but a mapping"),
        ("tau 0.1", "holds 'tau 0.1', but a mapping"),
        ("1: 2", "has the key 1, but the name of a setting must be text"),
        ("tau: [", "is not valid YAML"),
        ("tau: 0.1\ntau: 0.2", "key 'tau' is given twice"),
        ("tau: !!python/object:os.system {}", "is not valid YAML"),
    ],
)
def test_a_yaml_file_that_is_no_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, expected: str) -> None:
    path = tmp_path / "kvskim.yaml"
    path.write_text(content)
    monkeypatch.setenv("KVSKIM_CONFIG", str(path))
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert f"KVSKIM_CONFIG='{path}'" in str(caught.value)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"tau": 0.1}]', "but a mapping"),
        ('{"tau": 0.1', "is not valid JSON"),
        ('{"tau": 0.1, "tau": 0.2}', "key 'tau' is given twice"),
        ('{"tau": NaN}', "tau=nan (from KVSKIM_CONFIG, inline) must be a number"),
        ("tau=0.1", "does not exist"),
        ("  ", "is empty"),
    ],
)
def test_inline_text_that_is_no_configuration(monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.setenv("KVSKIM_CONFIG", text)
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert "KVSKIM_CONFIG" in str(caught.value)
    assert expected in str(caught.value)


def test_paths_that_are_no_readable_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for text, expected in ((str(tmp_path), "is a directory"), (str(binary), "is not a UTF-8 text file"), ("x" * 5000, "can't be read")):
        monkeypatch.setenv("KVSKIM_CONFIG", text)
        with pytest.raises(ConfigError, match=expected) as caught:
            load_config()
        assert len(str(caught.value)) < 600


def test_arguments_must_be_a_mapping_of_names() -> None:
    for wrong in ([("tau", 0.1)], {1: 2}, "tau"):
        with pytest.raises(ConfigError, match="the arguments"):
            load_config(wrong)  # type: ignore[arg-type]


def test_json_that_is_no_configuration() -> None:
    for text in ("[1]", "null", "{", '{"tau": 2}', b"\xff"):
        with pytest.raises(ConfigError):
            SkimConfig.model_validate_json(text)
    with pytest.raises(ConfigError, match="mapping"):
        SkimConfig.model_validate([1])


# The two predecessors.
PREDECESSOR_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("variant", {"variant": "mem-kv"}, {"variant": "mem-kv"}),
    ("coverage", {"coverage": 0.9}, {"rule": "coverage", "coverage": 0.9}),
    ("budget", {"budget": 0.1}, {"rule": "budget", "budget": 0.1}),
    ("budget_pages", {"budget_pages": 64}, {"rule": "budget", "budget_pages": 64}),
    ("sink_pages", {"sink_pages": 2}, {"sink_pages": 2}),
    ("window_pages", {"window_pages": 4}, {"window_pages": 4}),
    ("score", {"score": "rki4"}, {"selector": "rki4"}),
    ("score", {"score": "r8"}, {"selector": "r8"}),
    ("score", {"score": "quad"}, {"selector": "quad"}),
    ("score", {"score": "clse"}, {"selector": "clse"}),
    ("score", {"score": "quest"}, {"selector": "minmax"}),
    ("score", {"score": "mean"}, {"selector": "mean"}),
    ("r8_rank", {"score": "r8", "r8_rank": 5}, {"selector": "r8", "selector_options": {"rank": 5}}),
    ("r8_rank", {"r8_rank": 4, "score": "rki4"}, {"selector": "rki4", "selector_options": {"rank": 4}}),
    ("quad_combine", {"budget": 0.1, "quad_combine": "softmax"}, {"rule": "budget", "budget": 0.1, "combine": "softmax"}),
    ("quad_combine", {"quad_combine": "soft"}, {"combine": "softmax"}),
    ("quad_combine", {"budget": 0.1, "quad_combine": "nrm"}, {"rule": "budget", "budget": 0.1, "combine": "peak"}),
    ("quad_combine", {"budget": 0.1, "quad_combine": "max"}, {"rule": "budget", "budget": 0.1, "combine": "max"}),
    ("use_cuda", {"use_cuda": True}, {"kernels": "auto"}),
    ("use_cuda", {"use_cuda": False}, {"kernels": "triton"}),
    ("coverage", {"coverage": None, "sink_pages": 2}, {"sink_pages": 2}),
]


def test_every_predecessor_key_has_a_case() -> None:
    assert {key for key, _, _ in PREDECESSOR_CASES} == set(PREDECESSOR_KEYS)


@pytest.mark.parametrize("variable", ["LOCKS_CONFIG", "AMASS_CONFIG"])
@pytest.mark.parametrize(("key", "theirs", "ours"), PREDECESSOR_CASES)
def test_predecessor_settings_are_translated(
    monkeypatch: pytest.MonkeyPatch, variable: str, key: str, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    monkeypatch.setenv(variable, json.dumps(theirs))
    loaded = load_config()
    assert loaded.config == SkimConfig(**ours)
    assert set(origins(loaded)) == set(ours)
    assert all(origin.startswith(f"{variable}, inline, key ") for origin in origins(loaded).values())
    assert configured_by() == variable
    assert len(loaded.warnings) == 1
    assert "\n" not in loaded.warnings[0]
    assert loaded.warnings[0].startswith(f"{variable} ")
    printed = loaded.warnings[0].split("KVSKIM_CONFIG='")[1].removesuffix("'")
    assert json.loads(printed) == ours
    # What is printed does what it says.
    monkeypatch.delenv(variable)
    monkeypatch.setenv("KVSKIM_CONFIG", printed)
    assert load_config().config == loaded.config


def test_a_predecessor_file_is_read_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locks.json"
    path.write_text('{"score": "quest"}')
    monkeypatch.setenv("LOCKS_CONFIG", str(path))
    loaded = load_config({"kernels": "torch"})
    assert (loaded.config.selector, loaded.config.kernels) == ("minmax", "torch")
    assert loaded.origins["selector"] == f"LOCKS_CONFIG, {path}, key score"
    assert loaded.origins["kernels"] == "arguments"


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"table": 3}, ["table=3", ", ".join(PREDECESSOR_KEYS)]),
        ({"score": "sketch"}, ["score='sketch'", "rki4, r8, quad, clse, quest or mean"]),
        ({"quad_combine": "mean"}, ["quad_combine='mean'", "softmax, soft, nrm or max"]),
        ({"use_cuda": 1}, ["use_cuda=1", "true or false"]),
        ({"score": ["r8"]}, ["score=['r8']"]),
        ({"coverage": 0.9, "budget": 0.1}, ["coverage=0.9", "budget=0.1", "exclude each other"]),
        ({"budget": 0.1, "budget_pages": 9}, ["budget=0.1", "budget_pages=9", "exclude each other"]),
        ({"budget_pages": 0}, ["budget_pages=0", "must be at least 4"]),
        ({"r8_rank": 4}, ["r8_rank=4", "score is 'not given'"]),
        ({"score": "quad", "r8_rank": 4}, ["r8_rank=4", "score is 'quad'", "r8 or rki4"]),
        ({"score": "rki4", "r8_rank": 5}, ["selector_options.rank=5", "key r8_rank", "2, 4, 6 or 8"]),
        ({"quad_combine": "nrm"}, ["combine='peak'", "key quad_combine", "needs rule 'budget'"]),
        ({"coverage": 1.5}, ["coverage=1.5", "key coverage", "at most 1"]),
    ],
)
def test_predecessor_settings_that_can_not_be_translated(
    monkeypatch: pytest.MonkeyPatch, theirs: dict[str, Any], expected: list[str]
) -> None:
    monkeypatch.setenv("LOCKS_CONFIG", json.dumps(theirs))
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert "LOCKS_CONFIG" in str(caught.value)
    for part in expected:
        assert part in str(caught.value)


def test_both_predecessor_variables_are_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKS_CONFIG", "{}")
    monkeypatch.setenv("AMASS_CONFIG", "{}")
    with pytest.raises(ConfigError, match="LOCKS_CONFIG and AMASS_CONFIG are both set"):
        load_config()


@pytest.mark.parametrize("theirs", ['{"coverage": 0.9}', '{"table": 3}', "/no/such/file", ""])
def test_kvskim_config_wins_over_a_predecessor_and_says_so(monkeypatch: pytest.MonkeyPatch, theirs: str) -> None:
    monkeypatch.setenv("KVSKIM_CONFIG", '{"tau": 0.5}')
    monkeypatch.setenv("AMASS_CONFIG", theirs)
    loaded = load_config()
    assert loaded.config == SkimConfig(tau=0.5)
    assert len(loaded.warnings) == 1
    assert loaded.warnings[0].startswith("AMASS_CONFIG is ignored, because KVSKIM_CONFIG is set (")
    if theirs.startswith('{"coverage'):
        assert """KVSKIM_CONFIG='{"coverage": 0.9, "rule": "coverage"}'""" in loaded.warnings[0]


# The other variables.
@pytest.mark.parametrize("word", ["1", "true", "yes", "TRUE", "Yes"])
def test_disable_on(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("KVSKIM_DISABLE", word)
    assert is_disabled() is True


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_disable_with_any_other_word_is_an_error(word: str) -> None:
    if word.strip().lower() in ("1", "true", "yes", "0", "false", "no"):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSKIM_DISABLE", word)
        with pytest.raises(ConfigError, match=r"KVSKIM_DISABLE=.* must be 1, true or yes"):
            is_disabled()


def test_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache/kvskim"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == tmp_path / ".cache/kvskim"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_directory() == tmp_path / "shared/kvskim"
    monkeypatch.setenv("KVSKIM_CACHE_DIR", "~/own")
    assert cache_directory() == tmp_path / "own"
    assert not (tmp_path / "own").exists()
    monkeypatch.setenv("KVSKIM_CACHE_DIR", "")
    with pytest.raises(ConfigError, match="KVSKIM_CACHE_DIR='' is empty"):
        cache_directory()


def test_the_cuda_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(name: str) -> Path:
        path = tmp_path / name / "bin/nvcc"
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    on_path, in_home, own = compiler("path"), compiler("home"), compiler("own")
    monkeypatch.setenv("PATH", "")
    assert nvcc_path() is None
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert nvcc_path() == on_path
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "missing"))
    assert nvcc_path() == on_path
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert nvcc_path() == in_home
    monkeypatch.setenv("KVSKIM_NVCC", str(own))
    assert nvcc_path() == own
    monkeypatch.setenv("KVSKIM_NVCC", str(own.parent))
    with pytest.raises(ConfigError, match=r"KVSKIM_NVCC=.*is not an executable file"):
        nvcc_path()
