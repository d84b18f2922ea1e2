"""`kvskim eval selectors`: run the selector table on a model and write it as Markdown and JSON."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvskim.eval import texts
from kvskim.eval.model import EvalModel
from kvskim.eval.selector_table import TableRun, fidelity, known_candidates, recall_gap, retrieval
from kvskim.rules.parameters import DEFAULT_TAU, DEFAULT_WINDOW_PAGES

NEEDLE_TOKENS = 6144
NOTHING = "-"
"""A cell of the table that a row does not have."""


def run_table(
    model: EvalModel, *, tokens: int = 8192, decoded: int = 128, budgets: Sequence[int] = (8, 16, 32), tau: float = DEFAULT_TAU,
    needle_tokens: int = NEEDLE_TOKENS, seeds: int = 2, only: Sequence[str] = (), baselines: bool = False, log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All measurements of the table as one JSON-able dict.

    Args:
        model: a loaded model.
        tokens: length of the prose and code texts; the last ``decoded`` tokens are decoded sparsely.
        budgets: pages of the fixed budgets, sink and window pages counted.
        tau: threshold of the threshold rule.
        needle_tokens: length of the contexts with planted facts (12 questions each).
        seeds: number of such contexts.
        only: names of candidates to run; empty for all selectors. The oracle always runs.
        baselines: run the published methods too, named in ``only`` or not.
    """
    candidates = [c for c in known_candidates() if c.name == "oracle" or c.name in only or (baselines if c.is_baseline else not only)]
    shape = (model.num_kv_heads, model.head_dim)
    result: dict[str, Any] = dict(
        tokens=tokens, decoded=decoded, budgets=list(budgets), tau=tau, needle_tokens=needle_tokens, seeds=seeds,
        torch=torch.__version__, device=_device_name(model), layers=model.num_layers, kv_heads=shape[0], head_dim=shape[1],
        bytes={c.name: c.page_bytes(shape[1]) for c in candidates},
        fidelity={}, recall_gap={}, retrieval=[],
    )
    start = time.time()
    for name, text in (("prose", texts.prose()), ("code", texts.code())):
        ids = texts.token_ids(model.tokenizer, text, tokens)
        run = TableRun(model, ids, (tokens - decoded) // 16 * 16, log=log)
        result["recall_gap"][name] = recall_gap(run, candidates)
        result["fidelity"][name] = fidelity(run, candidates, budgets, tau)
    for seed in range(seeds):
        ids, questions = texts.planted_facts(model.tokenizer, needle_tokens, seed)
        run = TableRun(model, ids, len(ids) // 16 * 16, log=log)
        result["retrieval"].append(retrieval(run, questions, candidates, budgets, tau))
    result["seconds"] = round(time.time() - start, 1)
    return result


def _device_name(model: EvalModel) -> str:
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    return f"CPU ({platform.machine()})"


def markdown(result: dict[str, Any]) -> str:
    """The table as Markdown: one row per selector, KL over prose and code, and questions answered, by rule."""
    labels = [f"{b} pages" for b in result["budgets"]] + [f"threshold {result['tau']:g}"]
    kl: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rows in result["fidelity"].values():
        for row in rows:
            kl.setdefault((row["candidate"], row["rule"]), []).append(row)
    right: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rows in result["retrieval"]:
        for row in rows:
            right.setdefault((row["candidate"], row["rule"]), []).append(row)
    full = right[("full attention", "all pages")]
    asked = sum(r["asked"] for r in full)
    out = [
        f"KL divergence to full attention in nats, prose / code ({result['decoded']} tokens after {result['tokens'] - result['decoded']}), with the mean pages "
        "attended for the threshold rule and for baselines (16 tokens are a page); recall gap to the oracle in percentage points (prose / code, mean over "
        "4 to 64 pages).",
        "",
        "| selector | bytes per page | recall gap | " + " | ".join(f"KL, {label}" for label in labels) + " |",
        "|---|---|---|" + "---|" * len(labels),
    ]
    for name, size in result["bytes"].items():
        # A baseline has no record of a page, and follows budgets only.
        gap = " / ".join(f"{gaps[name]:.2f}" if name in gaps else NOTHING for gaps in result["recall_gap"].values())
        cells = []
        for label in labels:
            rows = kl.get((name, label), [])
            cell = " / ".join(f"{r['kl']:.4f}" for r in rows) or NOTHING
            if rows and (size is None or label.startswith("threshold")):
                cell += " (" + " / ".join(f"{r['pages']:.1f}" for r in rows) + " pages)"
            cells.append(cell)
        out.append(f"| {name} | {NOTHING if size is None else size} | {gap} | " + " | ".join(cells) + " |")
    out += [
        "",
        f"Questions about planted facts answered right, of {asked} ({result['seeds']} contexts of {result['needle_tokens']} tokens; full attention: "
        f"{sum(r['right'] for r in full)}). The question comes after the prompt: methods that evict at its end did so without knowing it.",
        "",
        "| selector | " + " | ".join(labels) + " |",
        "|---|" + "---|" * len(labels),
    ]
    for name, size in result["bytes"].items():
        cells = []
        for label in labels:
            rows = right.get((name, label), [])
            cell = str(sum(r["right"] for r in rows)) if rows else NOTHING
            if rows and (size is None or label.startswith("threshold")):
                cell += f" ({sum(r['pages'] for r in rows) / len(rows):.1f} pages)"
            cells.append(cell)
        out.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def write(result: dict[str, Any], json_path: Path | None, markdown_path: Path | None, command: str, date: str) -> None:
    """Write the raw numbers and the page for docs/benchmarks."""
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    if markdown_path is not None:
        head = (
            f"# Selectors on a real model\n\nMade by `{command}` on {date}: {result['device']}, torch {result['torch']}, {result['layers']} layers, "
            f"{result['kv_heads']} kv heads, head dim {result['head_dim']}. Every selector is calibrated on the prompt itself; every sparse layer selects "
            f"for every decoded token; the first page and the last {DEFAULT_WINDOW_PAGES} are always attended. Raw numbers: the JSON file beside this page.\n\n"
        )
        markdown_path.write_text(head + markdown(result))
