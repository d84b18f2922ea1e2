"""Latent attention in the real vLLM: its layer, implementation and metadata builder on a CPU with kvskim in them, and what kvskim relies on.

Runs where the Python files of a supported vLLM are importable; skipped elsewhere. FlashAttention's compiled library is replaced by torch.
"""

import contextlib
import dataclasses
import inspect
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
import torch

import vllm

pytestmark = pytest.mark.skipif("stand-in" in (vllm.__doc__ or ""), reason="vLLM is not installed")


@pytest.fixture(scope="module")
def real():
    """vLLM's MLA backend, importable without its compiled library."""
    from kvskim.engines.vllm.support import MLA_VLLM, parse_version

    if parse_version(vllm.__version__) != MLA_VLLM:
        pytest.skip("latent attention is for one vLLM version")
    library = ModuleType("vllm.vllm_flash_attn")
    library.flash_attn_varlen_func = library.get_scheduler_metadata = None
    before = sys.modules.get("vllm.vllm_flash_attn")
    sys.modules["vllm.vllm_flash_attn"] = library
    from vllm.v1.attention.backends.mla import flashattn_mla

    yield flashattn_mla
    if before is None:
        del sys.modules["vllm.vllm_flash_attn"]


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def test_overridden_methods(real):
    from kvskim.engines.vllm.mla_implementation import SkimMlaImpl
    from kvskim.engines.vllm.mla_metadata import SkimMlaMetadataBuilder

    for name in ("do_kv_cache_update", "forward_mha", "forward_mqa"):
        assert parameters(getattr(SkimMlaImpl, name)) == parameters(getattr(real.FlashAttnMLAImpl, name)), name
    theirs, ours = parameters(real.FlashAttnMLAImpl.__init__), parameters(SkimMlaImpl.__init__)
    assert ours == theirs
    for name in ("__init__", "build", "build_for_cudagraph_capture", "_schedule_decode"):
        assert parameters(getattr(SkimMlaMetadataBuilder, name)) == parameters(getattr(real.FlashAttnMLAMetadataBuilder, name)), name
    assert real.FlashAttnMLABackend.get_name() == "FLASH_ATTN_MLA"
    assert not real.FlashAttnMLABackend.is_sparse()


def test_the_loader_calls_every_quant_method_before_it_processes_attention(real):
    from torch import nn
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from kvskim.engines.vllm.mla_loading import call_after_loading

    model, calls = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), []
    for name, layer in model.items():
        call_after_loading(layer, lambda name=name: calls.append(name))
    process_weights_after_loading(model, SimpleNamespace(dtype=torch.bfloat16, quantization=None), torch.device("cpu"))
    assert calls == ["a", "b"]


def test_vllms_names_of_what_is_refused(real):
    from vllm.config import CompilationConfig, ModelConfig

    assert "fuse_rope_kvcache_cat_mla" in {field.name for field in dataclasses.fields(CompilationConfig().pass_config)}
    assert "enable_sleep_mode" in {field.name for field in dataclasses.fields(ModelConfig)}


def test_specs_of_latent_rows_and_records_make_one_group(real):
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from kvskim.engines.vllm.records import RecordsLayer

    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=64), scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        compilation_config=SimpleNamespace(static_forward_context={}), model_config=SimpleNamespace(max_model_len=4096),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
    specs = {}
    for i in range(3):
        name = f"model.layers.{i}.self_attn.attn"
        specs[name] = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, cache_dtype_str="auto")
        records = RecordsLayer(name, 1, 256, torch.bfloat16)
        specs[records.layer_name] = records.get_kv_cache_spec(config)
    for order in (specs, dict(reversed(specs.items()))):
        groups = kv_cache_utils.get_kv_cache_groups(config, order)
        assert len(groups) == 1, "records must share the block ids of their layer"
        assert groups[0].kv_cache_spec.page_size_bytes == 3 * (64 * 576 * 2 + 4 * 256)


