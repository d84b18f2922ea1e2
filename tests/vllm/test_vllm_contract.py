"""The real vLLM: names and signatures that kvskim overrides, and its own planner, allocation and binding with records in it.

Runs where vLLM's Python files are importable (no GPU and none of its compiled libraries are needed); skipped elsewhere.
"""

import contextlib
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


@pytest.fixture(scope="module")
def real_vllm():
    import real_vllm

    return real_vllm


@pytest.mark.parametrize("name", ["forward", "do_kv_cache_update", "process_weights_after_loading", "fused_rope_kvcache_supported"])
def test_overridden_methods_of_the_implementation(real, name):
    from kvskim.engines.vllm.implementation import SkimImpl

    assert parameters(getattr(SkimImpl, name)) == parameters(getattr(real.FlashAttentionImpl, name))


def test_constructor_of_the_implementation(real):
    from kvskim.engines.vllm.implementation import SkimImpl

    theirs, ours = parameters(real.FlashAttentionImpl.__init__), parameters(SkimImpl.__init__)
    assert ours[: len(theirs)] == theirs
    assert ours[len(theirs) :] == ["extra"]


@pytest.mark.parametrize("name", ["__init__", "build", "build_for_cudagraph_capture", "get_cudagraph_support"])
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


def planned(config, layers, heads, head_size, record_bytes, dtype=torch.bfloat16):
    """Specs of an attention layer and its records, ``layers`` times, as vLLM's worker collects them."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvskim.engines.vllm.backend import SkimBackend
    from kvskim.engines.vllm.records import RecordsBackend, RecordsLayer

    names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
    records = {f"{name}.kvskim_records": RecordsLayer(name, heads, record_bytes, dtype) for name in names}
    block_size = config.cache_config.block_size
    specs = {name: FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=dtype) for name in names}
    specs |= {name: layer.get_kv_cache_spec(config) for name, layer in records.items()}
    if hasattr(SkimBackend, "customize_spec"):
        specs = {name: (RecordsBackend if name in records else SkimBackend).customize_spec(spec) for name, spec in specs.items()}
    return specs, records


LAYOUTS = ["LBNHC", "LBHNC"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize(("head_size", "record_bytes"), [(128, 256), (64, 256), (128, 818)])
def test_records_join_the_group_of_their_layers_and_the_number_of_blocks_is_exact(real_vllm, block_size, head_size, record_bytes, layout):
    planner = real_vllm.planner()
    config = real_vllm.planning_config(block_size, layout)
    specs, _ = planned(config, 4, 2, head_size, record_bytes)
    groups = planner.get_kv_cache_groups(config, specs)
    assert len(groups) == 1
    assert set(groups[0].layer_names) == set(specs)
    memory = 256 * 2**20
    plan = planner.get_kv_cache_config_from_groups(config, groups, memory)
    keys_and_values = block_size * 2 * 2 * head_size * 2
    records = block_size // 16 * 2 * record_bytes
    assert plan.num_blocks == memory // (4 * (keys_and_values + records))
    sizes = real_vllm.bytes_of_layers(plan)
    assert sizes == {name: plan.num_blocks * (records if "kvskim" in name else keys_and_values) for name in specs}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_workers_of_a_pipeline_agree_on_the_number_of_blocks(real_vllm, layout):
    """Three layers and two on two workers each, with different memory: one number of blocks, and records in the one group of every worker."""
    config = real_vllm.planning_config(16, layout)
    specs, _ = planned(config, 5, 2, 128, 256)
    parts = [{name: spec for name, spec in specs.items() if int(name.split(".")[2]) in layers} for layers in ((0, 1, 2), (3, 4))]
    memory = [256 * 2**20, 250 * 2**20, 120 * 2**20, 240 * 2**20]
    plans = real_vllm.plans_of_workers(config, [parts[0], parts[0], parts[1], parts[1]], memory)
    block = 16 * 2 * 2 * 128 * 2 + 2 * 256
    assert {plan.num_blocks for plan in plans} == {120 * 2**20 // (2 * block)}
    for plan, part in zip(plans, [parts[0], parts[0], parts[1], parts[1]]):
        (group,) = plan.kv_cache_groups
        assert set(group.layer_names) == set(part)
        sizes = real_vllm.bytes_of_layers(plan)
        assert sizes == {name: plan.num_blocks * (512 if "kvskim" in name else block - 512) for name in part}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_vllm_allocates_and_binds_records(real_vllm, block_size, layout, real, monkeypatch):
    from vllm.v1.worker.utils import bind_kv_cache

    from kvskim.engines.vllm.layout import key_value_views
    from kvskim.engines.vllm.records import RecordsBackend

    class Attention(real.FlashAttentionBackend):
        @staticmethod
        def get_kv_cache_stride_order(include_num_layers_dimension=False):
            return (0, 2, 1, 3) if real_vllm.packed() else (0, 1, 2, 3, 4)

    planner = real_vllm.planner()
    config = real_vllm.planning_config(block_size, layout)
    specs, records = planned(config, 2, 2, 64, 256)
    plan = planner.get_kv_cache_config_from_groups(config, planner.get_kv_cache_groups(config, specs), 2**20)
    backends = {name: RecordsBackend if name in records else Attention for name in specs}
    caches = real_vllm.allocate(config, plan, specs, backends, block_size)
    # Two caches in one layer of the model: vLLM takes that on a GPU.
    platform = SimpleNamespace(is_cuda_alike=lambda: True, check_runner_kv_caches_multi_layer=lambda: None)
    monkeypatch.setattr("vllm.v1.worker.utils.current_platform", platform)
    mains = [name for name in specs if name not in records]
    context = {**{name: real_vllm.BoundLayer() for name in mains}, **records}
    bind_kv_cache(caches, context, [])
    pages = block_size // 16
    for name, layer in records.items():
        assert layer.records.shape == (plan.num_blocks * pages, 2, 256)
        # vLLM moves whole blocks: the records of a block are in it, all of them.
        block = torch.arange(pages * 2 * 256).remainder(251).to(torch.uint8).view(pages, 2, 256)
        layer.records.zero_()
        layer.records[3 * pages : 4 * pages] = block
        caches[name][5] = caches[name][3]
        assert torch.equal(layer.records[5 * pages : 6 * pages], block)
        assert layer.records.any(-1).any(-1).sum() == 2 * pages
    key, value = key_value_views(context[mains[0]].kv_cache, 64)
    assert key.shape == value.shape == (plan.num_blocks, block_size, 2, 64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_vllms_offloading_connector_moves_records_with_their_keys(real_vllm, block_size, layout, real, monkeypatch):
    """What the connector registers is what it copies: block 3 goes to the host and comes back as block 5."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker

    from kvskim.engines.vllm.records import RecordsBackend

    class Attention(real.FlashAttentionBackend):
        @staticmethod
        def get_kv_cache_stride_order(include_num_layers_dimension=False):
            return (0, 2, 1, 3) if real_vllm.packed() else (0, 1, 2, 3, 4)

    planner = real_vllm.planner()
    config = real_vllm.planning_config(block_size, layout)
    specs, records = planned(config, 2, 2, 64, 256)
    plan = planner.get_kv_cache_config_from_groups(config, planner.get_kv_cache_groups(config, specs), 2**20)
    backends = {name: RecordsBackend if name in records else Attention for name in specs}
    caches = real_vllm.allocate(config, plan, specs, backends, block_size)
    registered = []
    spec = real_vllm.Settings(kv_cache_config=plan, get_worker=registered.append, get_handlers=lambda caches: registered.append(caches) or ())
    given = {"spec": spec, "vllm_config": config, "kv_cache_config": plan}
    wanted = [name for name in inspect.signature(OffloadingConnectorWorker).parameters if name in given]
    OffloadingConnectorWorker(**{name: given[name] for name in wanted}).register_kv_caches(caches)
    (canonical,) = registered
    (refs,) = canonical.group_data_refs
    for number, cache in enumerate(caches.values()):
        cache[3] = number + 1
    for ref in refs:
        blocks = canonical.tensors[ref.tensor_idx].tensor
        blocks[5, : ref.page_size_bytes] = blocks[3, : ref.page_size_bytes].clone()
    for number, cache in enumerate(caches.values()):
        assert (cache[5] == number + 1).all()
        assert (cache[4] == 0).all()


