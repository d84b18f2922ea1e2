"""The selector table: what each selector and rule costs on a real model, end to end.

Per text: KL divergence and top-1 agreement against full attention on teacher-forced tokens, exact attention mass covered, and the recall gap
to the oracle for one fixed set of queries. Per context with planted facts: how many questions are answered right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvskim.calibration import LayerCalibration, fit_layer
from kvskim.eval.baselines import BASELINES
from kvskim.eval.model import EvalModel
from kvskim.eval.policy import Policy, SelectorPolicy, page_log_mass
from kvskim.eval.texts import Question
from kvskim.layout import PAGE_TOKENS
from kvskim.rules import RuleParameters, apply_rule, combine
from kvskim.selectors import SELECTORS, get_selector

RECALL_BUDGETS = (4, 8, 16, 32, 64)
Log = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A selector, or a baseline of `kvskim.eval.baselines`, with its options, by the name that the table shows."""

    name: str
    selector: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_baseline(self) -> bool:
        return self.selector in BASELINES

    def make(self) -> Any:
        return get_selector(self.selector, **dict(self.options))

    def page_bytes(self, head_dim: int) -> int | None:
        """Bytes stored per page and kv head to choose by; the oracle reads the keys, a baseline has no record of a page."""
        if self.is_baseline:
            return None
        return 2 * PAGE_TOKENS * head_dim if self.selector == "oracle" else self.make().bytes_per_page(head_dim)


DEFAULT_CANDIDATES: tuple[Candidate, ...] = (
    Candidate("oracle", "oracle"),
    Candidate("sketch 256 B", "sketch"),
    Candidate("sketch 128 B", "sketch", (("record_bytes", 128),)),
    Candidate("sketch 192 B", "sketch", (("record_bytes", 192),)),
    Candidate("sketch 384 B", "sketch", (("record_bytes", 384),)),
    Candidate("r8", "r8"),
    Candidate("rki4 rank 8", "rki4"),
    Candidate("rki4 rank 4", "rki4", (("rank", 4),)),
    Candidate("clse rank 2", "clse"),
    Candidate("quad rank 2", "quad"),
    Candidate("minmax", "minmax"),
    Candidate("mean", "mean"),
)
BASELINE_CANDIDATES: tuple[Candidate, ...] = (
    Candidate("ShadowKV", "shadowkv"),
    Candidate("RocketKV", "rocketkv"),
    Candidate("SnapKV", "snapkv"),
    Candidate("R-KV", "rkv"),
    Candidate("TriAttention", "triattention"),
    Candidate("LazyEviction", "lazyeviction"),
)


def rules(budgets: Iterable[int], tau: float | None) -> list[tuple[str, RuleParameters]]:
    named = [(f"{b} pages", RuleParameters(rule="budget", budget_pages=b, min_pages=0)) for b in budgets]
    if tau is not None:
        named.append((f"threshold {tau:g}", RuleParameters(rule="threshold", tau=tau)))
    return named


