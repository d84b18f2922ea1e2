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
    assert "method" in inspect.signature(LLM.collective_rpc).parameters
    assert list(inspect.signature(LLMEngine.add_request).parameters)[1:4] == ["request_id", "prompt", "params"]
    assert callable(LLMEngine.step)
    assert RequestOutputKind.DELTA
    assert {"first_token_ts", "last_token_ts"} <= {field.name for field in dataclasses.fields(RequestStateStats)}


def test_the_extension_clashes_with_nothing():
    from vllm.v1.worker.worker_base import WorkerBase

    from kvskim.bench.e2e_probe import BenchWorkerExtension

    added = [name for name in dir(BenchWorkerExtension) if not name.startswith("__")]
    assert sorted(added) == ["kvskim_bench_activity", "kvskim_bench_facts"]
    assert not any(hasattr(WorkerBase, name) for name in added)
    assert arguments()["worker_extension_cls"] == f"{BenchWorkerExtension.__module__}.{BenchWorkerExtension.__name__}"


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


def test_keys_and_values_are_filled_and_records_are_made_of_them(monkeypatch):
    from kvskim.engines.vllm.state import SkimState

    made = []

    def find(layers):
        assert layers == {"l": "context"}
        return SimpleNamespace(layers={"l": "layer"}, encode=lambda layer, slots: made.append((layer, slots.tolist())))

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
