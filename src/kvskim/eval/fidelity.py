"""`kvskim eval fidelity`: how far a model under a selector and a rule is from the same model with full attention, on real text, with no task in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvskim.demo.text import tokenize
from kvskim.errors import KvskimError
from kvskim.eval.answers import ALL_PAGES
from kvskim.eval.generation import first_divergence, greedy
from kvskim.eval.methods import FULL, Calibrations, Method, PromptPolicies, Setting
from kvskim.eval.model import EvalModel, load_named
from kvskim.eval.plots import Point, plot_over_bytes
from kvskim.eval.policy import Policy, PolicyStatistics
from kvskim.eval.probe import EveryPage, Probe
from kvskim.eval.statistics import Interval, mean_interval
from kvskim.rules import RuleParameters

CHARACTERS_A_TOKEN = 12
"""More than any tokenizer here takes for a token of text: bounds what is read of a long text."""
EVERYTHING = Setting(ALL_PAGES, RuleParameters(rule="budget", budget_fraction=1.0))


@dataclass
class Measured:
    """One method under one setting. Lists have one entry for each text window.

    ``kl``: KL divergence of full attention to it, in nats, and ``agree``: same most likely token, for each decoded token. ``divergence``: greedy tokens
    before the first difference. ``missed``, ``error`` ``[layers, Hq]`` and ``gap`` ``[layers, H]``: see `Probe`.
    """

    kl: list[list[float]] = field(default_factory=list)
    agree: list[list[float]] = field(default_factory=list)
    divergence: list[int] = field(default_factory=list)
    missed: list[Tensor] = field(default_factory=list)
    error: list[Tensor] = field(default_factory=list)
    gap: list[Tensor] = field(default_factory=list)
    pages: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)


def text_windows(tokenizer: Any, text: str, tokens: int, count: int, name: str = "the text") -> list[list[int]]:
    """``count`` windows of ``tokens`` tokens, evenly spread over the beginning of a text, each with the model's begin-of-text token.

    They do not overlap where the text is long enough; fewer windows come from a text that has no room for so many different ones.

    Raises:
        KvskimError: the text has less than one window.
    """
    start = [tokenizer.bos_token_id] if getattr(tokenizer, "bos_token_id", None) is not None else []
    wanted = tokens - len(start)
    ids = tokenize(tokenizer, text[: CHARACTERS_A_TOKEN * tokens * count])[: wanted * count]
    if len(ids) < wanted:
        raise KvskimError(f"{name} has {len(ids)} tokens, fewer than the {tokens} of --tokens: give a longer text, or lower --tokens")
    # Two equal windows would count as one more observation.
    offsets = dict.fromkeys(i * (len(ids) - wanted) // max(1, count - 1) for i in range(count))
    return [start + ids[offset : offset + wanted] for offset in offsets]


def divergence_of(full: Tensor, sparse: Tensor) -> tuple[list[float], list[float]]:
    """KL(full || sparse) in nats and whether the most likely tokens are equal, for each row of logits ``[n, vocabulary]``."""
    p, q = full.log_softmax(-1), sparse.log_softmax(-1)
    # Rounding makes a divergence of nothing slightly negative.
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
    return kl.tolist(), (full.argmax(-1) == sparse.argmax(-1)).float().tolist()


Results = dict[tuple[str, str], Measured]
"""By method and setting."""


def measure_window(
    model: EvalModel, ids: Sequence[int], decoded: int, methods: Sequence[Method], settings: Sequence[Setting], calibrations: Calibrations
) -> Results:
    """Prefill a window but its last ``decoded`` tokens and decode those under every policy."""
    results: Results = {}
    if calibrations.needs_text(methods):
        calibrations.read_text(methods)
    sequence = torch.tensor(ids)
    prefix, stop = len(ids) - decoded, len(ids)
    model.reserve(stop)
    model.prefill(sequence[:prefix])
    calibrations.new_prompt()
    full = model.decode(sequence, prefix, stop, None)
    prompt = sequence[: prefix + 1]
    reference = greedy(model, prompt, None, decoded - 1)
    for method, setting, policy in _policies(model, prefix, methods, settings, calibrations):
        probe = Probe(policy, model)
        sparse = model.decode(sequence, prefix, stop, probe)
        kl, agree = divergence_of(full, sparse)
        missed, error, gap = probe.means()
        found = results.setdefault((method, setting), Measured())
        found.kl.append(kl)
        found.agree.append(agree)
        found.missed.append(missed)
        found.error.append(error)
        found.gap.append(gap)
        statistics = policy.statistics
        found.pages.append(statistics.mean_pages)
        found.share.append(statistics.share)
        found.bytes.append(statistics.mean_bytes(model.head_dim))
        policy.restart()
        policy.statistics = PolicyStatistics()
        found.divergence.append(first_divergence(model, prompt, policy, reference))
    return results


def joined(parts: Sequence[Results]) -> Results:
    """The results of several windows as one."""
    out: Results = {}
    for part in parts:
        for key, found in part.items():
            whole = out.setdefault(key, Measured())
            for name, values in vars(found).items():
                getattr(whole, name).extend(values)
    return out


def worker(
    device: str, model: str, dtype: str, decoded: int, methods: Sequence[Method], settings: Sequence[Setting], calibration: str, fitted: Any
) -> Callable[[tuple[str, int, Sequence[int]]], Results]:
    """The ``make`` of a worker process (`kvskim.eval.workers.Setup`), whose jobs are windows: name of the text, number, token ids."""
    loaded = load_named(model, device, dtype)
    calibrations = Calibrations(loaded, calibration, fitted)
    return lambda job: measure_window(loaded, job[2], decoded, methods, settings, calibrations)


def _policies(
    model: EvalModel, tokens: int, methods: Sequence[Method], settings: Sequence[Setting], calibrations: Calibrations
) -> Iterator[tuple[str, str, Policy]]:
    if any(method.name == FULL for method in methods):
        yield FULL, EVERYTHING.label, EveryPage()
    for method, setting, policy in PromptPolicies(model, tokens, calibrations).each(methods, settings):
        yield method.label, setting.label, policy


def run_fidelity(
    model: EvalModel, windows: Mapping[str, Sequence[Sequence[int]]], decoded: int, methods: Sequence[Method], settings: Sequence[Setting],
    calibrations: Calibrations, log: Callable[[str], None] = print, spread: Callable[..., Iterable[tuple[Any, Results]]] | None = None,
) -> dict[str, Any]:
    """Measurements of all methods and settings over all windows, as one JSON-able dict.

    Args:
        model: a loaded model.
        windows: token ids by name of the text, see `text_windows`.
        decoded: tokens at the end of each window that are decoded.
        spread: gives the results of jobs of worker processes (`worker`); None: all windows are measured here.

    Returns:
        ``rows``: see `summary`; beside them the shape of the run.
    """
    start = time.perf_counter()
    jobs = [(name, number, ids) for name, found in windows.items() for number, ids in enumerate(found)]
    measured = spread(jobs) if spread else ((job, measure_window(model, job[2], decoded, methods, settings, calibrations)) for job in jobs)
    parts: dict[tuple[str, int], Results] = {}
    for (name, number, _), part in measured:
        parts[name, number] = part
        done = ", ".join(f"{method} {setting} {sum(m.kl[-1]) / decoded:.4f}" for (method, setting), m in part.items())
        log(f"{name} {number}: KL {done}")
    results = joined([parts[name, number] for name, number, _ in jobs])
    heads = len(model.sparse_layers) * model.num_kv_heads
    return dict(
        texts={name: len(found) for name, found in windows.items()}, tokens=len(next(iter(windows.values()))[0]), decoded=decoded,
        rows=[summary(method, setting, found, model.sparse_layers, heads) for (method, setting), found in results.items()],
        by_text=by_text(parts),
        seconds=round(time.perf_counter() - start, 1),
    )


def by_text(parts: Mapping[tuple[str, int], Results]) -> dict[str, list[dict[str, Any]]]:
    """For each text: mean KL divergence with its interval, and pages, of every method and setting."""
    out: dict[str, list[dict[str, Any]]] = {}
    for name in dict.fromkeys(name for name, _ in parts):
        found = joined([part for (text, _), part in sorted(parts.items()) if text == name])
        out[name] = [
            dict(method=method, setting=setting, kl=mean_interval(m.kl).as_dict(), pages=sum(m.pages) / len(m.pages)) for (method, setting), m in found.items()
        ]
    return out


def summary(method: str, setting: str, found: Measured, layers: Sequence[int], heads: int) -> dict[str, Any]:
    """One row: every mean with its confidence interval over windows and tokens; the worst layer and query head by missed mass; all heads in full."""
    missed, error = torch.stack(found.missed).mean(0), torch.stack(found.error).mean(0)
    worst = int(missed.argmax())
    layer, head = worst // missed.shape[1], worst % missed.shape[1]

    def over_windows(values: Sequence[Tensor]) -> dict[str, float]:
        return mean_interval([[float(value.mean())] for value in values]).as_dict()

    every = torch.tensor([value for window in found.kl for value in window])
    return dict(
        method=method, setting=setting, kl=mean_interval(found.kl).as_dict(), kl_p95=float(every.quantile(0.95)), top1=mean_interval(found.agree).as_dict(),
        divergence=mean_interval([[float(value)] for value in found.divergence]).as_dict(), missed=over_windows(found.missed),
        worst=dict(layer=layers[layer], head=head, missed=float(missed[layer, head]), error=float(error[layer, head])),
        error=over_windows(found.error), oracle_gap=over_windows(found.gap), pages=sum(found.pages) / len(found.pages),
        share=sum(found.share) / len(found.share), bytes_per_step=heads * sum(found.bytes) / len(found.bytes),
        missed_by_layer_and_head={str(layers[i]): row.tolist() for i, row in enumerate(missed)},
        error_by_layer_and_head={str(layers[i]): row.tolist() for i, row in enumerate(error)},
    )


def markdown(result: Mapping[str, Any]) -> str:
    """The rows as a table."""
    steps = result["decoded"] - 1
    out = [
        f"{sum(result['texts'].values())} windows of {result['tokens']} tokens ({', '.join(result['texts'])}), the last {result['decoded']} decoded. "
        f"KL in nats; intervals are 95% bootstrap intervals over windows and tokens; divergence: greedy tokens, of {steps}, before the first that full "
        "attention would not write; missed: attention mass outside the choice; error: relative change of the attention output; gap: mass that as many pages "
        "chosen by exact mass would cover more.",
        "",
        "| method | setting | KL | top-1 % | divergence | missed % | worst head: missed % | error % | gap % | pages | share | KiB per step |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        kl, top1, divergence = (Interval(**row[key]) for key in ("kl", "top1", "divergence"))
        worst = row["worst"]
        out.append(
            f"| {row['method']} | {row['setting']} | {kl.text(4)} | {top1.text(1, 100)} | {divergence.text(0)} | {100 * row['missed']['mean']:.2f} | "
            f"layer {worst['layer']} head {worst['head']}: {100 * worst['missed']:.1f} | {100 * row['error']['mean']:.2f} | "
            f"{100 * row['oracle_gap']['mean']:.2f} | {row['pages']:.1f} | {row['share']:.1%} | {row['bytes_per_step'] / 1024:.0f} |"
        )
    return "\n".join(out) + "\n"


def plot(result: Mapping[str, Any], output: Path) -> None:
    """KL divergence over bytes read per step."""
    lines: dict[str, list[Point]] = {}
    for row in result["rows"]:
        if row["method"] != FULL:
            # A logarithmic axis has no place for zero.
            values = [max(row["kl"][key], 1e-6) for key in ("mean", "low", "high")]
            lines.setdefault(row["method"], []).append(Point(row["bytes_per_step"] / 1024, *values))
    plot_over_bytes(lines, None, output, title=f"Fidelity, {result['tokens']} tokens", label="KL divergence to full attention, nats", log=True)