def test_layouts_that_scatter_the_blocks_of_a_layer_are_not_chosen(real_vllm):
    if not real_vllm.one_layout():
        pytest.skip("one order for all layers comes with a later version")
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

    from kvskim.engines.vllm.backend import SkimBackend
    from kvskim.engines.vllm.records import RecordsBackend

    assert [layout.name for layout in get_supported_kv_cache_layouts([SkimBackend, RecordsBackend])] == LAYOUTS


def test_manager_and_names(real_vllm):
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    specs, records = planned(real_vllm.planning_config(64), 1, 2, 128, 256)
    name, layer = next(iter(records.items()))
    assert layer.layer_name == name
    assert extract_layer_index(name) == 0
    KVCacheSpecRegistry.check_kv_cache_spec_registry(specs)
    assert KVCacheSpecRegistry.get_manager_class(specs[name]) is FullAttentionManager


def test_specs_travel_between_processes(real_vllm):
    import pickle

    specs, _ = planned(real_vllm.planning_config(64), 1, 2, 128, 256)
    assert pickle.loads(pickle.dumps(specs)) == specs


def test_attributes_of_the_configuration():
    from vllm.config import AttentionConfig, CacheConfig, CompilationConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig

    for cls, names in (
        (VllmConfig, ("model_config", "cache_config", "parallel_config", "scheduler_config", "compilation_config", "attention_config",
                      "speculative_config", "additional_config")),
        (ModelConfig, ("model", "dtype", "max_model_len", "hf_text_config", "is_hybrid", "runner_type", "get_total_num_kv_heads", "get_head_size")),
        (CacheConfig, ("block_size", "cache_dtype", "user_specified_block_size")),
        (ParallelConfig, ("decode_context_parallel_size", "prefill_context_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")),
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


def torch_flash_attention(q, k, v, out, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal, softcap, scheduler_metadata, **_):
    """What `flash_attn_varlen_func` computes, one request after the other."""
    assert causal is True
    assert scheduler_metadata is not None
    assert torch.equal(scheduler_metadata, seqused_k), "the schedule is that of other rows"
    starts = cu_seqlens_q.tolist()
    for row, length in enumerate(seqused_k.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        blocks = block_table[row, : -(-length // k.shape[1])].long()
        keys, values = (t[blocks].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // k.shape[2], 1) for t in (k, v))
        logits = torch.einsum("qhd,thd->hqt", q[begin:end], keys) * softmax_scale
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        seen = torch.arange(length) <= torch.arange(length - (end - begin), length)[:, None]
        out[begin:end] = torch.einsum("hqt,thd->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), values)


def torch_write(key, value, key_cache, value_cache, slot_mapping, *_):
    """What `reshape_and_cache_flash` does."""
    valid = slot_mapping >= 0
    slots = slot_mapping[valid]
    key_cache[slots // key_cache.shape[1], slots % key_cache.shape[1]] = key[: len(slot_mapping)][valid]
    value_cache[slots // value_cache.shape[1], slots % value_cache.shape[1]] = value[: len(slot_mapping)][valid]


@pytest.mark.parametrize("block_size", [16, 64])
def test_vllms_own_layers_and_builders_with_kvskim_in_them(monkeypatch, real, real_vllm, block_size):
    """vLLM's `Attention`, `FlashAttentionImpl` and metadata builder on a CPU, with torch in the place of its two kernels."""
    from mini_engine import MAX_TOKENS, MiniEngine, Request
    from vllm.config import vllm as config_module

    from kvskim.engines.vllm import facts, probe

    class Engine(MiniEngine):
        def make_config(self, additional, max_rows, speculative):
            return real_vllm.layer_config(additional, max_rows, self.block_size, MAX_TOKENS)

        def _bind(self, num_blocks):
            for layer in self.layers:
                layer.kv_cache = real_vllm.empty_keys_and_values(num_blocks, self.block_size, self.num_kv_heads, self.head_size, torch.nan)
            for layer in self.records_layers():
                shape = (num_blocks, self.block_size // 16, self.num_kv_heads, layer.record_bytes // 2)
                cache = torch.full(shape, torch.nan, dtype=layer.element_dtype)
                layer.kv_cache = cache.transpose(1, 2) if real_vllm.one_layout() else cache

        def current_config(self):
            patch = pytest.MonkeyPatch.context()
            context = patch.__enter__()
            context.setattr(config_module, "_current_vllm_config", self.config)
            return contextlib.closing(SimpleNamespace(close=lambda: patch.__exit__(None, None, None)))

    monkeypatch.delenv("KVSKIM_CONFIG", raising=False)
    monkeypatch.setattr(facts, "gpu_capability", lambda: (9, 0))
    monkeypatch.setattr(real, "flash_attn_varlen_func", torch_flash_attention, raising=False)
    monkeypatch.setattr(real, "get_scheduler_metadata", lambda *, cache_seqlens, **_: cache_seqlens.clone(), raising=False)
    monkeypatch.setattr(real, "reshape_and_cache_flash", torch_write, raising=False)
    monkeypatch.setattr(real, "get_flash_attn_version", lambda *_, **__: 3)
    with torch.inference_mode():
        engine = Engine({"selector": "rki4", "rule": "budget", "budget_pages": 6}, block_size=block_size)
        everything = Engine({"selector": "rki4", "rule": "budget", "budget": 1.0}, block_size=block_size, softcap=5.0)
        for e in (engine, everything):
            a, b = Request(1), Request(2)
            for scheduled, padding in (
                ([(a, 250)], 0), ([(a, 1), (b, 70)], 0), ([(a, 1), (b, 1)], 0), ([(b, 1), (a, 1)], 2), ([(a, 1), (b, 30)], 0), ([(a, 3), (b, 1)], 0),
            ):
                before = {id(r): r.computed for r, _ in scheduled}
                rows = e.step(scheduled, pad_rows=padding)
                for (request, count), row in zip(sorted(scheduled, key=lambda item: item[1]), rows):
                    for layer, actual in enumerate(row):
                        expected = e.expected(request, layer, before[id(request)], count, 5.0 if e is everything else 0.0)
                        if e is everything or count > 1:
                            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
            per_block = block_size // 16
            places = [(r.blocks[p // per_block], p % per_block) for r in (a, b) for p in range(r.computed // 16)]
            pages = torch.tensor([block * per_block + page for block, page in places])
            assert probe.untrue_records(e.state, pages) == dict.fromkeys(e.state.layers, 0)
        assert all(6 in layer.counts[:2] for layer in engine.state.layers.values())


# What vLLM's FlashAttention may claim to support, and where kvskim answers for it. A claim that is not here is new: it has to be judged.
JUDGED_CLAIMS = {
    "supports_attn_type": "layer_refusal: decoder only",
    "supports_alibi": "layer_refusal",
    "supports_alibi_sqrt": "layer_refusal",
    "supports_sink": "layer_refusal",
    "supports_mm_prefix": "layer_refusal: bidirectional",
    "supports_non_causal": "layer_refusal: bidirectional",
    "supports_non_causal_dcp": "layer_refusal: bidirectional",
    "supports_per_head_quant_scales": "layer_refusal",
    "supports_batch_invariance": "engine_refusal",
    "supports_rswa": "engine_refusal: reference_window",
    "supports_dcp": "engine_refusal: context_parallel",
    "supports_pcp": "engine_refusal: context_parallel",
    "supports_head_size": "layer_refusal",
    "supports_dtype": "engine_refusal",
    "supports_kv_cache_dtype": "engine_refusal",
    "supports_block_size": "engine_refusal",
    "supports_compute_capability": "engine_refusal",
    "supports_combination": "head size, dtype and cache type, refused by themselves",
    "supports_sliding_window": "windowed layers stay dense",
    "supports_kv_connector": "records are a cache layer that connectors move",
    "supports_kv_cache_update_bypass": "refused by SkimBackend",
    "supports_device_cpu_query_lens_mismatch": "refused by SkimBackend",
    "supports_quant_query_input": "quantised caches are refused",
}


def test_no_capability_of_flash_attention_is_inherited_unjudged(real):
    claims = {name for name in dir(real.FlashAttentionBackend) if name.startswith("supports_")}
    assert {"supports_attn_type", "supports_sink", "supports_head_size"} <= claims
    assert claims - set(JUDGED_CLAIMS) == set()


def test_what_would_write_keys_past_the_records_is_refused(real):
    from kvskim.engines.vllm.backend import SkimBackend, SkimFlashAttentionBackend
    from kvskim.engines.vllm.implementation import SkimImpl

    for cls in (SkimBackend, SkimFlashAttentionBackend):
        assert cls.supports_kv_cache_update_bypass is False
        assert cls.supports_device_cpu_query_lens_mismatch() is False
        assert cls.forward_includes_kv_cache_update is False
    assert SkimImpl.fused_rope_kvcache_supported(None) is False


def test_every_other_field_of_a_step_has_a_default():
    """`_rows_from` resets what it does not know."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    known = {
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor",
        "slot_mapping",
    }
    assert [f.name for f in dataclasses.fields(CommonAttentionMetadata) if f.default is dataclasses.MISSING and f.name not in known] == []


def source(module: str) -> str:
    """Source of a module of vLLM that can't be imported without its compiled part."""
    from pathlib import Path

    path = Path(vllm.__file__).parent.joinpath(*module.split(".")[1:])
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@pytest.mark.parametrize(("module", "parts"), [
    ("vllm.v1.attention.backends.mla.flashattn_mla", ["class FlashAttnMLABackend("]),
    ("vllm.model_executor.layers.rotary_embedding", ["_ROPE_DICT", "RotaryEmbedding(", "Llama3RotaryEmbedding("]),
    ("vllm.model_executor.layers.rotary_embedding.base", ["def _compute_inv_freq(self, base", "self.is_neox_style =", "self.base =", "self.head_size ="]),
    ("vllm.plugins", ['"vllm.general_plugins"']),
    ("vllm.engine.arg_utils", ["--attention-backend", "--additional-config", "--disable-hybrid-kv-cache-manager"]),
    ("vllm.engine.arg_utils", [
        "    max_num_batched_tokens:", "    enable_prefix_caching:", "    async_scheduling:", "    kv_cache_memory_bytes:", "    gpu_memory_utilization:",
    ]),
    ("vllm.v1.engine.llm_engine", ["def abort_request(", "def add_request(", "def has_unfinished_requests(self)", "def step(self)"]),
    ("vllm.sampling_params", ["stop_token_ids:", "ignore_eos:", "detokenize:", "max_tokens:", "output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE"]),
    ("vllm.entrypoints.cli.main", ["def main("]),
    ("vllm.envs", ["VLLM_BATCH_INVARIANT", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"]),
    ("vllm.v1.core.kv_cache_utils", ["block_hash_num_tokens"]),
    ("vllm.v1.core.block_pool", ["self.blocks"]),
    ("vllm.distributed", ["parallel_state"]),
    ("vllm.distributed.parallel_state", ["def get_tensor_model_parallel_rank(", "def get_tp_group(", "def get_pp_group(", "self.cpu_group", "def all_gather("]),
    ("vllm.v1.worker.worker_base", ["self.parallel_config.rank = rank"]),
])
def test_names_that_are_used_where_a_gpu_is(module, parts):
    text = source(module)
    assert [part for part in parts if part not in text] == []


def test_metadata_of_the_step_under_way_is_found():
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import ForwardContext, override_forward_context

    from kvskim.engines.vllm.facts import decodes_alone

    assert not decodes_alone("a")
    for metadata, expected in ((SimpleNamespace(decodes_alone=True), True), (SimpleNamespace(decodes_alone=False), False), (SimpleNamespace(), False)):
        context = ForwardContext(no_compile_layers={}, attn_metadata={"a": metadata}, slot_mapping={})
        with override_forward_context(context):
            assert decodes_alone("a") is expected
            assert not decodes_alone("b")
    pieces = ForwardContext(no_compile_layers={}, attn_metadata={"a": metadata}, slot_mapping={}, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
    with override_forward_context(pieces):
        assert not decodes_alone("a")
    with override_forward_context(ForwardContext(no_compile_layers={}, attn_metadata=None, slot_mapping={})):
        assert not decodes_alone("a")
