"""`kvskim eval fidelity --engine vllm`: whole vLLM engines, with full attention and with each selector and rule, write on after the same texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvskim.demo.model import reading_model
from kvskim.engines.vllm.check import compare, run_engine
from kvskim.errors import KvskimError
from kvskim.eval.fidelity import text_windows
from kvskim.eval.methods import FULL, Method, Setting
from kvskim.eval.texts import other_text

WARM_TOKENS = 4096


def engine_settings(method: Method, setting: Setting, calibration: str) -> dict[str, Any]:
    """Settings of kvskim for a selector under a rule."""
    rule = setting.parameters
    settings: dict[str, Any] = {"selector": method.name, "selector_options": dict(method.options), "rule": rule.rule, "calibration": calibration}
    if rule.rule == "budget":
        settings["budget_pages"] = rule.budget_pages
    else:
        settings["tau" if rule.rule == "threshold" else "coverage"] = rule.tau if rule.rule == "threshold" else rule.coverage
    return settings


def check_engine(model: str, methods: Sequence[Method], calibration: str) -> None:
    """Refuse what no engine can do: a baseline or the oracle, a calibration for every prompt, a model that is no directory; or vLLM is not installed.

    Raises:
        KvskimError: one sentence that names the option.
    """
    foreign = [method.label for method in methods if method.is_baseline or method.name == "oracle"]
    if foreign:
        raise KvskimError(f"--selectors has {', '.join(foreign)}; --engine vllm runs kvskim's own selectors only: leave them out, or use transformers")
    if calibration == "prompt":
        raise KvskimError("--calibration is prompt; an engine keeps one calibration for all prompts: use text, or a file of kvskim calibrate")
    if not Path(model).is_dir():
        raise KvskimError(f"--engine vllm needs a Hugging Face model directory, and {model} is none")
    if find_spec("vllm") is None:
        raise KvskimError("vllm is not installed here; install it with: pip install 'kvskim[vllm]'")


def run(
    model: str, texts: Mapping[str, str], *, tokens: int, decoded: int, seeds: int, methods: Sequence[Method], settings: Sequence[Setting], calibration: str,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Agreement of greedy tokens and their log-probabilities with an engine with full attention, and what was attended.

    Args:
        model: a Hugging Face model directory.
        texts: by name.
        tokens: window length; the prompt is all but the last ``decoded`` tokens, and ``decoded`` tokens are written.
        calibration: ``text``: on a built-in text, at the engine's start; else a file.

    Raises:
        KvskimError: a baseline or the oracle, which an engine does not have, a model that is no directory, or an engine that failed.
    """
    check_engine(model, methods, calibration)
    from transformers import AutoTokenizer

    with reading_model(model):
        tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    windows = {name: text_windows(tokenizer, text, tokens, seeds, name) for name, text in texts.items()}
    prompts = [window[: tokens - decoded] for found in windows.values() for window in found]
    warm = text_windows(tokenizer, other_text(), min(WARM_TOKENS, tokens), 1)[0]
    # Room for the steps in which the engine fits its calibration.
    engine = {"model": model, "max_model_len": tokens + 128, "enable_prefix_caching": False}
    log("full attention")
    dense = run_engine(engine, prompts, settings=None, max_tokens=decoded)
    rows = []
    for method in (m for m in methods if m.name != FULL):
        for setting in settings:
            log(f"{method.label} {setting.label}")
            sparse = run_engine(
                engine, prompts, settings=engine_settings(method, setting, "auto" if calibration == "text" else calibration), max_tokens=decoded,
                warm_prompt=warm, activity=True,
            )
            seen = sparse["activity"]
            rows.append(dict(
                method=method.label, setting=setting.label, **asdict(compare(dense, sparse)), share=seen["attended"] / max(1, seen["total"]),
                covered=seen["covered"] / max(1, seen["count"]), ready=sparse["ready"],
            ))
    return dict(device="vLLM", tokens=tokens, decoded=decoded, texts={name: len(found) for name, found in windows.items()}, rows=rows)


def markdown(result: Mapping[str, Any]) -> str:
    """The rows as a table."""
    out = [
        f"Greedy tokens after {sum(result['texts'].values())} prompts of {result['tokens'] - result['decoded']} tokens, {result['decoded']} each, against an "
        "engine with full attention. Equal tokens: before the first difference; log-probability: largest difference before it; mass covered: estimated.",
        "",
        "| method | setting | equal answers | equal tokens | log-probability | pages attended | mass covered |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        calibrated = "" if row["ready"] else " (not calibrated: full attention)"
        out.append(
            f"| {row['method']} | {row['setting']}{calibrated} | {row['equal']}/{row['prompts']} | {row['tokens']:.1%} | {row['logprob']:.3f} | "
            f"{row['share']:.1%} | {row['covered']:.1%} |"
        )
    return "\n".join(out) + "\n"
