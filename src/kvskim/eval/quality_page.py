"""`kvskim eval page`: results of `eval ruler` and `eval fidelity` as one page, with the comparisons that say whether a selector is good enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvskim.eval.answers import ALL_PAGES, Scored, scored_of
from kvskim.eval.methods import FULL
from kvskim.eval.ruler.run import counted, engine_note
from kvskim.eval.score_table import cells_of, means_markdown, tasks_markdown
from kvskim.eval.statistics import Interval, strata_interval

ORACLE = "oracle"
ALLOWED_RATIO = 1.1
"""KL divergence at a budget, over that of the oracle, up to which a selector counts as equal to it."""


MARK = "<!-- Below: written by `kvskim eval page`. -->"
"""What stands above this line of a page is kept when the page is written again."""


def page(kept: str, sections: Sequence[str]) -> str:
    """A page: what a former one says above `MARK`, and the sections below it."""
    head = kept.partition(MARK)[0].strip() or "# Quality"
    return "\n\n".join([head, MARK, *(section.strip() for section in sections)]) + "\n"


def ruler_section(name: str, result: Mapping[str, Any], default: str, compared: str) -> str:
    """Tables of all contexts of one run.

    Args:
        name: of the model.
        result: as `kvskim.eval.ruler.run.run_ruler` gives it, or several as `kvskim.eval.ruler.join.join_runs` joins them.
        default: label of the method whose scores are given by task.
        compared: label of the method that ``default`` is compared with, question by question.
    """
    note = engine_note(result)
    out = [f"## RULER, {name}{', in ' + result['engine'] if note else ''}", "", made_by(result), "", *([note, ""] if note else [])]
    rows = [scored_of(row) for row in result["answers"]]
    for context, numbers in result["tables"].items():
        cells = cells_of(numbers)
        by_task = [cell for cell in cells if cell.method in (FULL, default)]
        out += [f"### {name}, {context} tokens", "", counted(result["counts"][context]), "", means_markdown(cells), tasks_markdown(by_task)]
        for method, other in ((compared, FULL), (ORACLE, FULL), (default, compared), (default, ORACLE)):
            out += differences(f"{method} minus {other}", paired(rows, int(context), method, other))
    return "\n".join(out)


def differences(what: str, found: Mapping[str, Interval]) -> list[str]:
    """One line: a difference at every setting, in points."""
    if not found:
        return []
    return [f"{what}, in points: {', '.join(f'{setting} {interval.text(1, 100)}' for setting, interval in found.items())}.", ""]


def paired(rows: Sequence[Scored], context: int, method: str, other: str) -> dict[str, Interval]:
    """Mean score of ``method`` minus that of ``other`` at every setting that both have, paired by sample; mean of task means. Full attention has them all."""
    scores: dict[tuple[str, str], dict[tuple[str, int], list[float]]] = {}
    for row in rows:
        if row.context_tokens == context:
            scores.setdefault((row.answer.method, row.answer.setting), {}).setdefault((row.task, row.sample), []).append(row.score)
    out = {}
    for (label, setting), mine in scores.items():
        theirs = scores.get((other, ALL_PAGES if other == FULL else setting))
        if label == method and theirs is not None:
            by_task: dict[str, list[float]] = {}
            for place, values in mine.items():
                by_task.setdefault(place[0], []).append((sum(values) - sum(theirs[place])) / len(values))
            out[setting] = strata_interval(list(by_task.values()))
    return out


def fidelity_section(name: str, result: Mapping[str, Any]) -> str:
    """KL divergence of every selector and setting, text by text, and in proportion to the oracle's."""
    texts = list(result["by_text"])
    found = {(text, row["method"], row["setting"]): row for text, rows in result["by_text"].items() for row in rows}
    settings = list(dict.fromkeys(setting for _, method, setting in found if method != FULL))
    methods = list(dict.fromkeys(method for _, method, _ in found if method != FULL))
    windows = ", ".join(f"{count} of {text}" for text, count in result["texts"].items())
    out = [
        f"## Fidelity, {name}", "", made_by(result), "",
        f"KL divergence to full attention in nats, {' / '.join(texts)}; windows of {result['tokens']} tokens ({windows}), the last {result['decoded']} decoded "
        "with the text's own tokens as input. In brackets: in proportion to the oracle, whose pages are chosen by their exact mass.", "",
        "| method | " + " | ".join(settings) + " |", "|---|" + "---|" * len(settings),
    ]
    for method in methods:
        out.append(f"| {method} | " + " | ".join(_kl_text(found, texts, method, setting) for setting in settings) + " |")
    judged = [setting for setting in settings if all((text, ORACLE, setting) in found for text in texts)]
    if judged:
        out.append("")
        for setting in judged:
            good = [m for m in methods if m != ORACLE and all(_ratio(found, text, m, setting) <= ALLOWED_RATIO for text in texts)]
            out.append(f"- {setting}: within {ALLOWED_RATIO} times the oracle on every text: {', '.join(good) or 'none'}.")
    return "\n".join(out) + "\n"


def _ratio(found: Mapping[tuple[str, str, str], Any], text: str, method: str, setting: str) -> float:
    row = found.get((text, method, setting))
    return float("inf") if row is None else row["kl"]["mean"] / max(found[text, ORACLE, setting]["kl"]["mean"], 1e-12)


def _kl_text(found: Mapping[tuple[str, str, str], Any], texts: Sequence[str], method: str, setting: str) -> str:
    if not all((text, method, setting) in found for text in texts):
        return ""
    rows = [found[text, method, setting] for text in texts]
    cell = " / ".join(f"{row['kl']['mean']:.4f}" for row in rows)
    if method != ORACLE and all((text, ORACLE, setting) in found for text in texts):
        cell += " (" + " / ".join(f"{_ratio(found, text, method, setting):.2f}" for text in texts) + ")"
    return cell if setting.endswith("tokens") else cell + ", " + " / ".join(f"{row['pages']:.1f}" for row in rows) + " pages"


def made_by(result: Mapping[str, Any]) -> str:
    """The command that gave a result, and where it ran; of joined results, one paragraph for each."""
    if "runs" in result:
        return "\n\n".join(made_by({**{key: value for key, value in result.items() if key != "runs"}, **run}) for run in result["runs"])
    text = (
        f"`{result['command']}`, {result['date']}: {result['device']}, torch {result['torch']}, {result['dtype']}, {result['layers']} layers, "
        f"{result['kv_heads']} kv heads, head dim {result['head_dim']}; {result['seconds']:.0f} s."
    )
    if "added" in result:
        text += f" {result['added']} samples" + (f"; {result['known']} more are in a run above too, and count as answered there." if result["known"] else ".")
    return text


def without_answers(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a result: its tables, not each answer, and of fidelity no single head."""
    out = {key: value for key, value in result.items() if key != "answers"}
    if "rows" in out:
        out["rows"] = [{key: value for key, value in row.items() if not key.endswith("_by_layer_and_head")} for row in out["rows"]]
    return out
