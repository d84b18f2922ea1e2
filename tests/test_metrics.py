"""Metrics: the numbers are those of the steps, under Prometheus names, and cost the decode path nothing but host arithmetic."""

from __future__ import annotations

import builtins
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kvskim.metrics import COUNTERS, Sample, SkimMetrics

prometheus_client = pytest.importorskip("prometheus_client")


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


def test_steps_and_rows(registry) -> None:
    metrics = SkimMetrics(registry)
    metrics.step(3, 0, calibrated=False)
    metrics.step(3, 2, calibrated=True)
    metrics.step(0, 4, calibrated=True)
    value = registry.get_sample_value
    assert value("kvskim_sparse_steps_total") == 1
    assert value("kvskim_decode_rows_total") == 6
    assert value("kvskim_dense_rows_total", {"reason": "not_calibrated"}) == 3
    assert value("kvskim_dense_rows_total", {"reason": "several_query_tokens"}) == 6


def test_samples_unsupported_layers_and_calibration(registry) -> None:
    metrics = SkimMetrics(registry)
    metrics.sampled(Sample(10, 40, 1.5, 2, 0))
    metrics.sampled(Sample(6, 6, 2.0, 2, 2))
    metrics.unsupported("kvskim does not score ALiBi position biases: run without kvskim")
    metrics.unsupported("kvskim does not score ALiBi position biases: run without kvskim")
    value = registry.get_sample_value
    assert [value(f"kvskim_{name}_total") for name in ("attended_pages", "pages", "covered_mass", "heads", "full_heads")] == [16, 46, 3.5, 4, 2]
    assert value("kvskim_unsupported_total", {"reason": "kvskim does not score ALiBi position biases"}) == 2
    metrics.calibrated(False)
    assert value("kvskim_calibrated") == 0
    metrics.calibrated(True)
    assert value("kvskim_calibrated") == 1


def test_every_metric_says_what_it_means(registry) -> None:
    SkimMetrics(registry)
    families = {family.name: family.documentation for family in registry.collect()}
    assert set(families) == {f"kvskim_{name}" for name in COUNTERS} | {"kvskim_calibrated"}
    assert all(text.endswith(".") for text in families.values())


def test_without_prometheus_client_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = builtins.__import__

    def missing(name: str, *arguments, **options):
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return genuine(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    metrics = SkimMetrics()
    metrics.step(1, 1, calibrated=False)
    metrics.sampled(Sample(1, 1, 1, 1, 1))
    metrics.unsupported("a reason")
    metrics.calibrated(True)


def test_workers_are_summed_by_a_server_in_another_process(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM: workers count, and the API server's process is scraped."""
    from prometheus_client import CollectorRegistry, multiprocess

    program = """
import sys
from kvskim.metrics import metrics, Sample
metrics().step(2, 0, calibrated=True)
metrics().sampled(Sample(5, 20, 0.5, 1, 0))
metrics().calibrated(sys.argv[1] == "1")
"""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for ready in "10":
        subprocess.run([sys.executable, "-c", program, ready], check=True)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    assert registry.get_sample_value("kvskim_sparse_steps_total") == 2
    assert registry.get_sample_value("kvskim_pages_total") == 40
    assert registry.get_sample_value("kvskim_calibrated") == 0


def layer(heads: int, counts: list[list[int]], covered: list[list[float]]) -> SimpleNamespace:
    spare = [[99] * heads]
    return SimpleNamespace(
        tier=None,
        num_kv_heads=heads, counts=torch.tensor(counts + spare, dtype=torch.int32), covered=torch.tensor(covered + spare, dtype=torch.float32)
    )


def test_sums_are_those_of_the_live_rows() -> None:
    sampler = pytest.importorskip("kvskim.engines.vllm.sampler")
    lengths = torch.tensor([160, 0, 33], dtype=torch.int32)
    layers = [
        layer(2, [[4, 10], [7, 7], [3, 2]], [[0.5, 1.0], [torch.nan, 9.0], [torch.nan, 0.75]]),
        layer(1, [[5], [0], [3]], [[0.25], [0.0], [1.0]]),
    ]
    # Pages: 10 and 3 for two kv heads, then for one. A mass that is no number counts as none: counters never forget it.
    assert sampler.sums(layers, lengths).tolist() == [4 + 10 + 3 + 2 + 5 + 3, 3 * 13, 3.5, 6, 3]


def test_a_step_is_sampled_every_few_seconds_with_its_own_lengths() -> None:
    sampler = pytest.importorskip("kvskim.engines.vllm.sampler")
    now = 0.0
    seen: list[Sample] = []
    only = layer(1, [[0]], [[0.0]])
    lengths = torch.zeros(1, dtype=torch.int32)
    sampled = sampler.ActivitySampler([only], torch.device("cpu"), SimpleNamespace(sampled=seen.append), lambda: now)

    def step(length: int, attended: int) -> None:
        # vLLM writes the lengths of every step to the same place.
        lengths[0] = length
        sampled.before_step(lengths)
        only.counts[0, 0], only.covered[0, 0] = attended, 0.5

    for number in range(6):
        step(160 + 16 * number, 4 + number)
    assert seen == [Sample(4, 10, 0.5, 1, 0)]
    now = sampler.SAMPLE_SECONDS
    sampled.before_step(None)
    step(320, 6)
    step(336, 7)
    step(352, 8)
    assert seen[1:] == [Sample(6, 20, 0.5, 1, 0)]


def test_a_sample_waits_for_its_copy_and_the_step_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = pytest.importorskip("kvskim.engines.vllm.sampler")
    now = 0.0
    seen: list[Sample] = []
    sampled = sampler.ActivitySampler([layer(1, [[4]], [[0.5]])], torch.device("cpu"), SimpleNamespace(sampled=seen.append), lambda: now)
    copied = SimpleNamespace(done=False, query=lambda: copied.done, record=lambda: None)
    sampled._copied = copied
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    lengths = torch.tensor([160], dtype=torch.int32)
    now = 100.0
    for _ in range(4):
        sampled.before_step(lengths)
    assert seen == []
    copied.done = True
    sampled.before_step(lengths)
    assert seen == [Sample(4, 10, 0.5, 1, 0)]
