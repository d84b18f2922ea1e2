"""The real vLLM: names and signatures that kvskim overrides, and its own planner, allocation and binding with records in it.

Runs where vLLM's Python files are importable (no GPU and none of its compiled libraries are needed); skipped elsewhere.
"""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch

import vllm

pytestmark = pytest.mark.skipif("stand-in" in (vllm.__doc__ or ""), reason="vLLM is not installed")


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


@pytest.fixture(scope="module")
def real():
    from vllm.v1.attention.backends import flash_attn

    return flash_attn


@pytest.mark.parametrize("name", ["forward", "do_kv_cache_update", "process_weights_after_loading", "fused_rope_kvcache_supported"])
def test_overridden_methods_of_the_implementation(real, name):
    from kvskim.engines.vllm.implementation import SkimImpl

    assert parameters(getattr(SkimImpl, name)) == parameters(getattr(real.FlashAttentionImpl, name))


def test_constructor_of_the_implementation(real):
    from kvskim.engines.vllm.implementation import SkimImpl

    theirs, ours = parameters(real.FlashAttentionImpl.__init__), parameters(SkimImpl.__init__)
    assert ours[: len(theirs)] == theirs
    assert ours[len(theirs) :] == ["extra"]


@pytest.mark.parametrize("name", ["__init__", "build", "get_cudagraph_support"])
def test_overridden_methods_of_the_builder(real, name):
    from kvskim.engines.vllm.metadata import SkimMetadataBuilder
    from kvskim.engines.vllm.records import RecordsMetadataBuilder

    assert parameters(getattr(SkimMetadataBuilder, name)) == parameters(getattr(real.FlashAttentionMetadataBuilder, name))
    assert parameters(getattr(RecordsMetadataBuilder, name)) == parameters(getattr(real.FlashAttentionMetadataBuilder, name))


def test_metadata_that_is_read_or_replaced(real):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from kvskim.engines.vllm.metadata import SkimMetadata, _rows_from

    common = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    needed = {
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor",
        "slot_mapping", "causal",
    }
    assert needed <= common
    assert {"scheduler_metadata", "block_table", "seq_lens"} <= {field.name for field in dataclasses.fields(SkimMetadata)}
    starts = torch.tensor([0, 1, 2, 12], dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor([5, 6, 10]), num_reqs=3, num_actual_tokens=12, max_query_len=10,
        max_seq_len=10, block_table_tensor=torch.arange(12).view(3, 4), slot_mapping=torch.arange(12), seq_lens_cpu_upper_bound=torch.tensor([5, 6, 10]),
    )
    rest = _rows_from(step, 2)
    assert (rest.num_reqs, rest.num_actual_tokens) == (1, 10)
    assert rest.query_start_loc.tolist() == rest.query_start_loc_cpu.tolist() == [0, 10]
    assert rest.seq_lens.tolist() == [10]
    assert rest.slot_mapping.tolist() == list(range(2, 12))
    assert rest.block_table_tensor.tolist() == [[8, 9, 10, 11]]


def test_arguments_of_the_backend_choice():
    from vllm.v1.attention.selector import AttentionSelectorConfig

    read = {"head_size", "attn_type", "use_mla", "has_sink", "use_mm_prefix", "use_non_causal", "use_per_head_quant_scales"}
    assert read <= set(AttentionSelectorConfig._fields)


def test_registration(monkeypatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvskim.engines.vllm import plugin

    monkeypatch.delenv("KVSKIM_DISABLE", raising=False)
    monkeypatch.setenv("KVSKIM_CONFIG", "{}")
    members = [AttentionBackendEnum.CUSTOM, AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.FLASH_ATTN_MLA]
    try:
        for _ in range(2):
            plugin.register_plugin()
        for member in members[:2]:
            assert member.is_overridden()
            cls = member.get_class()
            assert cls.get_name() == member.name
            assert cls.__module__ == "kvskim.engines.vllm.backend"
        assert members[2].get_path() == plugin.MLA_BACKEND
    finally:
        for member in members:
            member.clear_override()


def vllm_config(block_size=64, **scheduler):
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block_size, num_gpu_blocks_override=None),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, **scheduler),
        compilation_config=SimpleNamespace(static_forward_context={}),
        model_config=SimpleNamespace(max_model_len=4096),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1, tensor_parallel_size=1
        ),
        kv_transfer_config=None,
    )


