"""What the backend classes say to vLLM: refused, dense or sparse, and never quietly something else."""

import pytest
import torch
from mini_engine import MiniEngine
from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
from vllm.platforms import DeviceCapability, current_platform

from kvskim.engines.vllm import backend
from kvskim.engines.vllm.backend import SkimBackend, SkimFlashAttentionBackend
from kvskim.engines.vllm.implementation import SkimImpl
from kvskim.engines.vllm.metadata import SkimMetadataBuilder
from kvskim.errors import UnsupportedError

ASKED = dict(
    head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=False, has_sink=False, use_sparse=False, use_mm_prefix=False,
    use_per_head_quant_scales=False, device_capability=DeviceCapability(9, 0), attn_type="decoder", use_non_causal=False, use_batch_invariant=False,
    use_kv_connector=False,
)


@pytest.fixture(autouse=True)
def _warnings():
    backend._warned.clear()


def validate(cls, asked=None, **settings):
    config = VllmConfig(additional_config={"kvskim": settings})
    with set_current_vllm_config(config):
        return cls.validate_configuration(**{**ASKED, **(asked or {})})


@pytest.mark.parametrize("cls", [SkimBackend, SkimFlashAttentionBackend])
def test_a_usual_model_is_taken(cls):
    assert validate(cls) == []
    assert cls.get_impl_cls() is SkimImpl
    assert cls.get_builder_cls() is SkimMetadataBuilder


@pytest.mark.parametrize("cls", [SkimBackend, SkimFlashAttentionBackend])
@pytest.mark.parametrize(("asked", "word"), [
    (dict(head_size=80), "head sizes"), (dict(has_sink=True), "sinks"), (dict(attn_type="encoder_only"), "encoder_only"), (dict(use_mla=True), "MLA"),
    (dict(use_mm_prefix=True), "later tokens"), (dict(use_non_causal=True), "later tokens"), (dict(use_per_head_quant_scales=True), "per head"),
])
def test_fault_14_what_it_cannot_do_stops_the_engine(cls, asked, word):
    with pytest.raises(UnsupportedError, match=word):
        validate(cls, asked)


def test_on_unsupported_dense_is_vllms_own_and_said_once(caplog):
    assert validate(SkimFlashAttentionBackend, dict(head_size=80), on_unsupported="dense") == []
    assert validate(SkimFlashAttentionBackend, dict(head_size=80), on_unsupported="dense") == []
    assert caplog.text.count("attention is vLLM's own") == 1


def test_fault_13_vllm_refusing_flash_attention_is_said(caplog):
    # FlashAttention takes no head size of 4; kvskim does not either, but runs dense here.
    assert validate(SkimFlashAttentionBackend, dict(head_size=4), on_unsupported="dense") == ["head_size not supported"]
    assert "NOT sparse" in caplog.text


def test_fault_13_another_preferred_backend_is_said(caplog):
    validate(SkimFlashAttentionBackend, dict(device_capability=DeviceCapability(10, 0)))
    assert "--attention-backend CUSTOM" in caplog.text
    backend._warned.clear()
    caplog.clear()
    config = VllmConfig(attention_config=AttentionConfig(backend="FLASH_ATTN"))
    with set_current_vllm_config(config):
        SkimFlashAttentionBackend.validate_configuration(**{**ASKED, "device_capability": DeviceCapability(10, 0)})
    assert not caplog.text


@pytest.mark.parametrize("cls", [SkimBackend, SkimFlashAttentionBackend])
def test_mla_is_not_for_these_backends_and_the_sentence_says_where_it_goes(cls):
    # vLLM could not go on with a class that is not for MLA, so this stops also where unsupported layers may be dense.
    for settings in ({}, {"on_unsupported": "dense"}):
        with pytest.raises(UnsupportedError, match="set KVSKIM_CONFIG, then kvskim takes the place of FLASH_ATTN_MLA"):
            validate(cls, dict(use_mla=True), **settings)


@pytest.mark.parametrize(("capability", "word"), [(DeviceCapability(7, 5), "7.5"), (None, "no CUDA GPU")])
def test_old_gpus_are_refused(monkeypatch, capability, word):
    monkeypatch.setattr(type(current_platform), "capability", capability)
    with pytest.raises(UnsupportedError, match=word):
        validate(SkimBackend)


def test_a_draft_model_is_not_judged():
    config = VllmConfig(speculative_config=object())
    config.model_config.runner_type = "draft"
    with set_current_vllm_config(config):
        assert SkimBackend.validate_configuration(**{**ASKED, "head_size": 80}) == []


@pytest.mark.parametrize(("layer", "word"), [
    (dict(alibi_slopes=[0.5] * 4), "ALiBi"), (dict(kv_sharing_target_layer_name="model.layers.0.attn"), "share"), (dict(attn_type="encoder"), "encoder"),
])
def test_layers_that_cannot_be_sparse(layer, word):
    with pytest.raises(UnsupportedError, match=word):
        MiniEngine({"selector": "mean"}, **layer)
    engine = MiniEngine({"selector": "mean", "on_unsupported": "dense"}, **layer)
    assert not engine.state.layers
    assert len(engine.state.dense) == 2
    assert all(word in reason for reason in engine.state.dense.values())
    assert not engine.records_layers()


def test_wrong_settings_stop_the_engine():
    with pytest.raises(ValueError, match="tau"):
        MiniEngine({"tau": 2.0})
