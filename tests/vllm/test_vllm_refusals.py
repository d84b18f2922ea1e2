"""Every refusal at engine start, word by word: one sentence that names the setting or the fact, and says how to go on."""

from types import SimpleNamespace

import pytest
import torch
from mini_engine import MiniEngine
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
from vllm.platforms import DeviceCapability, current_platform

from kvskim.engines.vllm import backend, support
from kvskim.engines.vllm.backend import SkimBackend, SkimFlashAttentionBackend
from kvskim.errors import UnsupportedError
from vllm import envs

OUT = "run without kvskim, or set on_unsupported to 'dense' to keep full attention"
ASKED = dict(
    head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=False, has_sink=False, use_sparse=False, use_mm_prefix=False,
    use_per_head_quant_scales=False, device_capability=DeviceCapability(9, 0), attn_type="decoder", use_non_causal=False, use_batch_invariant=False,
    use_kv_connector=False,
)
# What the engine is asked for, or built from, and what it says.
LAYERS = {
    "sinks": (dict(has_sink=True), f"kvskim does not add learned attention sinks: {OUT}"),
    "encoder": (dict(attn_type="encoder_only"), f"kvskim works on decoder attention, and this model has encoder_only attention: {OUT}"),
    "bidirectional": (dict(use_non_causal=True), f"kvskim works on causal attention, and this model attends to later tokens: {OUT}"),
    "head size": (dict(head_size=80), f"kvskim works with head sizes 64, 96, 128 and 256, and this model has 80: {OUT}"),
    "scales per head": (dict(use_per_head_quant_scales=True), f"kvskim does not read a KV cache with one scale per head: {OUT}"),
}
ENGINES = {
    "dtype": (
        dict(model_config=ModelConfig(dtype=torch.float32)),
        f"kvskim needs a model in bfloat16 or float16, and this one runs in float32: set --dtype, or {OUT}",
    ),
    "fp8 cache": (
        dict(cache_config=CacheConfig(cache_dtype="fp8")),
        f"kvskim does not read a KV cache of type fp8 for a model in bfloat16 yet: set --kv-cache-dtype auto, or {OUT}",
    ),
    "cache of the other half type": (
        dict(cache_config=CacheConfig(cache_dtype="float16")),
        f"kvskim does not read a KV cache of type float16 for a model in bfloat16 yet: set --kv-cache-dtype auto, or {OUT}",
    ),
    "decode context parallelism": (
        dict(parallel_config=ParallelConfig(decode_context_parallel_size=2)),
        f"kvskim does not work with decode or prefill context parallelism: set both sizes to 1, or {OUT}",
    ),
    "prefill context parallelism": (
        dict(parallel_config=ParallelConfig(prefill_context_parallel_size=2)),
        f"kvskim does not work with decode or prefill context parallelism: set both sizes to 1, or {OUT}",
    ),
    "state-space layers": (dict(model_config=ModelConfig(is_hybrid=True)), f"kvskim does not work with models that have state-space layers: {OUT}"),
    "block size": (
        dict(cache_config=CacheConfig(block_size=48, user_specified_block_size=True)),
        f"kvskim works with blocks of 16, 32, 64 and 128 tokens, and --block-size is 48: choose one of them, or {OUT}",
    ),
    "connector": (
        dict(kv_transfer_config=SimpleNamespace(kv_connector="NixlConnector")),
        f"kvskim can't rely on KV connector NixlConnector to keep records with their keys: use OffloadingConnector or SimpleCPUOffloadConnector, or {OUT}",
    ),
}


@pytest.fixture(autouse=True)
def _warnings():
    backend._warned.clear()


def start(cls, asked=None, settings=None, **config):
    """What vLLM does first: it asks the backend whether it takes the engine."""
    with set_current_vllm_config(VllmConfig(additional_config={"kvskim": settings or {}}, **config)):
        return cls.validate_configuration(**{**ASKED, **(asked or {})})


def says(cls, **arguments):
    with pytest.raises(UnsupportedError) as error:
        start(cls, **arguments)
    return str(error.value)


both = pytest.mark.parametrize("cls", [SkimBackend, SkimFlashAttentionBackend])


@both
@pytest.mark.parametrize("name", LAYERS)
def test_fault_14_layers_are_refused_in_one_sentence(cls, name):
    asked, sentence = LAYERS[name]
    assert says(cls, asked=asked) == sentence


