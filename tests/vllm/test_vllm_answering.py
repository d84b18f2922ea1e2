"""An engine that answers under one rule after the other: what a change of the rule changes, what is measured, how answers end."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from mini_engine import MiniEngine, Request
from vllm.config import CUDAGraphMode

from kvskim.engines.vllm import answering, probe
from kvskim.engines.vllm.answering import RESERVED_BYTES, SETTLED_STEPS, AnsweringEngine, cache_bytes
from kvskim.errors import KvskimError, UnsupportedError
from kvskim.eval.fidelity_vllm import engine_settings
from kvskim.eval.methods import parse_methods, settings_of
from kvskim.eval.ruler.engine import largest_table
from kvskim.rules import RuleParameters

pytestmark = pytest.mark.usefixtures("quiet")

STOP = 9


def budget(pages):
    return RuleParameters(rule="budget", budget_pages=pages, min_pages=0)


class PlayedLLM:
    """`vllm.LLM` around a `MiniEngine`: prompts are read in one step, then a step writes one token of each. ``cached``: of each prompt.

    The n-th token that follows a prompt is ``script[n]``, and then 5; the first token of a prompt is its seed.
    """

    def __init__(self, mini, script=(), suffix="", cached=0):
        self.mini, self.script, self.suffix, self.cached = mini, list(script), suffix, cached
        self.waiting, self.running, self.aborted, self.parameters = [], {}, [], []
        self.llm_engine = self
        self.vllm_config = mini.config

    def add_request(self, name, prompt, parameters):
        ids = prompt["prompt_token_ids"]
        self.parameters.append(parameters)
        self.waiting.append((name, Request(ids[0]), len(ids), parameters))

    def has_unfinished_requests(self):
        return bool(self.waiting or self.running)

    def abort_request(self, names):
        self.aborted += names
        for name in names:
            self.mini.release(self.running.pop(name)[0])

    def step(self):
        if self.waiting:
            self.mini.step([(request, count) for _, request, count, _ in self.waiting])
            stepped = [(name, (request, [], parameters)) for name, request, _, parameters in self.waiting]
            self.running.update(stepped)
            self.waiting = []
        else:
            stepped = list(self.running.items())
            self.mini.step([(request, 1) for _, (request, _, _) in stepped])
        out = []
        for name, (request, tokens, parameters) in stepped:
            tokens.append(self.script[len(tokens)] if len(tokens) < len(self.script) else 5)
            finished = len(tokens) == parameters["max_tokens"] or tokens[-1] in parameters["stop_token_ids"]
            if finished:
                self.mini.release(request)
                del self.running[name]
            completion = SimpleNamespace(token_ids=tokens)
            out.append(SimpleNamespace(request_id=name + self.suffix, outputs=[completion], finished=finished, num_cached_tokens=self.cached))
        return out


def engine_of(settings, **more):
    mini = MiniEngine({"selector": "mean", "full_pages": 0, **settings})
    return AnsweringEngine(PlayedLLM(mini, **more), dict, [STOP]), mini


def stepped(mini):
    """Pages attended, and the output, of one decode step after 400 tokens."""
    request = Request(3)
    mini.step([(request, 400)])
    (out,) = mini.step([(request, 1)])
    counts = [layer.counts[:1].clone() for layer in mini.state.layers.values()]
    mini.release(request)
    return torch.stack(counts), torch.stack(out)


def test_another_rule_selects_what_an_engine_with_that_rule_selects():
    changing = MiniEngine({"selector": "mean", "full_pages": 0, "rule": "threshold", "tau": 0.007})
    first, _ = stepped(changing)
    for rule, settings in [
        (budget(5), {"rule": "budget", "budget_pages": 5}), (RuleParameters(tau=0.2), {"rule": "threshold", "tau": 0.2}),
        (RuleParameters(rule="coverage", coverage=0.5), {"rule": "coverage", "coverage": 0.5}), (RuleParameters(tau=0.007), {"tau": 0.007}),
    ]:
        changing.state.use_rule(rule)
        counts, out = stepped(changing)
        expected_counts, expected = stepped(MiniEngine({"selector": "mean", "full_pages": 0, **settings}))
        assert torch.equal(counts, expected_counts)
        assert torch.equal(out, expected)
    assert torch.equal(counts, first)
    changing.state.use_rule(budget(5))
    assert (stepped(changing)[0] == 5).all()


@pytest.mark.parametrize("taus", [[0.05, 0.02, 0.015], [0.015, 0.02, 0.05], [0.009, 0.008], [0.02]])
def test_an_engine_has_room_for_every_threshold_of_a_run(taus):
    """The mini engine's requests have up to 128 pages, which tables for 0.009 do not hold and those for 0.008 do."""
    settings = settings_of("budget,threshold", [5], taus, 0.95)
    mini = MiniEngine({**engine_settings(parse_methods("mean")[0], largest_table(settings), "auto"), "full_pages": 0})
    assert {workspace.table_capacity for workspace in mini.state.workspaces.values()} == {min(128, int(1 / min(taus)) + 4)}
    read = []
    for setting in settings:
        mini.state.use_rule(setting.parameters)
        read.append(stepped(mini)[0])
        alone, _ = stepped(MiniEngine({**engine_settings(parse_methods("mean")[0], setting, "auto"), "full_pages": 0}))
        assert torch.equal(read[-1], alone)
    by_tau = [counts for _, counts in sorted(zip(taus, read[1:]), key=lambda found: found[0], reverse=True)]
    assert all((more >= fewer).all() for fewer, more in pairwise(by_tau))


