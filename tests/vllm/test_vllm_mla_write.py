"""When the latent rows of a step are written: behind the products of the queries where all rows decode, at once elsewhere; and by which kernel."""

from __future__ import annotations

import pytest
import torch
from mini_engine import Request
from mla_mini_engine import LATENT, MlaMiniEngine, latents

import kvskim.engines.vllm.state as state_module
from kvskim.ops.dispatch import Choice
from kvskim.ops.write_cache import write_cache

FEW = {"selector": "rki4", "rule": "budget", "budget_pages": 6}
KINDS = ([(5, 100), (6, 40)], False), ([(5, 1), (6, 1)], True), ([(5, 1), (6, 20)], False), ([(5, 1), (6, 1)], True)
"""What is scheduled of two requests in one step after the other, and whether all rows decode."""


pytestmark = pytest.mark.usefixtures("quiet")


def row_of(engine, layer, request):
    """The cache row of the newest token of a request."""
    token = request.computed - 1
    block = request.blocks[token // engine.block_size]
    return layer.kv_cache[block, token % engine.block_size]


def steps(engine, before=lambda requests: None):
    requests = {seed: Request(seed) for seed in (5, 6)}
    for scheduled, alone in KINDS:
        before(alone)
        yield requests, alone, engine.step([(requests[seed], count) for seed, count in scheduled], pad_rows=2 if alone else 0)


def test_rows_of_a_decode_step_are_written_when_attention_has_its_queries(monkeypatch):
    engine, seen = MlaMiniEngine(FEW), []
    implementation = type(engine.layers[0].impl)
    for name in ("do_kv_cache_update", "forward_mqa", "forward_mha"):
        whole = getattr(implementation, name)

        def told(self, *arguments, whole=whole, name=name, **more):
            seen.append(name)
            return whole(self, *arguments, **more)

        monkeypatch.setattr(implementation, name, told)
    keys_written = engine.state.keys_written
    monkeypatch.setattr(engine.state, "keys_written", lambda *arguments, **more: (seen.append("keys written"), keys_written(*arguments, **more)))
    for requests, alone, _ in steps(engine, lambda _: seen.clear()):
        expected = ["do_kv_cache_update", "forward_mqa", "keys written"] if alone else ["do_kv_cache_update", "keys written"]
        assert seen[: len(expected)] == expected
        for request in requests.values():
            for index, layer in enumerate(engine.layers):
                assert torch.equal(row_of(engine, layer, request), latents(request.seed, index)[request.computed - 1])


@pytest.mark.parametrize("serves", [True, False])
def test_steps_of_decode_rows_alone_are_written_by_the_kernel_that_lets_others_in(serves, monkeypatch):
    """With the same result; its step reads its queries early. What that kernel does not take vLLM writes."""
    plain, engine, written, told = MlaMiniEngine(FEW), MlaMiniEngine(FEW), [], []
    decode_step, write_latent = state_module.decode_step, engine.state.write_latent

    def served(latent, rotary, latents_of_cache, rest_of_cache, slots, *, kernels, overlap):
        assert (kernels, overlap) == ("cuda", True)
        assert latents_of_cache.shape[-1] == LATENT
        if serves:
            written.append(int((slots >= 0).sum()))
            return write_cache(latent, rotary, latents_of_cache, rest_of_cache, slots, kernels="torch")
        return False

    def with_cuda(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(state_module, "write_cache", served)
            patch.setattr(engine.state, "kernels", Choice("cuda", ""))
            return write_latent(*arguments)

    def seen(*tensors, queries_settled, **settings):
        told.append(queries_settled)
        decode_step(*tensors, queries_settled=queries_settled, **settings)

    monkeypatch.setattr(engine.state, "write_latent", with_cuda)
    for (_, _, wanted), (_, alone, actual) in zip(steps(plain), steps(engine, lambda _: (written.clear(), told.clear())), strict=True):
        assert written == [2] * len(engine.layers) * (alone and serves)
        assert all(torch.equal(a, w) for rows, others in zip(actual, wanted, strict=True) for a, w in zip(rows, others, strict=True))
        monkeypatch.setattr(state_module, "decode_step", seen)
    assert told == [serves] * len(engine.layers)


def test_rows_that_wait_for_an_attention_that_does_not_come_are_an_error(monkeypatch):
    engine = MlaMiniEngine(FEW)
    request = Request(5)
    engine.step([(request, 100)])
    step = [(request, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.layers[0]), "forward_impl", lambda *arguments, **more: None)
        engine.step(step)
        for layer in engine.layers[1:]:
            layer.impl._held = None
    with pytest.raises(RuntimeError, match=f"rows of {engine.layers[0].layer_name} were held back for the attention of a decode step"):
        engine.step(step)
    engine.step([(Request(6), 50)])  # said once, and no later step fails for it
