"""What the GPU scripts compare engines with: two are told apart in the step and layer where they first differ, and all score with the same kernels."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvskim.ops.score import fills_pieces, scorer
from kvskim.selectors import get_selector
from kvskim.tier.pages import make_tier

LAYERS, HEADS = 3, 2


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("tier_trace")


def load(name: str) -> ModuleType:
    folder = Path(__file__).parent / "gpu/vllm"
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def engine(seed: int = 0) -> tuple[Any, Any]:
    """A scheduler with three requests, one of which waits, and the state of three layers."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for index in range(LAYERS):
        cache = torch.randn(6, 16, HEADS, 4, generator=generator).to(torch.bfloat16)
        records = torch.randint(0, 256, (6, HEADS, 10), dtype=torch.uint8, generator=generator)
        layers[str(index)] = SimpleNamespace(
            name=str(index), tier=None, records=SimpleNamespace(records=records), covered=torch.rand(8, HEADS, generator=generator),
            caches=lambda cache=cache: (cache, None),
        )
    blocks = {"a": [1, 2], "b": [3, 5]}
    name = {key: f"{'f' * 32}-{number:06d}" for key, number in (("a", 7), ("b", 4), ("c", 5))}
    requests = {name[key]: SimpleNamespace(num_computed_tokens=tokens) for key, tokens in (("a", 17), ("b", 20), ("c", 0))}
    manager = SimpleNamespace(get_block_ids=lambda key: (next(blocks[k] for k, full in name.items() if full == key),))
    scheduler = SimpleNamespace(requests=requests, kv_cache_manager=manager)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))))
    return llm, SimpleNamespace(layers=layers, last_lengths=torch.tensor([20, 17, 0], dtype=torch.int32))


def traces(script: ModuleType, change: Any = None) -> list[Any]:
    result = []
    for which in range(2):
        llm, state = engine()
        trace = script.Trace(llm, state)
        trace.after_step()
        if which == 0 and change is not None:
            change(llm, state)
        trace.after_step()
        result.append(trace.steps)
    return result


def test_equal_engines_do_not_differ(script: ModuleType) -> None:
    own, reference = traces(script)
    assert script.compare(own, reference) is None
    assert own[1]["requests"].tolist() == [[4, 20], [7, 17]]
    assert script.compare(own, reference[:1]) == "2 steps, and 1"


def change_key(llm: Any, state: Any) -> None:
    state.layers["2"].caches()[0][2, 0, 1, 3] += 1  # token 16 of request a


def change_mass(llm: Any, state: Any) -> None:
    state.layers["1"].covered[1, 1] = 0.25
    state.layers["2"].caches()[0][2, 0, 1, 3] += 1


def change_record(llm: Any, state: Any) -> None:
    state.layers["0"].records.records[3, 1, 2] ^= 4
    state.layers["1"].covered[1, 1] = 0.25


def change_schedule(llm: Any, state: Any) -> None:
    next(iter(llm.llm_engine.engine_core.engine_core.scheduler.requests.values())).num_computed_tokens = 18


@pytest.mark.parametrize(("change", "said"), [
    (change_key, "step 1 (2 requests, 2 of them decoded) first, in layer 2: the newest keys of 1 requests: prompts 7 (17 tokens)"),
    (change_mass, "in layer 1: 1 masses: of row 1 (17 tokens), kv head 1, 0.25 and 0."),
    (change_record, "in layer 0: records"),
    (change_schedule, "step 1 has other requests or tokens"),
])
def test_the_first_difference_is_named(script: ModuleType, change: Any, said: str) -> None:
    assert said in script.compare(*traces(script, change))


def test_a_row_that_only_fills_a_graph_or_a_key_behind_the_newest_is_no_difference(script: ModuleType) -> None:
    def change(llm: Any, state: Any) -> None:
        state.layers["1"].covered[5] += 1
        state.layers["1"].caches()[0][2, 1] += 1

    assert script.compare(*traces(script, change)) is None


def test_copies_in_use_that_the_host_does_not_have_are_counted(script: ModuleType) -> None:
    tier = make_tier(torch.randn(5, 2, 2, 16, 8), 6, "cpu")
    for slot, (key, stamp) in enumerate(((3, 8), (9, 8), (4, 7))):
        tier.owner[slot], tier.stamp[slot] = key, stamp
        tier.directory.view(-1)[key] = slot + 1
        tier.hot[slot] = tier.host.view(-1, 2, 16, 8)[key]
    tier.clock.fill_(9)
    assert int(script.untrue_in_use(tier, tier.host)) == 0
    tier.hot[2] += 1  # not used by the last fetch
    assert int(script.untrue_in_use(tier, tier.host)) == 0
    tier.hot[1, 1, 3, 3] += 1
    assert int(script.untrue_in_use(tier, tier.host)) == 1
    tier.directory.view(-1)[3] = 0
    assert int(script.untrue_in_use(tier, tier.host)) == 2


@pytest.mark.parametrize("rule", ["few pages", "all pages"])
def test_the_number_of_blocks_does_not_decide_which_kernels_score(rule: str) -> None:
    """SmolLM2 has three kv heads of three query heads, and 64 channels. With other kernels engines select other pages now and then."""
    selector = get_selector(load("tier").RULES[rule]["selector"])
    assert scorer(selector, "cuda", 64, 3, torch.bfloat16) == "cuda"
    assert not selector.needs_calibration
    for blocks in (1500, 20775, 34952, 37428):
        assert fills_pieces(torch.empty(blocks, 3, selector.record_bytes(64), dtype=torch.uint8))
    assert not fills_pieces(torch.empty(20775, 3, get_selector("rki4").record_bytes(64), dtype=torch.uint8))
