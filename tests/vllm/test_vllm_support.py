"""Each refusal is one sentence at engine start; nothing else is refused."""

from dataclasses import replace

import pytest

from kvskim.engines.vllm.support import (
    EngineFacts,
    LayerFacts,
    engine_refusal,
    layer_refusal,
    leading_single_token_rows,
    mixed_windows_refusal,
    parse_version,
    version_refusal,
    workspace_rows,
)

ENGINE_REFUSALS = {
    "version_too_old": (dict(vllm_version="0.23.1"), "0.23.1"),
    "version_too_new": (dict(vllm_version="0.34.0"), "0.34.0"),
    "version_unreadable": (dict(vllm_version="unknown"), "unknown"),
    "gpu_too_old": (dict(capability=(7, 5)), "7.5"),
    "no_gpu": (dict(capability=None), "no CUDA GPU"),
    "dtype": (dict(dtype="float32"), "float32"),
    "fp8_cache": (dict(cache_dtype="fp8_e4m3"), "fp8_e4m3"),
    "fp8_e5m2_cache": (dict(cache_dtype="fp8_e5m2"), "fp8_e5m2"),
    "block_size": (dict(block_size=48), "48"),
    "context_parallel": (dict(context_parallel=2), "context parallelism"),
    "state_space": (dict(state_space_layers=True), "state-space"),
    "batch_invariant": (dict(batch_invariant=True), "batch invariant"),
    "dual_batch_overlap": (dict(overlapped_batches=True), "--enable-dbo"),
    "page_frame": (dict(page_frame=True), "page_frame"),
    "oracle": (dict(selector="oracle"), "oracle"),
}
LAYER_REFUSALS = {
    "mla": (dict(mla=True), "MLA"),
    "encoder": (dict(attention_type="encoder_only"), "encoder_only"),
    "encoder_decoder": (dict(attention_type="encoder_decoder"), "encoder_decoder"),
    "alibi": (dict(alibi=True), "ALiBi"),
    "sinks": (dict(sinks=True), "sinks"),
    "bidirectional": (dict(bidirectional=True), "later tokens"),
    "per_head_scales": (dict(per_head_scales=True), "per head"),
    "shared_cache": (dict(shares_cache_of="model.layers.3.attn"), "model.layers.3.attn"),
    "head_size_80": (dict(head_size=80), "80"),
    "head_size_512": (dict(head_size=512), "512"),
    "ragged_group": (dict(num_heads=9, num_kv_heads=2), "9"),
    "group_too_large": (dict(num_heads=24, num_kv_heads=1), "24"),
}


@pytest.mark.parametrize("name", ENGINE_REFUSALS)
def test_engine_refusal_is_one_sentence(name):
    changes, mentioned = ENGINE_REFUSALS[name]
    _check_sentence(engine_refusal(replace(EngineFacts(), **changes)), mentioned)


@pytest.mark.parametrize("name", LAYER_REFUSALS)
def test_layer_refusal_is_one_sentence(name):
    changes, mentioned = LAYER_REFUSALS[name]
    _check_sentence(layer_refusal(replace(LayerFacts(), **changes)), mentioned)


def _check_sentence(refusal, mentioned):
    assert refusal is not None
    assert mentioned in refusal
    assert "\n" not in refusal
    assert not refusal.endswith(".")
    # It says how to go on.
    assert "set " in refusal or "choose " in refusal or "leave it out" in refusal or "run without" in refusal


@pytest.mark.parametrize("version", ["0.24.0", "0.24.1", "0.28.0rc1", "0.33.2.dev5+gabc"])
def test_supported_versions(version):
    assert version_refusal(version) is None


@pytest.mark.parametrize("changes", [
    {}, dict(capability=(8, 0)), dict(capability=(10, 0)), dict(dtype="float16"), dict(cache_dtype="bfloat16"), dict(block_size=16), dict(block_size=128),
])
def test_engine_is_supported(changes):
    assert engine_refusal(replace(EngineFacts(), **changes)) is None


@pytest.mark.parametrize("changes", [
    {}, *(dict(head_size=d) for d in (64, 96, 128, 256)), dict(num_heads=16, num_kv_heads=1), dict(num_heads=8, num_kv_heads=8),
])
def test_layer_is_supported(changes):
    assert layer_refusal(replace(LayerFacts(), **changes)) is None


def test_windows_matter_only_with_separate_blocks():
    assert mixed_windows_refusal(0, True) is None
    assert mixed_windows_refusal(5, False) is None
    refusal = mixed_windows_refusal(5, True)
    assert refusal is not None
    assert "5 sliding-window" in refusal
    assert "--disable-hybrid-kv-cache-manager" in refusal


def test_parse_version():
    assert parse_version("0.31.1rc2.dev4+g123") == (0, 31)
    assert parse_version("nightly") is None


@pytest.mark.parametrize(("starts", "tokens", "rows"), [
    ([0], 0, 0),
    ([0, 1, 2, 3], 3, 3),
    ([0, 1, 2, 10], 10, 2),
    ([0, 8, 9], 9, 0),
    # Padding at the end does not decode.
    ([0, 1, 2, 2, 2], 2, 2),
    # A single token behind a longer row stays with FlashAttention.
    ([0, 1, 4, 5], 5, 1),
    # A row without tokens in between would shift all that follow.
    ([0, 0, 1], 1, 0),
])
def test_leading_single_token_rows(starts, tokens, rows):
    assert leading_single_token_rows(starts, tokens) == rows


def test_fault_18_workspace_does_not_grow_with_rows_times_context():
    assert workspace_rows(8, 4, 8192, 145, 256) == 256
    million = workspace_rows(4, 8, 65536, 145, 1024)
    assert 64 <= million < 1024
    row = 4 * (65536 * 8 * 2 + 145 * 4)
    assert million * row <= 512 * 2**20
    assert workspace_rows(64, 16, 65536, 65536, 4) >= 1