def planned(config, layers, heads, head_size, record_bytes, dtype=torch.bfloat16):
    """Specs of an attention layer and its records, ``layers`` times, in the order in which vLLM sees them."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvskim.engines.vllm.records import RecordsLayer

    names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
    records = {f"{name}.kvskim_records": RecordsLayer(name, heads, record_bytes, dtype) for name in names}
    block_size = config.cache_config.block_size
    specs = {name: FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=dtype) for name in names}
    specs |= {name: layer.get_kv_cache_spec(config) for name, layer in records.items()}
    return specs, records


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize(("head_size", "record_bytes"), [(128, 256), (64, 256), (128, 818)])
def test_records_join_the_group_of_their_layers_and_the_number_of_blocks_is_exact(block_size, head_size, record_bytes):
    from vllm.v1.core import kv_cache_utils

    config = vllm_config(block_size)
    specs, _ = planned(config, 4, 2, head_size, record_bytes)
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    assert len(groups) == 1
    assert set(groups[0].layer_names) == set(specs)
    memory = 256 * 2**20
    plan = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, memory)
    keys_and_values = block_size * 2 * 2 * head_size * 2
    records = block_size // 16 * 2 * record_bytes
    assert plan.num_blocks == memory // (4 * (keys_and_values + records))
    sizes = {tensor.shared_by[0]: tensor.size for tensor in plan.kv_cache_tensors}
    assert all(size == plan.num_blocks * (records if "kvskim" in name else keys_and_values) for name, size in sizes.items())


@pytest.mark.parametrize("block_size", [16, 64])
def test_vllm_allocates_and_binds_records(block_size, real, monkeypatch):
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.gpu import attn_utils
    from vllm.v1.worker.utils import AttentionGroup, bind_kv_cache

    from kvskim.engines.vllm.layout import key_value_views
    from kvskim.engines.vllm.records import RecordsBackend

    config = vllm_config(block_size)
    specs, records = planned(config, 2, 2, 64, 256)
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    plan = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, 2**20)
    raw = attn_utils._allocate_kv_cache(plan, {}, torch.device("cpu"))

    class Attention(real.FlashAttentionBackend):
        @staticmethod
        def get_kv_cache_stride_order(include_num_layers_dimension=False):
            return (0, 1, 2, 3, 4)

    mains = [name for name in specs if name not in records]
    attention_groups = [
        AttentionGroup(Attention, mains, specs[mains[0]], 0), AttentionGroup(RecordsBackend, list(records), specs[next(iter(records))], 0),
    ]
    # Two caches in one layer of the model: vLLM takes that on a GPU.
    monkeypatch.setattr("vllm.v1.worker.utils.current_platform", SimpleNamespace(is_cuda_alike=lambda: True))
    caches = attn_utils._reshape_kv_cache(attention_groups, raw, "auto", [block_size], {}, plan)
    context = {**{name: SimpleNamespace() for name in mains}, **records}
    bind_kv_cache(caches, context, [])
    for name, layer in records.items():
        assert layer.records.shape == (plan.num_blocks * block_size // 16, 2, 256)
        assert layer.records.data_ptr() == raw[name].data_ptr()
    key, value = key_value_views(context[mains[0]].kv_cache, 64)
    assert key.shape == value.shape == (plan.num_blocks, block_size, 2, 64)


def test_manager_and_names():
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    specs, records = planned(vllm_config(), 1, 2, 128, 256)
    name, layer = next(iter(records.items()))
    assert layer.layer_name == name
    assert extract_layer_index(name) == 0
    KVCacheSpecRegistry.check_kv_cache_spec_registry(specs)
    assert KVCacheSpecRegistry.get_manager_class(specs[name]) is FullAttentionManager


def test_specs_travel_between_processes():
    import pickle

    specs, _ = planned(vllm_config(), 1, 2, 128, 256)
    assert pickle.loads(pickle.dumps(specs)) == specs


def test_attributes_of_the_configuration():
    from vllm.config import AttentionConfig, CacheConfig, CompilationConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig

    for cls, names in (
        (VllmConfig, ("model_config", "cache_config", "parallel_config", "scheduler_config", "compilation_config", "attention_config",
                      "speculative_config", "additional_config")),
        (ModelConfig, ("model", "dtype", "max_model_len", "hf_text_config", "is_hybrid", "runner_type", "get_total_num_kv_heads", "get_head_size")),
        (CacheConfig, ("block_size", "cache_dtype", "user_specified_block_size")),
        (ParallelConfig, ("decode_context_parallel_size", "prefill_context_parallel_size")),
        (SchedulerConfig, ("max_num_seqs", "disable_hybrid_kv_cache_manager")),
        (CompilationConfig, ("static_forward_context",)),
        (AttentionConfig, ("backend",)),
    ):
        declared = {field.name for field in dataclasses.fields(cls)}
        for name in names:
            assert name in declared or hasattr(cls, name) or f"self.{name} =" in inspect.getsource(cls), (cls.__name__, name)


def test_the_stand_in_has_vllms_names():
    """The stand-in of the other tests claims to be vLLM: what it defines must exist there, with the same leading parameters."""
    import ast
    from importlib import import_module
    from pathlib import Path

    root = Path(__file__).parent / "standin"
    checked = 0
    for file in sorted(root.rglob("*.py")):
        module_name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(file.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        # The platform is chosen at import, and MLA's FlashAttention needs its compiled library.
        if not classes or module_name in ("vllm.platforms", "vllm.v1.attention.backends.mla.flashattn_mla"):
            continue
        module = import_module(module_name)
        for node in classes:
            theirs = getattr(module, node.name)
            for method in node.body:
                plain = isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and method.args.kwarg is None
                if plain and callable(getattr(theirs, method.name, None)):
                    ours = [a.arg for a in method.args.args if a.arg not in ("self", "cls")]
                    assert parameters(getattr(theirs, method.name))[: len(ours)] == ours, (module_name, node.name, method.name)
                    checked += 1
    assert checked > 15
