"""What `kvskim bench e2e` asks of a worker, on the small engine."""

import json
from types import SimpleNamespace

import pytest
import torch
from mini_engine import MiniEngine, Request
from torch import nn

import vllm
from kvskim.bench.e2e_probe import BenchWorkerExtension, weights

if "stand-in" not in (vllm.__doc__ or ""):
    pytest.skip("runs on the stand-in for vLLM", allow_module_level=True)

SETTINGS = {"selector": "mean", "rule": "budget", "budget_pages": 8}


class Model(nn.Module):
    """100 bytes of input embeddings, 60 of an expert, 40 of the rest."""

    def __init__(self, tied):
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 10, dtype=torch.bfloat16)
        self.experts = nn.Linear(5, 6, bias=False, dtype=torch.bfloat16)
        self.head = nn.Linear(2, 5, bias=False, dtype=torch.float32)
        if tied:
            self.output = nn.Linear(10, 5, bias=False, dtype=torch.bfloat16)
            self.output.weight = self.embed_tokens.weight


def test_weights_that_a_step_reads():
    assert weights(Model(False), tied=False) == {"weight_bytes": 100, "expert_bytes": 60}
    assert weights(Model(True), tied=True) == {"weight_bytes": 200, "expert_bytes": 60}


def worker(context, cls=BenchWorkerExtension):
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context, cudagraph_mode="FULL"),
        model_config=SimpleNamespace(dtype=torch.bfloat16, hf_text_config=SimpleNamespace(tie_word_embeddings=False)),
    )
    extension = cls()
    extension.vllm_config, extension.get_model = config, lambda: Model(False)
    return extension


def test_facts_of_a_sparse_engine():
    engine = MiniEngine(SETTINGS, windows=(None, 128))
    facts = json.loads(worker(engine.context).kvskim_bench_facts())
    first, second = facts["layers"]
    record_bytes = engine.records_layers()[0].record_bytes
    assert first == {"kv_heads": 2, "head_size": 64, "window": None, "element_bytes": 2, "latent": False, "record_bytes": record_bytes}
    assert (second["window"], second["record_bytes"]) == (128, None)
    assert (facts["kernels"], facts["graphs"], facts["weight_bytes"]) == ("torch", "FULL", 100)
    assert any("budget: 8 pages" in line for line in facts["block"])


def test_facts_and_activity_of_a_dense_engine():
    flash, other = SimpleNamespace(get_name=lambda: "FLASH_ATTN"), SimpleNamespace(get_name=lambda: "FLASHMLA")
    layer = SimpleNamespace(num_kv_heads=2, head_size=64, impl=SimpleNamespace(vllm_flash_attn_version=3), get_attn_backend=lambda: flash)
    latent = SimpleNamespace(num_kv_heads=1, head_size=576, kv_lora_rank=512, impl=SimpleNamespace(), get_attn_backend=lambda: other)
    dense = worker({"a": layer, "mlp": SimpleNamespace(), "b": latent})
    facts = json.loads(dense.kvskim_bench_facts())
    assert [described["latent"] for described in facts["layers"]] == [False, True]
    assert facts["layers"][0]["record_bytes"] is None
    assert (facts["kernels"], facts["block"]) == ("FLASHMLA and FLASH_ATTN 3", [])
    assert json.loads(dense.kvskim_bench_activity()) == {}


def test_a_profile_is_asked_for_and_given():
    class Worker(BenchWorkerExtension):
        def execute_model(self, scheduled):
            return scheduled

    asked = Worker()
    assert json.loads(asked.kvskim_bench_profile(1)) == {}
    assert asked.execute_model(SimpleNamespace(num_scheduled_tokens={"a": 5}, total_num_scheduled_tokens=5)).total_num_scheduled_tokens == 5
    assert "were not seen" in json.loads(asked.kvskim_bench_profile_result())["error"]
    assert asked.execute_model(1) == 1


def test_activity_of_the_last_decode_step():
    engine = MiniEngine(SETTINGS)
    asked = worker(engine.context)
    requests = [Request(1), Request(2)]
    with torch.inference_mode():
        engine.step([(requests[0], 400), (requests[1], 640)])
        assert json.loads(asked.kvskim_bench_activity())["count"] == 0
        engine.step([(request, 1) for request in requests])
    seen = json.loads(asked.kvskim_bench_activity())
    # Two layers, two requests of 26 and 41 pages, two kv heads.
    assert (seen["calibrated"], seen["count"], seen["attended"], seen["total"]) == (True, 8, 8 * 8, 4 * (26 + 41))
    assert 0 < seen["covered"] <= 8