def test_an_engine_that_was_started_with_a_larger_threshold_refuses_a_smaller_one():
    mini = MiniEngine({"selector": "mean", "full_pages": 0, "tau": 0.05})
    with pytest.raises(UnsupportedError, match=r"mass >= 0.02, .*it needs page tables of 54 pages, and this engine was started with room for 24; start it"):
        mini.state.use_rule(RuleParameters(tau=0.02))


def test_a_rule_that_does_not_fit_is_refused_and_changes_nothing():
    mini = MiniEngine({"selector": "mean", "full_pages": 0, "rule": "budget", "budget_pages": 6})
    with pytest.raises(UnsupportedError, match=r"'budget: 7 pages': it needs page tables of 7 pages, and this engine was started with room for 6; start it"):
        mini.state.use_rule(budget(7))
    assert (stepped(mini)[0] == 6).all()
    mini.config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    with pytest.raises(UnsupportedError, match=r"can't be changed with cudagraph_mode PIECEWISE: .* start the engine with enforce_eager"):
        mini.state.use_rule(budget(5))
    assert (stepped(mini)[0] == 6).all()
    mini.config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    mini.state.use_rule(budget(5))
    assert (stepped(mini)[0] == 5).all()


def test_what_decode_steps_read_is_measured_and_nothing_else():
    engine, _ = engine_of({"rule": "budget", "budget_pages": 9}, suffix="-internal", cached=96)
    prompts = [[1] * 100, [2] * 200]
    for pages in (4, 9, 5):
        engine.use_rule(budget(pages))
        found = engine.answer(prompts, [4, 3])
        assert found.tokens == [[5] * 4, [5] * 3]
        # Decode steps read 101, 102, 103 and 201, 202 tokens: 7 pages three times, 13 twice.
        total = (3 * 7 + 2 * 13) / 5
        attended = (3 * min(7, pages) + 2 * pages) / 5
        assert (found.read.pages, found.read.total) == (pytest.approx(attended), pytest.approx(total))
        assert (found.prompt_tokens, found.cached_tokens) == (300, 192)
    engine.use_rule(budget(4), whole=True)
    found = engine.answer(prompts, [4, 3])
    assert found.read.pages == found.read.total == pytest.approx(total)
    # Tokens of prefills alone: there was no decode step.
    assert engine.answer(prompts, [1, 1]).read is None


