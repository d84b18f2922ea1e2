"""The real vLLM with values, or keys and values, in host memory: its planner counts the blocks, and its own layers and builders run with kvskim in them.

Runs where the Python files of the version that these variants work with are importable; skipped elsewhere.
"""

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vllm
from kvskim.engines.vllm.support import TIER_VLLM, parse_version

pytestmark = pytest.mark.skipif(
    "stand-in" in (vllm.__doc__ or "") or parse_version(vllm.__version__) != TIER_VLLM, reason="vLLM is not installed, or another version"
)
FEW = {"selector": "rki4", "rule": "budget", "budget_pages": 6}
CASES = [("mem-v", 16), ("mem-v", 64), ("mem-kv", 16)]
"""Variants and block sizes."""


@pytest.fixture
def patched(monkeypatch):
    """vLLM on a CPU, with torch in the place of its two kernels."""
    from test_vllm_contract import torch_flash_attention, torch_write
    from vllm.v1.attention.backends import flash_attn as real

    from kvskim.engines.vllm import facts

    monkeypatch.delenv("KVSKIM_CONFIG", raising=False)
    monkeypatch.setattr(facts, "gpu_capability", lambda: (9, 0))
    monkeypatch.setattr(facts, "current_platform", SimpleNamespace(is_pin_memory_available=lambda: True))
    monkeypatch.setattr(real, "flash_attn_varlen_func", torch_flash_attention, raising=False)
    monkeypatch.setattr(real, "get_scheduler_metadata", lambda *, cache_seqlens, **_: cache_seqlens.clone(), raising=False)
    monkeypatch.setattr(real, "reshape_and_cache_flash", torch_write, raising=False)
    monkeypatch.setattr(real, "get_flash_attn_version", lambda *_, **__: 3)
    monkeypatch.setattr(real, "get_kv_cache_layout", lambda: "NHD")
    return real


def real_engine(settings, block_size, **options):
    import real_vllm
    from mini_engine import MAX_TOKENS
    from tier_engine import TierEngine
    from vllm.config import vllm as config_module

    class Engine(TierEngine):
        def make_config(self, additional, max_rows, speculative):
            return real_vllm.layer_config(additional, max_rows, self.block_size, MAX_TOKENS)

        def current_config(self):
            patch = pytest.MonkeyPatch.context()
            context = patch.__enter__()
            context.setattr(config_module, "_current_vllm_config", self.config)
            return contextlib.closing(SimpleNamespace(close=lambda: patch.__exit__(None, None, None)))

    return Engine({"hot_cache_gib": 1e-4, **settings}, block_size=block_size, **options)


@pytest.mark.parametrize(("variant", "block_size"), CASES)
def test_vllms_own_layers_and_builders_with_pages_on_the_host(patched, variant, block_size, monkeypatch):
    from mini_engine import Request
    from test_vllm_contract import torch_flash_attention

    from kvskim.engines.vllm import probe, tier

    room, read = tier.HostCache.room, []
    monkeypatch.setattr(tier.HostCache, "room", lambda *arguments: room(*arguments).fill_(torch.nan))

    def reads_whole_tiles(*, v, block_table, **others):
        read.append(v[block_table.unique().long()].isnan().any())
        torch_flash_attention(v=v, block_table=block_table, **others)

    monkeypatch.setattr(patched, "flash_attn_varlen_func", reads_whole_tiles)
    with torch.inference_mode():
        few, everything = (real_engine({"variant": variant, **s}, block_size) for s in (FEW, {"selector": "rki4", "rule": "budget", "budget": 1.0}))
        for e in (few, everything):
            a, b = Request(1), Request(2)
            for scheduled, padding in (
                ([(a, 250)], 0), ([(a, 1), (b, 70)], 0), ([(a, 1), (b, 1)], 0), ([(b, 1), (a, 1)], 2), ([(a, 1), (b, 30)], 0), ([(a, 3), (b, 2)], 0),
            ):
                before = {id(r): r.computed for r, _ in scheduled}
                rows = e.step(scheduled, pad_rows=padding)
                for (request, count), row in zip(sorted(scheduled, key=lambda item: item[1]), rows):
                    for layer, actual in enumerate(row):
                        if e is everything or count > 1:
                            torch.testing.assert_close(actual, e.expected(request, layer, before[id(request)], count), atol=2e-5, rtol=2e-5)
            assert probe.untrue_copies(e.state) == dict.fromkeys(e.state.layers, 0)
        assert all(6 in layer.counts[:2] for layer in few.state.layers.values())
    assert len(read) == 2 * 2 * 4
    assert not any(read), "what memory held before may be read, and is no NaN"


