"""Settings and their errors: what is accepted has an effect, what is refused says why in one sentence."""

from __future__ import annotations

import inspect
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
    is_disabled,
    load_config,
)
from kvskim.config_errors import show
from kvskim.config_sources import parse_assignments
from kvskim.rules.parameters import RuleParameters
from kvskim.selectors import get_selector

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
        "tau": 0.005,
        "min_pages": 8,
        "max_pages": None,
        "sink_pages": 1,
        "window_pages": 2,
        "full_pages": "auto",
        "combine": "softmax",
        "calibration": "auto",
        "kernels": "auto",
        "dense_layers": (),
        "on_unsupported": "refuse",
        "host_memory_gib": None,
        "hot_cache_gib": None,
    }
    assert config.rule_parameters() == RuleParameters("threshold", 0.005, None, None, None, 8, None, "softmax")


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
    assert SkimConfig(full_pages=300).rule_parameters().full_pages == 300
    assert SkimConfig().rule_parameters().full_pages == 0


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
    st.tuples(st.just("full_pages"), st.sampled_from(["", "none", -1, 0.5, None, True, [1], 2**31])),
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
def test_fault_17_budget_pages_count_sink_and_window(sink: int, window: int) -> None:
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


@pytest.mark.parametrize("selector", SELECTOR_OPTIONS)
def test_every_allowed_option_makes_the_selector(selector: str) -> None:
    for name, option in SELECTOR_OPTIONS[selector].items():
        for value in option.allowed:
            made = get_selector(selector, **SkimConfig(selector=selector, selector_options={name: value}).selector_options)
            assert made.record_bytes(128) > 0


# The variables themselves; more of them in test_config_sources.py.
def test_a_mistyped_path_is_a_missing_file_not_a_json_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSKIM_CONFIG", str(tmp_path / "kvskm.json"))
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert f"{tmp_path / 'kvskm.json'} does not exist" in str(caught.value)
    assert "not valid JSON" not in str(caught.value)


@pytest.mark.parametrize("word", [None, "0", "false", "no", "FALSE", "No"])
def test_disable_off(monkeypatch: pytest.MonkeyPatch, word: str | None) -> None:
    if word is not None:
        monkeypatch.setenv("KVSKIM_DISABLE", word)
    assert is_disabled() is False


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


@pytest.mark.parametrize(
    "words",
    [["tau"], ["=1"], ["tau="], ["calibration= "], ["tau=1", "tau=2"], ["tau=["], ["selector_options=3", "selector_options.rank=2"]],
)
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