def calibrate(model: EvalModel, tokens: int, record_bytes: int) -> dict[int, LayerCalibration]:
    """Fit every sparse layer on the prefilled prompt itself; its first page (attention sink) is left out."""
    out = {}
    for layer in model.sparse_layers:
        keys = model.keys[layer][:, PAGE_TOKENS : tokens // PAGE_TOKENS * PAGE_TOKENS]
        positions = torch.arange(PAGE_TOKENS, PAGE_TOKENS + keys.shape[1], device=keys.device)
        out[layer] = fit_layer(
            keys, model.calibration_queries(layer), record_bytes=record_bytes, key_positions=positions, query_positions=model.calibration_positions()
        )
    return out


class TableRun:
    """One prefilled context; calibrations and records are shared by all rules of a selector."""

    def __init__(self, model: EvalModel, ids: list[int], prefix: int, room: int = 128, log: Log = print) -> None:
        self.model, self.prefix, self.log = model, prefix, log
        self.ids = torch.tensor(ids)
        model.reserve(len(ids) + room)
        model.prefill(self.ids[:prefix])
        self.fits: dict[int, dict[int, LayerCalibration]] = {}
        self.made: dict[str, Policy] = {}
        """The first policy of each candidate: it has what all of its budgets share."""

    def tables(self, selector: Any) -> dict[int, Any]:
        size = selector.layout.record_bytes if selector.name == "sketch" else 256
        if size not in self.fits:
            self.fits[size] = calibrate(self.model, self.prefix, size)
        shape = (self.model.num_kv_heads, self.model.head_dim)
        return {layer: selector.tables(*shape, fit).to(self.model.device) for layer, fit in self.fits[size].items()}

    def policy(self, candidate: Candidate, parameters: RuleParameters) -> Policy:
        """The policy of a candidate under a rule; a baseline takes only budgets."""
        first = self.made.get(candidate.name)
        policy: Policy
        if candidate.is_baseline:
            assert parameters.budget_pages is not None
            policy = BASELINES[candidate.selector](parameters.budget_pages * PAGE_TOKENS, measure=True, **dict(candidate.options))
            if first is not None:
                policy.share(first)
        else:
            selector = candidate.make()
            policy = SelectorPolicy(selector, self.tables(selector), parameters)
            if isinstance(first, SelectorPolicy):
                policy.prefix = first.prefix
        policy.prepare(self.model, self.prefix)
        self.made.setdefault(candidate.name, policy)
        return policy

    def rules(self, candidate: Candidate, budgets: Iterable[int], tau: float | None) -> list[tuple[str, RuleParameters]]:
        """The rules that ``candidate`` can follow."""
        return rules(budgets, None if candidate.is_baseline else tau)


def agreement(full: Tensor, sparse: Tensor) -> dict[str, float]:
    """KL(full || sparse) in nats (mean, 95th percentile) and the share of equal most likely tokens."""
    p, q = full.log_softmax(-1), sparse.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return dict(kl=float(kl.mean()), kl_p95=float(kl.quantile(0.95)), top1=float((full.argmax(-1) == sparse.argmax(-1)).float().mean()))


def fidelity(run: TableRun, candidates: Iterable[Candidate], budgets: Iterable[int], tau: float | None) -> list[dict[str, Any]]:
    """KL and covered mass of every candidate under every rule on the tokens after the prefix of ``run``."""
    model, ids, start, stop = run.model, run.ids, run.prefix, len(run.ids)
    full = model.decode(ids, start, stop, None)
    rows = []
    for candidate in candidates:
        for label, parameters in run.rules(candidate, budgets, tau):
            policy = run.policy(candidate, parameters)
            sparse = model.decode(ids, start, stop, policy)
            stats = policy.statistics
            row = dict(candidate=candidate.name, rule=label, pages=stats.mean_pages, covered=stats.mean_covered, **agreement(full, sparse))
            rows.append(row)
            run.log(json.dumps(row))
    return rows


class _Recorder(Policy):
    """A policy that attends everything and keeps what a later choice needs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, list[tuple[Tensor, int, Tensor]]] = {}

    def choose(self, layer: int, queries: Tensor, keys: Tensor, position: int, causal: Tensor) -> Tensor:
        self.blocks.setdefault(layer, []).append((queries.clone(), position, causal.clone()))
        return torch.ones(queries.shape[0], queries.shape[1], -(-keys.shape[1] // PAGE_TOKENS), dtype=torch.bool, device=keys.device)


def recall_gap(run: TableRun, candidates: Iterable[Candidate]) -> dict[str, float]:
    """Mean over `RECALL_BUDGETS`, layers, heads and queries of (oracle recall - recall) of attention mass, in percentage points; of selectors only."""
    model, ids = run.model, run.ids
    recorder = _Recorder()
    model.decode(ids, run.prefix, len(ids), recorder)
    recall: dict[str, Tensor] = {}
    for candidate in candidates:
        if candidate.is_baseline:
            continue
        selector = candidate.make()
        tables = run.tables(selector)
        policy = SelectorPolicy(selector, tables, RuleParameters(rule="budget", budget_pages=8), measure=False)
        total = torch.zeros(len(RECALL_BUDGETS), dtype=torch.float64)
        count = 0
        for layer, blocks in recorder.blocks.items():
            for queries, position, causal in blocks:
                keys = model.keys[layer][:, : causal.shape[1]]
                exact = page_log_mass(queries, keys, causal)
                pages = exact.shape[2]
                mass = exact.softmax(2)
                first, last = policy.sink_pages, pages - policy.window_pages
                records = policy.records(layer, keys, position // PAGE_TOKENS)[first:last]
                scores = selector.score(queries, records, tables[layer])
                forced = torch.cat([exact[:, :, :first], exact[:, :, last:]], 2).logsumexp(2)
                key, estimate, share = combine(scores, torch.zeros_like(forced), forced, "softmax")
                for i, b in enumerate(RECALL_BUDGETS):
                    rule = RuleParameters(rule="budget", budget_pages=b, min_pages=0)
                    chosen = apply_rule(rule, key, estimate, share, pages, policy.sink_pages, policy.window_pages)
                    covered = (mass[:, :, first:last] * chosen[..., None]).sum(2) + mass[:, :, :first].sum(2) + mass[:, :, last:].sum(2)
                    total[i] += float(covered.mean()) * queries.shape[0]
                count += queries.shape[0]
        recall[candidate.name] = total / count
        run.log(f"recall {candidate.name} {recall[candidate.name].tolist()}")
    oracle = recall["oracle"]
    return {name: float((oracle - r).mean() * 100) for name, r in recall.items()}


def retrieval(
    run: TableRun, questions: list[Question], candidates: Iterable[Candidate], budgets: Iterable[int], tau: float | None
) -> list[dict[str, Any]]:
    """Questions about planted facts, question and answer decoded sparsely; right: every token of the answer is the most likely one.

    The question is not part of the prompt: what evicts at the end of the prompt has to do so without knowing it.
    """
    model = run.model
    encode = model.tokenizer
    asked = []
    for q in questions:
        prompt = encode("\n" + q.prompt, add_special_tokens=False).input_ids
        answer = encode(q.answer, add_special_tokens=False).input_ids
        asked.append((torch.cat([run.ids[: run.prefix], torch.tensor(prompt + answer)]), len(answer)))

    def ask(policy: Policy | None) -> int:
        right = 0
        for sequence, length in asked:
            if policy is not None:
                policy.restart()
            logits = model.decode(sequence, run.prefix, len(sequence) - 1, policy)
            right += int((logits[-length:].argmax(-1).cpu() == sequence[-length:]).all())
        return right

    rows = [dict(candidate="full attention", rule="all pages", right=ask(None), asked=len(asked), pages=None)]
    run.log(json.dumps(rows[0]))
    for candidate in candidates:
        for label, parameters in run.rules(candidate, budgets, tau):
            policy = run.policy(candidate, parameters)
            policy.measure = False
            row = dict(candidate=candidate.name, rule=label, right=ask(policy), asked=len(asked), pages=policy.statistics.mean_pages)
            rows.append(row)
            run.log(json.dumps(row))
    return rows


def known_candidates() -> tuple[Candidate, ...]:
    """The default candidates, every other registered selector with its default options, and the baselines."""
    named = {c.selector for c in DEFAULT_CANDIDATES}
    return DEFAULT_CANDIDATES + tuple(Candidate(name, name) for name in SELECTORS if name not in named) + BASELINE_CANDIDATES
