"""What is read out of an engine in this process."""

from types import SimpleNamespace

import pytest
import torch
from mini_engine import MiniEngine, Request

from kvskim.engines.vllm import probe


class Engine:
    """Finishes one request per step, last first, under the caller's name or a longer one."""

    def __init__(self, suffix):
        self.suffix, self.waiting = suffix, []

    def add_request(self, name, prompt, params):
        self.waiting.append((name, prompt["prompt_token_ids"]))
        return name + "-internal"

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        name, ids = self.waiting.pop()
        places = [{token: SimpleNamespace(logprob=-0.5), 99: SimpleNamespace(logprob=-0.75)} for token in ids]
        completion = SimpleNamespace(token_ids=tuple(ids), logprobs=places)
        running = SimpleNamespace(finished=False, request_id="x")
        return [running, SimpleNamespace(finished=True, request_id=name + self.suffix, outputs=[completion], num_cached_tokens=None)]


@pytest.mark.parametrize("suffix", ["", "-1a2b3c4d"])
def test_generate_gives_results_in_the_order_of_the_prompts(suffix):
    llm = SimpleNamespace(llm_engine=Engine(suffix))
    prompts = [[i, i + 1] for i in range(12)]
    steps = []
    results = probe.generate(llm, prompts, None, lambda: steps.append(1))
    assert [result.tokens for result in results] == prompts
    assert results[3].logprobs == [-0.5, -0.5]
    assert results[3].likeliest[0] == {3: -0.5, 99: -0.75}
    assert len(steps) == 12


def test_live_pages_are_those_of_full_cached_blocks():
    blocks = [
        SimpleNamespace(block_id=0, block_hash=None, block_hash_num_tokens=None), SimpleNamespace(block_id=1, block_hash=b"a", block_hash_num_tokens=32),
        SimpleNamespace(block_id=2, block_hash=b"b", block_hash_num_tokens=40), SimpleNamespace(block_id=3, block_hash=b"c", block_hash_num_tokens=64),
    ]
    manager = SimpleNamespace(block_pool=SimpleNamespace(blocks=blocks))
    core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=manager))
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=32))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core), vllm_config=config))
    assert probe.live_pages(llm).tolist() == [2, 3, 6, 7]


def test_state_of_an_engine():
    engine = MiniEngine({"selector": "mean"})
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=engine.config))
    assert probe.state_of(llm) is engine.state
    with torch.inference_mode():
        engine.step([(Request(1), 20)])
    engine.config.compilation_config.static_forward_context.clear()
    assert probe.state_of(llm) is None


def test_a_look_at_all_workers():
    """Two workers with the same layers, one with another layer, and one without any that is sparse."""
    settings = {"selector": "mean", "rule": "budget", "budget_pages": 4, "window_pages": 1}
    engines = [MiniEngine(settings), MiniEngine(settings), MiniEngine(settings, num_layers=1, first_layer=2)]
    workers = [probe.WorkerProbe() for _ in range(4)]
    with torch.inference_mode():
        for engine, worker in zip(engines, workers):
            request = Request(1)
            engine.step([(request, 100)])
            engine.step([(request, 1)])
            worker.vllm_config = engine.config
    workers[3].vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    llm = SimpleNamespace(collective_rpc=lambda method: [getattr(worker, method)() for worker in workers])
    found = probe.look(llm)
    assert found.ready
    assert found.kernels == "torch"
    assert found.layers == tuple(f"model.layers.{i}.attn" for i in range(3))
    # Two kv heads in five layers, 4 of 7 pages.
    assert (found.activity.attended, found.activity.total, found.activity.count) == (40, 70, 10)
    engines[1].state.ready.fill_(0)
    assert not probe.look(llm).ready
    assert not probe.look(SimpleNamespace(collective_rpc=lambda method: [workers[3].kvskim_look()])).ready
