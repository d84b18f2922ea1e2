"""`kvskim bench e2e` against the real vLLM: arguments that exist, and the connector that fills the cache. Skipped where vLLM is not installed."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch

import vllm
from kvskim.bench.e2e_plan import Job, engine_arguments

pytestmark = pytest.mark.skipif("stand-in" in (vllm.__doc__ or ""), reason="vLLM is not installed")
BLOCK = 32


def arguments():
    jobs = [Job("decode", 4, 4096)]
    return engine_arguments(jobs, real=False, memory=0.9, blocks=9) | engine_arguments(jobs, real=True, memory=0.9, blocks=None)


def test_arguments_of_an_engine():
    from vllm.engine.arg_utils import EngineArgs

    from vllm import LLM

    known = set(inspect.signature(LLM.__init__).parameters) | {field.name for field in dataclasses.fields(EngineArgs)}
    assert {*arguments(), "model", "attention_backend", "additional_config"} <= known


def test_what_is_called_exists():
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.stats import RequestStateStats

    from vllm import LLM, SamplingParams

    assert {"temperature", "max_tokens", "ignore_eos", "detokenize", "extra_args", "output_kind"} <= set(SamplingParams.__struct_fields__)
    assert {"prompts", "sampling_params", "use_tqdm"} <= set(inspect.signature(LLM.generate).parameters)
    assert {"method", "args"} <= set(inspect.signature(LLM.collective_rpc).parameters)
    assert list(inspect.signature(LLMEngine.add_request).parameters)[1:4] == ["request_id", "prompt", "params"]
    assert callable(LLMEngine.step)
    assert RequestOutputKind.DELTA
    assert {"first_token_ts", "last_token_ts"} <= {field.name for field in dataclasses.fields(RequestStateStats)}


def test_the_extension_clashes_with_nothing():
    from vllm.v1.worker.worker_base import WorkerBase

    from kvskim.bench.e2e_probe import BenchWorkerExtension

    added = [name for name in dir(BenchWorkerExtension) if not name.startswith("__")]
    assert sorted(added) == ["kvskim_bench_activity", "kvskim_bench_facts", "kvskim_bench_profile", "kvskim_bench_profile_result"]
    assert not any(hasattr(WorkerBase, name) for name in added)
    assert arguments()["worker_extension_cls"] == f"{BenchWorkerExtension.__module__}.{BenchWorkerExtension.__name__}"


def test_what_the_profiler_stands_before_exists():
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_worker import Worker

    assert {"num_scheduled_tokens", "total_num_scheduled_tokens"} <= {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert list(inspect.signature(Worker.execute_model).parameters) == ["self", "scheduler_output"]


def connectors(layers=None):
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**engine_arguments([Job("decode", 1, 4096)], real=False, memory=0.9, blocks=None)["kv_transfer_config"]),
        cache_config=SimpleNamespace(block_size=BLOCK), compilation_config=SimpleNamespace(static_forward_context=layers or {}),
        device_config=SimpleNamespace(device="cpu"), scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )
    return [KVConnectorFactory.create_connector(config, role, SimpleNamespace()) for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)]


def request(tokens, filled):
    return SimpleNamespace(request_id="a", num_tokens=tokens, kv_transfer_params=None if filled is None else {"filled_tokens": filled})


@pytest.mark.parametrize(("tokens", "filled", "computed", "expected"), [
    (90, 100, 0, 89), (90, 90, 0, 89), (90, 50, 0, 50), (90, 50, 32, 18), (90, 50, 64, 0), (90, 0, 0, 0), (90, None, 0, 0), (1, 5, 0, 0),
])
def test_only_what_is_asked_for_is_filled(tokens, filled, computed, expected):
    scheduler, _ = connectors()
    for _ in range(2):
        assert scheduler.get_num_new_matched_tokens(request(tokens, filled), computed) == (expected, False)


def test_the_geometry_with_latent_attention(tmp_path):
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvskim.bench.geometries import GEOMETRIES, write_geometry
    from kvskim.engines.vllm.latent_model import backend_name, is_latent

    found = get_config(str(write_geometry("deepseek-v2-lite", tmp_path)), trust_remote_code=False)
    shape = ModelArchConfigConvertorBase(found, found.get_text_config())
    assert shape.is_deepseek_mla()
    assert shape.get_head_size() == 576
    assert found.rope_parameters["rope_type"] == "default"
    assert found.architectures[0] in ModelRegistry.get_supported_archs()
    for name, settings in GEOMETRIES.items():
        backend = backend_name(latent=is_latent(settings))
        assert backend in AttentionBackendEnum.__members__
        assert backend.endswith("_MLA") is (name == "deepseek-v2-lite")


def test_latent_rows_are_filled():
    scheduler, worker = connectors()
    asked = request(97, 96)
    count, _ = scheduler.get_num_new_matched_tokens(asked, 0)
    scheduler.update_state_after_alloc(asked, SimpleNamespace(get_block_ids=lambda: ([3, 1, 5, 7],)), count)
    caches = {"l": torch.zeros(8, BLOCK, 576, dtype=torch.bfloat16)}
    worker.register_kv_caches(caches)
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    worker.start_load_kv(None)
    assert caches["l"].flatten(1).any(1).nonzero().flatten().tolist() == [1, 3, 5]
    assert float(caches["l"][[1, 3, 5]].float().std()) == pytest.approx(0.5, abs=0.02)


def test_keys_and_values_are_filled_and_records_are_made_of_them(monkeypatch):
    from kvskim.engines.vllm.state import SkimState

    made = []

    def find(layers):
        assert layers == {"l": "context"}
        return SimpleNamespace(layers={"l": "layer"}, encode=lambda layer, slots: made.append((layer, slots.tolist())), host_cache=None)

    monkeypatch.setattr(SkimState, "find", staticmethod(find))
    for records in (False, True):
        scheduler, worker = connectors({"l": "context"})
        asked = request(97, 96)
        count, _ = scheduler.get_num_new_matched_tokens(asked, 0)
        scheduler.update_state_after_alloc(asked, SimpleNamespace(get_block_ids=lambda: ([3, 1, 5, 7],)), count)
        caches = {"l": torch.zeros(8, 2, BLOCK, 2, 4)}
        if records:
            caches["l.kvskim_records"] = torch.zeros(8, 2, 2, 8)
        worker.register_kv_caches(caches)
        worker.bind_connector_metadata(scheduler.build_connector_meta(None))
        worker.start_load_kv(None)
        assert caches["l"].flatten(1).any(1).nonzero().flatten().tolist() == [1, 3, 5]
        assert float(caches["l"][[1, 3, 5]].std()) == pytest.approx(0.5, abs=0.1)
        if records:
            assert not caches["l.kvskim_records"].any()
    assert made == [("layer", [111, 127, 47, 63, 175, 191])]


def test_what_is_in_host_memory_is_stored_and_nothing_of_kvskims_is_filled(monkeypatch):
    from kvskim.bench import e2e_fill
    from kvskim.engines.vllm.state import SkimState

    encoded, stored = [], []
    layer = SimpleNamespace(num_kv_heads=2, head_size=64)
    host = SimpleNamespace(store=lambda layer, keys, values, slots: stored.append((keys, values, slots, list(encoded))))
    state = SimpleNamespace(layers={"l": layer}, encode=lambda layer, slots: encoded.append(slots.tolist()), host_cache=host)
    monkeypatch.setattr(SkimState, "find", staticmethod(lambda _: state))
    monkeypatch.setattr(e2e_fill, "STORED_AT_ONCE", 60)
    scheduler, worker = connectors({"l": "context"})
    worker._config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    asked = request(97, 96)
    count, _ = scheduler.get_num_new_matched_tokens(asked, 0)
    scheduler.update_state_after_alloc(asked, SimpleNamespace(get_block_ids=lambda: ([3, 1, 5, 7],)), count)
    caches = {name: torch.zeros(8, 1, BLOCK, 2, 64) for name in ("l", "l.kvskim_records", "l.kvskim_residency")}
    worker.register_kv_caches(caches)
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    worker.start_load_kv(None)
    assert [bool(cache.any()) for cache in caches.values()] == [True, False, False]
    assert encoded == [[111, 127, 47, 63, 175, 191]]
    assert [tuple(values.shape) for _, values, _, _ in stored] == [(60, 2, 64), (36, 2, 64)]
    assert [slot for _, _, slots, _ in stored for slot in slots.tolist()] == [*range(96, 128), *range(32, 64), *range(160, 192)]
    assert not any(before for *_, before in stored), "records are made of keys that are stored"
    for keys, values, _, _ in stored:
        assert not torch.equal(keys, values)
        for rows in (keys, values):
            assert rows.dtype == torch.bfloat16
            assert 0.3 < float(rows.float().std()) < 0.7