@pytest.mark.parametrize(("variant", "block_size"), CASES)
def test_the_planner_counts_what_is_left_on_the_gpu(patched, variant, block_size):
    """What is left of K, records and directory of every layer are one group of vLLM's, whose blocks have the bytes that they are said to have."""
    import real_vllm

    e = real_engine({"variant": variant, **FEW}, block_size)
    config = real_vllm.planning_config(block_size)
    specs = {name: layer.get_kv_cache_spec(e.config) for name, layer in e.context.items()}
    assert len(specs) == 6
    planner = real_vllm.planner()
    (group,) = planner.get_kv_cache_groups(config, specs)
    assert set(group.layer_names) == set(specs)
    memory = 64 * 2**20
    plan = planner.get_kv_cache_config_from_groups(config, [group], memory)
    keys, pages = block_size * 2 * (2 * 64 if variant == "mem-v" else 1), block_size // 16
    block = 2 * (keys + pages * 2 * (e.records_layers()[0].record_bytes + 4))
    assert plan.num_blocks == memory // block
    assert e.state.host_cache.block_bytes(host=False) == block
    sizes = real_vllm.bytes_of_layers(plan)
    parts = {"records": pages * 2 * e.records_layers()[0].record_bytes, "residency": pages * 2 * 4}
    assert sizes == {name: plan.num_blocks * parts.get(name.rpartition("kvskim_")[2], keys) for name in specs}


def test_blocks_of_the_same_memory_in_the_shape_of_llama(patched, monkeypatch):
    """With values on the host vLLM plans at least 1.9 times the blocks of `fast` and 1.85 times those without kvskim, hot cache and records counted."""
    import real_vllm
    from mini_engine import MiniEngine

    from kvskim.engines.vllm.tier import HOT_SHARE

    for name, value in dict(num_kv_heads=8, group=4, head_size=128, scale=128**-0.5).items():
        monkeypatch.setattr(MiniEngine, name, value)
    config, planner, memory = real_vllm.planning_config(16), real_vllm.planner(), 4 * 2**30

    def planned(variant, attention_alone=False):
        e = real_engine({"variant": variant, "selector": "sketch", **({"hot_cache_gib": None} if variant == "fast" else {})}, 16, num_blocks=8)
        assert all(layer.record_bytes == 256 for layer in e.records_layers() if layer.layer_name.endswith("records"))
        names = [layer.layer_name for layer in e.layers] if attention_alone else list(e.context)
        specs = {name: e.context[name].get_kv_cache_spec(e.config) for name in names}
        left = int(memory * (1 - HOT_SHARE.get(variant, 0.0)))
        return planner.get_kv_cache_config_from_groups(config, planner.get_kv_cache_groups(config, specs), left).num_blocks

    dense, fast, values = planned("fast", attention_alone=True), planned("fast"), planned("mem-v")
    assert dense == memory // (2 * 2 * 16 * 8 * 128 * 2)
    assert values >= 1.9 * fast
    assert values >= 1.85 * dense


