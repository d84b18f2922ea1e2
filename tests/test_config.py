"""Settings, their sources and their errors: what is accepted has an effect, what is refused says why in one sentence."""

from __future__ import annotations

import inspect
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvskim import config_docs
from kvskim.config import (
    RULE_SETTINGS,
    SELECTOR_NAMES,
    SELECTOR_OPTIONS,
    ConfigError,
    SkimConfig,
    cache_directory,
    configured_by,
    is_disabled,
    load_config,
    nvcc_path,
)
from kvskim.config_errors import show
from kvskim.config_legacy import PREDECESSOR_KEYS
from kvskim.config_sources import parse_assignments
from kvskim.rules.parameters import RuleParameters

VARIABLES = (
    "KVSKIM_CONFIG", "KVSKIM_DISABLE", "KVSKIM_CACHE_DIR", "KVSKIM_NVCC", "LOCKS_CONFIG", "AMASS_CONFIG", "XDG_CACHE_HOME", "CUDA_HOME",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def refused(**settings: Any) -> str:
    """The error of a configuration that must be refused, checked to be one line without the machinery behind it."""
    with pytest.raises(ConfigError) as caught:
        SkimConfig(**settings)
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    assert "validation error" not in message
    return message


# Valid configurations, for round trips.
fractions = st.floats(0, 1, exclude_min=True, allow_nan=False)
counts = st.integers(0, 40)


@st.composite
def valid_settings(draw: st.DrawFn) -> dict[str, Any]:
    selector = draw(st.sampled_from(SELECTOR_NAMES))
    options = SELECTOR_OPTIONS[selector]
    settings: dict[str, Any] = {
        "variant": draw(st.sampled_from(["fast", "mem-v", "mem-kv"])),
        "selector": selector,
        "selector_options": {name: draw(st.sampled_from(option.allowed)) for name, option in options.items() if draw(st.booleans())},
        "rule": draw(st.sampled_from(["threshold", "budget", "coverage"])),
        "sink_pages": draw(counts),
        "window_pages": draw(st.integers(1, 40)),
        "kernels": draw(st.sampled_from(["auto", "cuda", "triton", "torch"])),
        "dense_layers": draw(st.one_of(counts, st.lists(counts, max_size=4))),
        "on_unsupported": draw(st.sampled_from(["refuse", "dense"])),
    }
    if selector != "oracle":
        settings["calibration"] = draw(st.sampled_from(["auto", "basis.safetensors"]))
    if settings["rule"] == "threshold":
        settings["tau"] = draw(fractions)
    if settings["rule"] == "coverage":
        settings["coverage"] = draw(st.one_of(st.none(), fractions))
    if settings["rule"] == "budget":
        settings["combine"] = draw(st.sampled_from(["softmax", "peak", "max"]))
        if draw(st.booleans()):
            settings["budget"] = draw(fractions)
        else:
            settings["budget_pages"] = settings["sink_pages"] + settings["window_pages"] + draw(st.integers(1, 100))
    else:
        settings["min_pages"] = draw(counts)
    if settings["rule"] != "budget" and draw(st.booleans()):
        settings["max_pages"] = max(1, settings["min_pages"]) + draw(counts)
    if settings["variant"] != "fast":
        settings["host_memory_gib"] = draw(st.one_of(st.none(), st.floats(1e-3, 1e6)))
        settings["hot_cache_gib"] = draw(st.one_of(st.none(), st.integers(1, 100)))
    return settings


@given(valid_settings())
def test_every_valid_configuration_survives_json_yaml_and_pickle(settings: dict[str, Any]) -> None:
    config = SkimConfig(**settings)
    for name, value in settings.items():
        if value is not None and name not in ("selector_options", "dense_layers"):
            assert getattr(config, name) == value
    assert settings["selector_options"].items() <= config.selector_options.items()
    text = config.model_dump_json()
    assert SkimConfig.model_validate_json(text) == config
    assert SkimConfig.model_validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config
    assert SkimConfig(**config.model_dump()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(SkimConfig.model_validate_json(text)) == hash(config)


def test_the_defaults() -> None:
    config = SkimConfig()
    assert config.model_dump() == {
        "variant": "fast",
        "selector": "sketch",
        "selector_options": {"record_bytes": 256, "page_frame": False},
        "rule": "threshold",
        "tau": 0.007,
        "min_pages": 8,
        "max_pages": None,
        "sink_pages": 1,
        "window_pages": 1,
        "combine": "softmax",
        "calibration": "auto",
        "kernels": "auto",
        "dense_layers": (),
        "on_unsupported": "refuse",
        "host_memory_gib": None,
        "hot_cache_gib": None,
    }
    assert config.rule_parameters() == RuleParameters("threshold", 0.007, None, None, None, 8, None, "softmax")


def test_a_configuration_is_immutable_and_defaults_are_not_shared() -> None:
    config = SkimConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.tau = 0.5  # type: ignore[misc]
    assert SkimConfig().selector_options is not config.selector_options


def test_rule_parameters_carry_every_setting_of_the_rule() -> None:
    budget = SkimConfig(rule="budget", budget_pages=64, combine="peak").rule_parameters()
    assert (budget.rule, budget.budget_pages, budget.budget_fraction, budget.combine, budget.min_pages) == ("budget", 64, None, "peak", 0)
    assert SkimConfig(rule="budget", budget=0.25).rule_parameters().budget_fraction == 0.25
    coverage = SkimConfig(rule="coverage", coverage=0.8, max_pages=99).rule_parameters()
    assert (coverage.rule, coverage.coverage, coverage.max_pages) == ("coverage", 0.8, 99)
    assert SkimConfig(rule="coverage").rule_parameters().coverage == 0.95
    assert SkimConfig(tau=0.02).rule_parameters().tau == 0.02


@pytest.mark.parametrize(
    "wrong",
    [{"rule": "budget"}, {"rule": "budget", "budget_pages": 9, "budget_fraction": 0.1}, {"rule": "coverage"}, {"rule": "top"}],
)
def test_rule_parameters_without_their_number_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rule="):
        RuleParameters(**wrong)


def test_dense_layers_as_a_list_and_as_a_number() -> None:
    assert [SkimConfig(dense_layers=[0, 3]).is_dense(layer) for layer in range(5)] == [True, False, False, True, False]
    assert [SkimConfig(dense_layers=2).is_dense(layer) for layer in range(4)] == [True, True, False, False]
    assert not any(SkimConfig().is_dense(layer) for layer in range(4))


# Bad values. Each is refused for every field of its kind, and the sentence has the field and the value.
WHOLE_NUMBERS = ("budget_pages", "min_pages", "max_pages", "sink_pages", "window_pages")
FRACTIONS = ("tau", "budget", "coverage")
GIBIBYTES = ("host_memory_gib", "hot_cache_gib")
NAMES = ("variant", "selector", "rule", "combine", "kernels", "on_unsupported")
CONTEXT: dict[str, dict[str, Any]] = {
    "budget": {"rule": "budget"},
    "budget_pages": {"rule": "budget"},
    "coverage": {"rule": "coverage"},
    "host_memory_gib": {"variant": "mem-v"},
    "hot_cache_gib": {"variant": "mem-kv"},
}

not_a_number = st.one_of(st.booleans(), st.text(max_size=20), st.lists(st.integers(), max_size=3), st.just(math.nan), st.just(math.inf))
BAD = st.one_of(
    st.tuples(st.sampled_from(WHOLE_NUMBERS), st.one_of(not_a_number, st.integers(max_value=-1), st.floats(-9, 9), st.just(2**31))),
    st.tuples(st.sampled_from(FRACTIONS), st.one_of(not_a_number, st.floats(max_value=0), st.floats(1, exclude_min=True), st.integers(2))),
    st.tuples(st.sampled_from(GIBIBYTES), st.one_of(not_a_number, st.floats(max_value=0))),
    st.tuples(st.sampled_from(NAMES), st.one_of(st.text(max_size=20).filter(lambda text: not text.isalpha()), st.integers(), st.none())),
    st.tuples(st.just("dense_layers"), st.one_of(st.integers(max_value=-1), st.sampled_from([[-1], [True], True, {}]), st.text())),
    st.tuples(st.just("selector_options"), st.one_of(st.integers(), st.text(max_size=9), st.lists(st.integers(), max_size=2), st.none())),
    st.tuples(st.just("calibration"), st.sampled_from(["", 1, None, True])),
)


@given(BAD)
def test_every_bad_value_gives_one_sentence_with_field_and_value(bad: tuple[str, Any]) -> None:
    field, value = bad
    message = refused(**{**CONTEXT.get(field, {}), field: value})
    assert f"{field}={show(value)} must be " in message
    assert message.count(" must be ") == 1, "one problem, told once"


@pytest.mark.parametrize("field", ["tau", "min_pages", "sink_pages", "window_pages"])
def test_null_is_refused_where_a_number_is_needed(field: str) -> None:
    assert f"{field}=None must be " in refused(**{field: None})


@pytest.mark.parametrize("field", [*WHOLE_NUMBERS, *FRACTIONS])
def test_zero_is_an_error_where_it_means_nothing(field: str) -> None:
    if field in ("min_pages", "sink_pages"):
        assert getattr(SkimConfig(**{field: 0}), field) == 0
    else:
        assert f"{field}=0 must be " in refused(**{**CONTEXT.get(field, {}), field: 0})


def test_a_number_given_as_text_is_called_text() -> None:
    assert "must be a whole number, at least 0, not text" in refused(min_pages="8")
    assert "YAML needs a decimal point" in refused(tau="7e-3")


def test_several_problems_are_listed_together() -> None:
    message = refused(tau=2, window_pages=0, kernels="metal")
    assert len(message.split("; ")) == 3
    for part in ("tau=2 ", "window_pages=0 ", "kernels='metal' must be auto, cuda, triton or torch"):
        assert part in message


def test_unknown_settings_are_refused_with_the_list() -> None:
    message = refused(coverge=0.9)
    assert "coverge=0.9 is not a setting: did you mean coverage?" in message
    for name in SkimConfig.model_fields:
        assert name in message
    assert "self=1 is not a setting" in refused(self=1)


GIVEN_VALUES = {"tau": 0.007, "budget": 0.1, "budget_pages": 64, "coverage": 0.95, "min_pages": 16, "max_pages": 64}


@pytest.mark.parametrize("rule", ["threshold", "budget", "coverage"])
@pytest.mark.parametrize("field", list(RULE_SETTINGS))
def test_settings_of_another_rule_are_never_accepted_and_ignored(field: str, rule: str) -> None:
    settings: dict[str, Any] = {"rule": rule, field: GIVEN_VALUES[field]}
    if rule in RULE_SETTINGS[field]:
        assert getattr(SkimConfig(**settings), field) == GIVEN_VALUES[field]
        return
    if rule == "budget":
        settings["budget_pages"] = 64
    message = refused(**settings)
    assert f"{field}={GIVEN_VALUES[field]} needs rule '{RULE_SETTINGS[field][0]}'" in message
    assert f"rule is '{rule}': set rule to " in message
    assert f"remove {field}" in message


def test_null_counts_as_not_given() -> None:
    assert SkimConfig(budget=None, budget_pages=None, coverage=None, host_memory_gib=None) == SkimConfig()
    assert SkimConfig(rule="budget", budget=0.1, coverage=None, max_pages=None) == SkimConfig(rule="budget", budget=0.1)


def test_a_budget_needs_exactly_one_of_its_two_forms() -> None:
    assert "rule='budget' needs a budget: give budget" in refused(rule="budget")
    assert "budget=0.1 and budget_pages=64 exclude each other" in refused(rule="budget", budget=0.1, budget_pages=64)


@pytest.mark.parametrize(("sink", "window"), [(1, 1), (0, 1), (4, 8)])
def test_budget_pages_count_sink_and_window(sink: int, window: int) -> None:
    smallest = sink + window + 1
    settings: dict[str, Any] = {"rule": "budget", "sink_pages": sink, "window_pages": window}
    assert SkimConfig(**settings, budget_pages=smallest).budget_pages == smallest
    message = refused(**settings, budget_pages=smallest - 1)
    assert f"budget_pages={smallest - 1} must be at least {smallest}" in message


@pytest.mark.parametrize("combine", ["peak", "max"])
@pytest.mark.parametrize("rule", ["threshold", "coverage"])
def test_peak_and_max_need_a_budget(combine: str, rule: str) -> None:
    message = refused(rule=rule, combine=combine)
    assert f"combine='{combine}' needs rule 'budget'" in message
    assert SkimConfig(rule="budget", budget=0.1, combine=combine).combine == combine


def test_max_pages_below_min_pages_is_a_contradiction() -> None:
    assert "max_pages=4 is less than min_pages=8" in refused(max_pages=4)
    assert SkimConfig(max_pages=4, min_pages=4).max_pages == 4


@pytest.mark.parametrize("field", GIBIBYTES)
def test_memory_of_the_tier_needs_a_tier(field: str) -> None:
    assert f"{field}=2 needs variant 'mem-v' or 'mem-kv'" in refused(**{field: 2})
    assert getattr(SkimConfig(variant="mem-kv", **{field: 2}), field) == 2


def test_a_calibration_that_nobody_reads_is_refused() -> None:
    message = refused(selector="oracle", calibration="basis.safetensors")
    assert "calibration='basis.safetensors' has no use with selector 'oracle'" in message
    assert SkimConfig(calibration=Path("a/basis.safetensors")).calibration == "a/basis.safetensors"


# Options of the selectors.
def test_every_option_takes_its_allowed_values_and_no_others() -> None:
    for selector in SELECTOR_NAMES:
        for name, option in SELECTOR_OPTIONS[selector].items():
            assert SkimConfig(selector=selector).selector_options[name] == option.default
            for value in option.allowed:
                assert SkimConfig(selector=selector, selector_options={name: value}).selector_options[name] is value
            for value in (3.0, -1, 99, None, "8", [2], 0 if isinstance(option.default, bool) else True):
                message = refused(selector=selector, selector_options={name: value})
                assert f"selector_options.{name}={value!r} is not allowed with selector '{selector}': it must be " in message
                assert option.allowed_text() in message


@pytest.mark.parametrize("selector", SELECTOR_NAMES)
def test_unknown_options_are_refused_with_the_allowed_ones(selector: str) -> None:
    message = refused(selector=selector, selector_options={"width": 4})
    assert f"selector_options.width=4 is not an option of selector '{selector}'" in message
    for name in SELECTOR_OPTIONS[selector] or ("it has none",):
        assert name in message


@pytest.mark.parametrize("selector", SELECTOR_NAMES)
def test_options_are_those_of_the_selectors_constructor(selector: str) -> None:
    selectors = pytest.importorskip("kvskim.selectors")
    parameters = inspect.signature(selectors.SELECTORS[selector]).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        name: option.default for name, option in SELECTOR_OPTIONS[selector].items()
    }


# Sources and their order.
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


def test_a_mistyped_path_is_a_missing_file_not_a_json_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSKIM_CONFIG", str(tmp_path / "kvskm.json"))
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert f"{tmp_path / 'kvskm.json'} does not exist" in str(caught.value)
    assert "not valid JSON" not in str(caught.value)


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
        ({"budget_pages": 0}, ["budget_pages=0", "must be at least 3"]),
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


@pytest.mark.parametrize("word", [None, "0", "false", "no", "FALSE", "No"])
def test_disable_off(monkeypatch: pytest.MonkeyPatch, word: str | None) -> None:
    if word is not None:
        monkeypatch.setenv("KVSKIM_DISABLE", word)
    assert is_disabled() is False


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


# Words of the command line, and the page in docs.
def test_assignments() -> None:
    words = ["tau=0.5", "rule=budget", "dense_layers=[0, 1]", "selector_options.rank=4", "budget=1e-2", "max_pages=null"]
    assert parse_assignments(words) == {
        "tau": 0.5,
        "rule": "budget",
        "dense_layers": [0, 1],
        "selector_options": {"rank": 4},
        "budget": 0.01,
        "max_pages": None,
    }


@pytest.mark.parametrize("words", [["tau"], ["=1"], ["tau=1", "tau=2"], ["tau=["], ["selector_options=3", "selector_options.rank=2"]])
def test_words_that_are_no_assignments(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_assignments(words)


def test_the_reference_in_docs_is_up_to_date(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "docs/configuration.md"
    assert config_docs.main(["--check", str(path)]) == 0, "run python -m kvskim.config_docs"
    for name in SkimConfig.model_fields:
        assert f"| `{name}` |" in path.read_text()
    stale = tmp_path / "configuration.md"
    assert config_docs.main(["--check", str(stale)]) == 1
    assert "is not up to date" in capsys.readouterr().err
    assert config_docs.main([str(stale)]) == 0
    assert config_docs.main(["--check", str(stale)]) == 0