def test_answers_end_at_stop_tokens_limits_and_where_they_are_settled():
    engine, _ = engine_of({}, script=[1, 2, STOP])
    assert engine.answer([[1] * 40, [2] * 40], [10, 2]).tokens == [[1, 2, STOP], [1, 2]]
    assert engine.llm.parameters[0] == dict(temperature=0, max_tokens=10, stop_token_ids=[STOP], ignore_eos=True, detokenize=False)
    engine, mini = engine_of({}, script=range(10, 40))
    asked = []

    def settled(index, tokens):
        asked.append((index, len(tokens)))
        return index == 1 and 12 in tokens

    found = engine.answer([[1] * 40, [2] * 40], [2 * SETTLED_STEPS + 1, 30], settled)
    assert found.tokens == [list(range(10, 10 + 2 * SETTLED_STEPS + 1)), list(range(10, 10 + SETTLED_STEPS))]
    assert asked == [(0, SETTLED_STEPS), (1, SETTLED_STEPS), (0, 2 * SETTLED_STEPS)]
    assert len(engine.llm.aborted) == 1
    assert len(mini.free) == 159


def test_without_sparse_layers_there_is_no_rule_and_nothing_is_measured():
    engine, mini = engine_of({})
    mini.config.compilation_config.static_forward_context.clear()
    mini.step = lambda scheduled: None
    mini.release = lambda request: None
    engine.use_rule(budget(4))
    found = engine.answer([[1] * 40], [3])
    assert (found.tokens, found.read) == ([[5, 5, 5]], None)


def test_capacity_of_the_cache():
    engine, mini = engine_of({})
    mini.config.cache_config.num_gpu_blocks = 100
    assert (engine.capacity, engine.block_size) == (1600, 16)
    mini.config.cache_config.kv_cache_size_tokens = 1590
    assert engine.capacity == 1590


def test_memory_of_an_engine():
    total, weights = 140 << 30, 1 << 30
    assert cache_bytes(0.5, weights, total) == (70 << 30) - weights - RESERVED_BYTES
    with pytest.raises(KvskimError, match=r"2.0% of 140 GiB is not enough for an engine with 1.0 GiB of weights: let fewer engines share a GPU"):
        cache_bytes(0.02, weights, total)


@pytest.mark.parametrize("settings", [None, {"selector": "mean"}])
def test_an_engine_is_started_eagerly_with_a_prefix_cache_of_its_share(settings, monkeypatch, tmp_path):
    given = {}
    played = engine_of({})[0].llm
    monkeypatch.setattr(sys.modules["vllm"], "LLM", lambda **arguments: given.update(arguments) or played, raising=False)
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", dict, raising=False)
    monkeypatch.setattr(answering, "attention_backend", lambda model, asked: ("backend", asked))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(total_memory=140 << 30))
    engine = answering.start(str(tmp_path), settings, longest=4096, rows=64, step_tokens=16384, share=0.25, weights=1 << 30, stop=[STOP])
    assert engine.llm is played
    assert given["kv_cache_memory_bytes"] == cache_bytes(0.25, 1 << 30, 140 << 30)
    assert given["attention_backend"] == ("backend", settings)
    assert (given["enforce_eager"], given["enable_prefix_caching"], given["async_scheduling"]) == (True, True, False)
    assert (given["max_model_len"], given["max_num_seqs"], given["max_num_batched_tokens"]) == (4096, 64, 16384)
    assert given.get("additional_config") == (None if settings is None else {"kvskim": settings})


def test_an_engine_that_would_attend_everything_is_refused():
    engine, mini = engine_of({})
    answering.check_sparse(engine.llm)
    mini.state.ready.fill_(0)
    with pytest.raises(KvskimError, match=r"^this engine has no calibration, so its answers would be those of full attention"):
        answering.check_sparse(engine.llm)
    mini.config.compilation_config.static_forward_context.clear()
    with pytest.raises(KvskimError, match=r"^no layer of this engine is sparse"):
        answering.check_sparse(engine.llm)


def test_the_rule_is_reached_through_the_probe():
    engine, mini = engine_of({"rule": "budget", "budget_pages": 9})
    probe.use_rule(engine.llm, budget(5))
    assert (stepped(mini)[0] == 5).all()