@pytest.mark.parametrize("limit", [4, 3000])
def test_the_engine_makes_as_many_blocks_as_the_host_holds(patched, limit, monkeypatch):
    """The number that the profiling run lowers is the one that vLLM's planner goes by."""
    import real_vllm

    from kvskim.engines.vllm import tier

    told, block = 64 * 2**20, 2 * 2 * 16 * 2 * 64 * 2
    e = real_engine({"variant": "mem-kv", **FEW}, 16)
    monkeypatch.setattr(tier, "cache_memory", lambda *_: told)
    monkeypatch.setattr(tier, "affordable_blocks", lambda *_: limit * 2**20 // block)
    e.config.cache_config.kv_cache_memory_bytes = told
    e.state.host_cache._judge(told, 0)
    config = real_vllm.planning_config(16)
    config.cache_config.num_gpu_blocks_override = e.config.cache_config.num_gpu_blocks_override
    specs = {name: layer.get_kv_cache_spec(e.config) for name, layer in e.context.items()}
    (plan,) = real_vllm.plans_of_workers(config, [specs], [told])
    assert plan.num_blocks == min(limit * 2**20 // block, told // e.state.host_cache.block_bytes(host=False))


@pytest.mark.parametrize(("variant", "block_size"), CASES)
def test_vllm_allocates_and_binds_keys_and_directories(patched, variant, block_size, monkeypatch):
    import real_vllm
    from vllm.v1.worker.utils import bind_kv_cache

    from kvskim.engines.vllm.layout import key_view

    e = real_engine({"variant": variant, **FEW}, block_size)
    for layer in e.context.values():
        layer.kv_cache = torch.tensor([])
    assert all(layer.tier is None for layer in e.state.layers.values())
    config = real_vllm.planning_config(block_size)
    specs = {name: layer.get_kv_cache_spec(e.config) for name, layer in e.context.items()}
    planner = real_vllm.planner()
    plan = planner.get_kv_cache_config_from_groups(config, planner.get_kv_cache_groups(config, specs), 2**20)
    backends = {name: layer.get_attn_backend() for name, layer in e.context.items()}
    caches = real_vllm.allocate(config, plan, specs, backends, block_size)
    platform = SimpleNamespace(is_cuda_alike=lambda: True, check_runner_kv_caches_multi_layer=lambda: None)
    monkeypatch.setattr("vllm.v1.worker.utils.current_platform", platform)
    # The hot cache of this engine is in the float32 of its steps; vLLM allocates for the model's type.
    for name, cache in e.state.host_cache._hot.items():
        e.state.host_cache._hot[name] = dataclasses.replace(cache, hot=cache.hot.bfloat16())
    bind_kv_cache(caches, e.context, [])
    for layer in e.state.layers.values():
        if variant == "mem-v":
            key = key_view(layer.module.kv_cache, 64)
            assert key.shape == (plan.num_blocks, block_size, 2, 64)
            assert key.dtype == torch.bfloat16
        else:
            assert layer.module.kv_cache.shape == (plan.num_blocks, 1, 16, 1, 1)
        assert layer.tier.host.shape == (plan.num_blocks * block_size // 16, 2, 1 if variant == "mem-v" else 2, 16, 64)
        assert layer.tier.directory.shape == layer.tier.host.shape[:2]
        assert layer.views(layer.module.kv_cache)[1] is layer.tier
        with torch.inference_mode():
            layer.tier.directory.fill_(5)
        residency = caches[f"{layer.name}.kvskim_residency"]
        assert (residency.view(torch.int16).flatten()[::2] == 5).all(), "the directory is in vLLM's memory"


def test_vllm_counts_the_most_that_a_step_takes_and_runs_attention_between_graphs():
    """So memory that a layer takes and gives back in its attention is within what vLLM leaves to a step, and in no graph."""
    from vllm.config import CompilationConfig

    worker = Path(vllm.__file__).parent.joinpath("v1/worker/gpu_worker.py").read_text()
    assert '"allocated_bytes.all.peak"' in worker
    assert "profile_torch_peak - profile_result.before_profile.torch_peak" in worker
    assert "vllm::unified_attention_with_output" in CompilationConfig._attention_ops


def test_names_that_are_used():
    from vllm.config import CacheConfig, ModelConfig
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    fields = {field.name for field in dataclasses.fields(CacheConfig)}
    assert {"num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization"} <= fields
    assert callable(ModelConfig.get_num_layers)
    assert callable(Platform.is_pin_memory_available)
    assert "seq_lens_cpu_upper_bound" in {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    assert "head_size_v" in {field.name for field in dataclasses.fields(FullAttentionSpec)}
