"""Settings that don't fit a transformers model are refused when it is switched on, not at its first token."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from kvskim.calibration import CalibrationError
from kvskim.config import SkimConfig
from kvskim.demo.session import Session
from kvskim.engines.transformers import UnsupportedError, enable, report
from tiny import tiny_model


def test_dense_layers_that_the_model_does_not_have_are_refused():
    model = tiny_model()
    with pytest.raises(UnsupportedError, match=r"dense_layers names 2, 7, but the attention layers of llama are 0 to 1"):
        enable(model, SkimConfig(selector="rki4", dense_layers=[0, 2, 7]))
    assert report(model) == []
    assert [entry.sparse for entry in enable(model, SkimConfig(selector="rki4", dense_layers=[1])).report()] == [True, False]


def test_a_calibration_for_other_records_is_refused_at_once():
    host = enable(tiny_model(), SkimConfig())
    session = Session(host.model)
    session.prefill(list(range(3, 67)) * 4)
    calibration = host.fit_calibration([session.cache])
    enable(tiny_model(), SkimConfig(), calibration=calibration)
    model = tiny_model()
    with pytest.raises(CalibrationError, match=r"made for record_bytes 256.*ask for record_bytes 128"):
        enable(model, SkimConfig(selector_options={"record_bytes": 128}), calibration=calibration)
    assert report(model) == []


PROMPT = list(range(3, 67)) * 4


def prefilled(model, config, calibration=None, prompt=PROMPT):
    host = enable(model, config, calibration=calibration)
    session = Session(model)
    session.prefill(prompt)
    return host, session


def test_fitting_names_why_there_are_no_samples():
    model = tiny_model()
    host, session = prefilled(model, SkimConfig())
    calibration = host.fit_calibration([session.cache])
    for one_host, one_session in ((host, session), prefilled(model, SkimConfig(), calibration)):
        with pytest.raises(CalibrationError, match=r"layer model\.layers\.0\.self_attn has a calibration already .* or set `capture`") as error:
            one_host.fit_calibration([one_session.cache])
        assert "\n" not in str(error.value)
    host, session = prefilled(model, SkimConfig(selector="rki4"))
    with pytest.raises(CalibrationError, match="selector 'rki4' needs no calibration"):
        host.fit_calibration([session.cache])
    model.set_attn_implementation("sdpa")
    before = Session(model)
    before.prefill(PROMPT)
    with pytest.raises(CalibrationError, match="prefill them after `enable`"):
        enable(model, SkimConfig()).fit_calibration([before.cache])
    host, session = prefilled(model, SkimConfig(), prompt=PROMPT[:20])
    with pytest.raises(CalibrationError, match="too short to calibrate on"):
        host.fit_calibration([session.cache])


def test_a_kept_calibration_is_found_and_can_be_fitted_anew(tmp_path, monkeypatch):
    from kvskim.calibration_store import write_stored

    monkeypatch.setenv("KVSKIM_CACHE_DIR", str(tmp_path))
    model = tiny_model()
    host, session = prefilled(model, SkimConfig())
    write_stored(host.fit_calibration([session.cache]))
    host, session = prefilled(model, SkimConfig())
    kept = host.calibration()
    assert kept is not None
    with pytest.raises(CalibrationError, match="kept for this model"):
        host.fit_calibration([session.cache])
    host = enable(model, SkimConfig())
    for layer in host.layers():
        layer.capture = True
    session = Session(model)
    session.prefill(PROMPT[5:])
    assert not host.fit_calibration([session.cache]).layer(0).mean.equal(kept.layer(0).mean)


def test_a_head_dim_that_the_selector_cannot_code_is_dense_where_the_settings_say_so():
    config = SkimConfig(selector="clse", selector_options={"rank": 16}, on_unsupported="dense")
    host = enable(tiny_model(), config)
    assert [entry.sparse for entry in host.report()] == [False, False]
    assert "head dim above its rank 16; it is 16" in host.report()[0].reason
    with pytest.raises(UnsupportedError, match="head dim above its rank 16"):
        enable(tiny_model(), config.model_copy(update={"on_unsupported": "refuse"}))