@both
@pytest.mark.parametrize("name", ENGINES)
def test_fault_14_engines_are_refused_in_one_sentence(cls, name):
    config, sentence = ENGINES[name]
    assert says(cls, **config) == sentence
    # On demand they run, dense, and say why.
    assert start(cls, settings={"on_unsupported": "dense"}, **config) == []
    assert any(sentence in text for text in backend._warned)


@both
def test_what_is_usual_is_taken(cls):
    assert start(cls) == []
    assert start(cls, model_config=ModelConfig(dtype=torch.float16), cache_config=CacheConfig(cache_dtype="float16")) == []
    assert not backend._warned


@both
@pytest.mark.parametrize(("capability", "sentence"), [
    (DeviceCapability(7, 5), f"kvskim needs a GPU of compute capability 8.0 or newer, and this machine has a GPU of compute capability 7.5: {OUT}"),
    (None, f"kvskim needs a GPU of compute capability 8.0 or newer, and this machine has no CUDA GPU: {OUT}"),
])
def test_fault_19_gpus_are_refused_in_one_sentence(cls, monkeypatch, capability, sentence):
    monkeypatch.setattr(type(current_platform), "capability", capability)
    assert says(cls) == sentence


@both
@pytest.mark.parametrize("version", ["0.23.1", "0.34.0"])
def test_fault_13_a_version_is_refused_in_one_sentence(cls, monkeypatch, version):
    monkeypatch.setattr("vllm.__version__", version)
    assert says(cls) == f"kvskim supports vLLM 0.24 to 0.33, and this is vLLM {version}: install a supported version, or {OUT}"


@both
def test_fault_14_batch_invariance_and_overlapped_batches_are_refused_in_one_sentence(cls, monkeypatch):
    parallel = ParallelConfig()
    parallel.enable_dbo = True
    sentence = "kvskim does not work with dual batch overlap, because both halves would use one workspace: leave out --enable-dbo, or "
    assert says(cls, parallel_config=parallel) == sentence + OUT
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    assert says(cls) == f"kvskim is not batch invariant: unset VLLM_BATCH_INVARIANT, or {OUT}"


@both
def test_fault_14_reference_windows_are_refused_in_one_sentence(cls):
    model = ModelConfig()
    model.rswa_window = 1024
    assert says(cls, model_config=model) == (
        f"kvskim does not work with reference sliding-window attention, where decode sees the prompt and a window: {OUT}"
    )


@pytest.mark.parametrize(("layer", "sentence"), [
    (dict(alibi_slopes=[0.5] * 4), f"kvskim does not score ALiBi position biases: {OUT}"),
    (dict(sinks=torch.zeros(4)), f"kvskim does not add learned attention sinks: {OUT}"),
    (dict(attn_type="encoder_decoder"), f"kvskim works on decoder attention, and this model has encoder_decoder attention: {OUT}"),
    (
        dict(kv_sharing_target_layer_name="model.layers.0.attn"),
        f"kvskim does not work with layers that share the KV cache of another layer (model.layers.0.attn): {OUT}",
    ),
    (
        dict(windows=(None, 512), separate_blocks=True),
        "this model has 1 sliding-window or chunked layers, whose blocks vLLM manages apart from those of the other layers: "
        f"add --disable-hybrid-kv-cache-manager, or {OUT}",
    ),
])
def test_fault_14_what_only_a_layer_knows_is_refused_in_one_sentence(layer, sentence):
    with pytest.raises(UnsupportedError) as error:
        MiniEngine({"selector": "mean"}, **layer)
    assert str(error.value) == sentence


@pytest.mark.parametrize(("group", "sentence"), [
    (17, f"kvskim takes at most 16 query heads for each kv head, and this model has 17: {OUT}"),
])
def test_fault_19_large_groups_are_refused_when_the_layer_is_made(group, sentence):
    class Engine(MiniEngine):
        pass

    Engine.group = group
    with pytest.raises(UnsupportedError) as error:
        Engine({"selector": "mean"})
    assert str(error.value) == sentence


def test_every_supported_minor_version_has_its_contract():
    """`contract_versions.py` knows one release of each."""
    import contract_versions

    minors = [support.parse_version(version) for version in contract_versions.VERSIONS]
    assert minors == [(0, minor) for minor in range(support.OLDEST_VLLM[1], support.NEWEST_VLLM[1] + 1)]
    assert SchedulerConfig().disable_hybrid_kv_cache_manager is False
