"""The random model of `gpu/vllm/parallel.py` can tell a wrong calibration on two GPUs from their rounding; a CPU stands for both."""

import copy
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from kvskim.calibration import SKETCH_TENSORS, LayerCalibration
from kvskim.config import load_config

transformers = pytest.importorskip("transformers")

STEPS = 16
PROMPT = 2800
"""Tokens: long enough that the rule leaves nine pages of ten away."""
LIMITS = Namespace(slack=0.25, lead=0.5, pages=0.05)
"""The defaults of the script."""


@pytest.fixture(scope="module")
def scripts():
    """The modules `parallel` and `parallel_models`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent / "gpu/vllm")
        import parallel
        import parallel_models
    return parallel, parallel_models


@pytest.fixture(scope="module")
def host(scripts, tmp_path_factory):
    """The model in transformers with a calibration fitted on other text than the prompt, its float16 rounding, and the calibration."""
    from kvskim.engines.transformers import enable

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("two")
    scripts[1].random_llama(folder, 2, layers=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setenv("KVSKIM_CACHE_DIR", str(folder))
        host = enable(model, load_config({"full_pages": 0, "kernels": "torch"}).config)
        cache, _ = prefill(host, scripts[1].random_text(41_200)[40_000:])
        return host, host.fit_calibration([cache])


def prefill(host, ids, gpus=1):
    """Cache and last logits of a prompt."""
    cache = transformers.DynamicCache()
    return cache, forward(host, ids, cache, gpus)


def forward(host, ids, cache, gpus):
    """Logits ``[vocabulary]`` of the last token in float32, where the output of every matrix is rounded to float16 as ``gpus`` GPUs do."""
    from kvskim.engines.transformers import cache_keyword

    def rounded(module, inputs, output):
        return output.half().float()

    def all_reduced(module, inputs, output):
        parts = zip(inputs[0].chunk(gpus, -1), module.weight.chunk(gpus, 1))
        return sum(torch.nn.functional.linear(x, weight).half() for x, weight in parts).float()

    hooks = [
        module.register_forward_hook(all_reduced if name.endswith(("o_proj", "down_proj")) else rounded)
        for name, module in host.model.named_modules() if isinstance(module, torch.nn.Linear)
    ]
    try:
        return host.model(torch.tensor([ids]), **{cache_keyword(host.model): cache}, logits_to_keep=1).logits[0, -1]
    finally:
        for hook in hooks:
            hook.remove()


def decode(host, calibration, prefilled, gpus, log):
    """What `run_engine` returns of one prompt."""
    from kvskim.engines.vllm.check import LIKELIEST
    from kvskim.engines.vllm.report import Activity

    for layer in host.layers():
        layer.calibration, layer.settings = calibration[layer.index], None
    host.reset_statistics()
    cache, logits = copy.deepcopy(prefilled)
    found = {"tokens": [], "logprobs": [], "likeliest": []}
    for _ in range(STEPS):
        best = logits.log_softmax(-1).topk(LIKELIEST)
        found["tokens"].append(int(best.indices[0]))
        found["logprobs"].append(float(best.values[0]))
        found["likeliest"].append({str(int(token)): float(value) for value, token in zip(*best)})
        logits = forward(host, found["tokens"][-1:], cache, gpus)
    seen = host.statistics()
    activity = Activity(attended=seen.pages_attended, total=seen.pages_total)
    return {"outputs": [found], "activity": asdict(activity), "ready": True, "log": ["in vLLM, variant fast", log]}


def heads(layer: LayerCalibration, order: list[int]) -> LayerCalibration:
    """The calibration of a layer with its kv heads in another order."""
    tables = {name: getattr(layer.sketch, name)[order] for name in ("mean", *SKETCH_TENSORS)}
    return replace(layer, mean=layer.mean[order], sketch=replace(layer.sketch, **tables))


@torch.inference_mode()
def test_rounding_of_two_gpus_passes_and_a_wrong_calibration_does_not(scripts, host):
    parallel, models = scripts
    host, calibration = host
    text = models.random_text(PROMPT)
    prefilled = {gpus: prefill(host, text, gpus) for gpus in (1, 2)}
    machine = parallel.Machine({}, Path(), {}, STEPS, "torch")
    machine.results["two rule"] = decode(host, calibration.layers, prefilled[1], 1, "calibration: kept in")
    assert parallel.share(machine.results["two rule"]) < 0.1
    (run,) = [run for run in parallel.RUNS if run.name == "two TP=2 rule"]
    for order, right in (([0, 1], True), ([1, 0], False), ([0, 0], False)):
        layers = {index: heads(layer, order) for index, layer in calibration.layers.items()}
        machine.results[run.name] = decode(host, layers, prefilled[2], 2, "(made with")
        agreement, _, wrong = parallel.faults(machine, run, LIMITS)
        if right:
            assert not wrong
            assert agreement.logprob > 0, "nothing was rounded in another way"
        else:
            assert any("of the tokens" in fault for fault in wrong), (order, agreement, wrong)


def test_some_of_the_runs_take_with_them_what_they_are_compared_with_and_whose_calibration_they_use(scripts):
    parallel, _ = scripts
    assert parallel.chosen([]) == parallel.RUNS
    assert {run.name for run in parallel.chosen(["one all pages"])} == {"one all pages, file of TP=2", "one TP=2 all pages, own fit", "one dense"}
    assert {run.name for run in parallel.chosen(["again", "two dense"])} == {
        "smollm2 TP=2 rule, again", "smollm2 TP=2 rule, own fit", "smollm2 rule", "smollm2 dense", parallel.NOISE, "two dense",
    }
    with pytest.raises(ValueError, match="--only is 'three', which is in the name of no run; use words of smollm2 rule, "):
        parallel.chosen(["two", "three"])