def torch_attention(q, k, v, q_v, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal, scheduler_metadata, **_):
    """What `flash_attn_varlen_func` computes of absorbed queries."""
    assert causal is True
    assert torch.equal(scheduler_metadata[: len(seqused_k)], seqused_k), "the schedule is that of other rows"
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1])
    starts = cu_seqlens_q.tolist()
    for row, length in enumerate(seqused_k.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        blocks = block_table[row, : -(-length // k.shape[1])].long()
        keys, values = (t[blocks].flatten(0, 1)[:length, 0] for t in (k, v))
        logits = (torch.einsum("qhd,td->hqt", q[begin:end], keys) + torch.einsum("qhd,td->hqt", q_v[begin:end], values)) * softmax_scale
        seen = torch.arange(length) <= torch.arange(length - (end - begin), length)[:, None]
        out[begin:end] = torch.einsum("hqt,td->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), values)
    return out


class TorchPrefill:
    """vLLM's prefill backend for whole prompts."""

    def __init__(self, **settings):
        self.scale = settings["scale"]

    def prepare_metadata(self, metadata):
        self.starts = metadata.query_start_loc.tolist()

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out, output_scale):
        assert not return_softmax_lse, "these tests prefill whole prompts"
        result = torch.zeros(q.shape[0], q.shape[1], v.shape[-1])
        for begin, end in zip(self.starts, self.starts[1:]):
            logits = torch.einsum("qhd,thd->hqt", q[begin:end], k[begin:end]) * self.scale
            seen = torch.ones(end - begin, end - begin).tril().bool()
            result[begin:end] = torch.einsum("hqt,thd->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v[begin:end])
        return result

    def supports_quant_output(self, key):
        return False


def write_rows(kv_c, k_pe, cache, slots, kv_cache_dtype, scale):
    """What `concat_and_cache_mla` does."""
    valid = slots >= 0
    kept = slots[valid]
    cache[kept // cache.shape[1], kept % cache.shape[1]] = torch.cat([kv_c, k_pe], -1)[: len(slots)][valid]


def test_vllms_own_layer_and_builder_with_kvskim_in_them(monkeypatch, real):
    from mla_mini_engine import MAX_TOKENS, MlaMiniEngine, Request
    from real_vllm import layer_config
    from vllm.config import vllm as config_module
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from kvskim.engines.vllm import facts, probe
    from kvskim.engines.vllm.mla_implementation import SkimMlaImpl
    from vllm import _custom_ops

    class Engine(MlaMiniEngine):
        def make_config(self, additional, max_rows, speculative):
            config = layer_config(additional, max_rows, self.block_size, MAX_TOKENS)
            config.model_config.use_mla = True
            config.model_config.get_head_size = lambda: 320
            config.model_config.get_num_attention_heads = lambda _: 4
            config.model_config.hf_text_config = SimpleNamespace(
                to_dict=lambda: {"model_type": "none"}, kv_lora_rank=256, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=16
            )
            config.device_config = SimpleNamespace(device="cpu")
            config.parallel_config.dcp_comm_backend = "ag_rs"
            config.compilation_config.custom_ops = ["none"]
            config.compilation_config.enabled_custom_ops = Counter()
            config.compilation_config.disabled_custom_ops = Counter()
            return config

        def current_config(self):
            patch = pytest.MonkeyPatch.context()
            context = patch.__enter__()
            context.setattr(config_module, "_current_vllm_config", self.config)
            return contextlib.closing(SimpleNamespace(close=lambda: patch.__exit__(None, None, None)))

        def _common(self, *arguments):
            common = super()._common(*arguments)
            return dataclasses.replace(common, seq_lens_cpu_upper_bound=common.seq_lens.clone())

        def make_layer(self, index, **arguments):
            layer = super().make_layer(index, **arguments)
            layer.kv_b_proj.quant_method = UnquantizedLinearMethod()
            return layer

        def _bind(self, num_blocks):
            for layer in self.layers:
                layer.impl.dcp_world_size = 1
                layer.kv_cache = torch.full((num_blocks, self.block_size, self.head_size), torch.nan)
            for layer in self.records_layers():
                layer.kv_cache = torch.full((num_blocks, self.block_size // 16, 1, layer.record_bytes // 2), torch.nan, dtype=layer.element_dtype)

    monkeypatch.delenv("KVSKIM_CONFIG", raising=False)
    monkeypatch.setattr(facts, "gpu_capability", lambda: (9, 0))
    monkeypatch.setattr(real, "flash_attn_supports_mla", lambda: True)
    monkeypatch.setattr(real, "flash_attn_varlen_func", torch_attention)
    monkeypatch.setattr(real, "get_scheduler_metadata", lambda *, cache_seqlens, **_: cache_seqlens.clone())
    monkeypatch.setattr(real, "get_flash_attn_version", lambda *_, **__: 3)
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda config: TorchPrefill)
    monkeypatch.setattr(_custom_ops, "concat_and_cache_mla", write_rows)
    # Rows of decode steps are held back from the one call to the other.
    held: dict[int, tuple] = {}
    update, attend = SkimMlaImpl.do_kv_cache_update, mla_attention.MLAAttention.forward_impl

    def updates(self, latent, rotary, *rest):
        held[id(self)] = latent, rotary
        update(self, latent, rotary, *rest)

    def attends(self, query, latent, rotary, *rest, **more):
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(held.pop(id(self.impl)), (latent, rotary), strict=True))
        return attend(self, query, latent, rotary, *rest, **more)

    monkeypatch.setattr(SkimMlaImpl, "do_kv_cache_update", updates)
    monkeypatch.setattr(mla_attention.MLAAttention, "forward_impl", attends)
    with torch.inference_mode():
        engine = Engine({"selector": "rki4", "rule": "budget", "budget_pages": 6}, block_size=64)
        everything = Engine({"selector": "rki4", "rule": "budget", "budget": 1.0}, block_size=64)
        for e in (engine, everything):
            assert len(e.state.layers) == 2
            a, b = Request(1), Request(2)
            for scheduled, padding in (([(a, 250)], 0), ([(a, 1), (b, 70)], 0), ([(a, 1), (b, 1)], 0), ([(b, 1), (a, 1)], 2), ([(a, 1), (b, 1)], 1)):
                before = {id(r): r.computed for r, _ in scheduled}
                rows = e.step(scheduled, pad_rows=padding)
                for (request, count), row in zip(sorted(scheduled, key=lambda item: item[1]), rows):
                    for layer, actual in enumerate(row):
                        if e is everything or count > 1:
                            expected = e.expected(request, layer, before[id(request)], count)
                            torch.testing.assert_close(actual, expected, atol=3e-4, rtol=3e-4)
            per_block = e.block_size // 16
            places = [(r.blocks[p // per_block], p % per_block) for r in (a, b) for p in range(r.computed // 16)]
            pages = torch.tensor([block * per_block + page for block, page in places])
            assert probe.untrue_records(e.state, pages) == dict.fromkeys(e.state.layers, 0)
        assert all(6 in layer.counts[:2] for layer in engine.state.layers.values())
