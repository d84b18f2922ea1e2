"""What the scripts of this folder share: the model folder, prompts, graph modes."""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
    # Nothing is compiled, which takes most of an engine's start; steps of decode rows alone are graphs all the same.
    "decode": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
}


def parser(doc: str) -> argparse.ArgumentParser:
    """The arguments that all scripts have."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", required=True, help="Hugging Face folder of SmolLM2-135M (see convert.py)")
    result.add_argument("--kernels", default="auto", choices=["auto", "cuda", "triton", "torch"])
    return result


def engine(model: str, mode: str = "full", **more: Any) -> dict[str, Any]:
    """Arguments of vllm.LLM."""
    common: dict[str, Any] = dict(max_model_len=8192, max_num_seqs=32, disable_log_stats=True, seed=0)
    # A cache of fixed size: several of these scripts may run on one GPU at once.
    return dict(model=model, gpu_memory_utilization=0.15, kv_cache_memory_bytes=8 << 30, **common, **MODES[mode], **more)


def text_ids(model: str) -> list[int]:
    """Token ids of the built-in text: prose, then code."""
    from transformers import AutoTokenizer

    from kvskim.demo.text import code_text, reference_text, tokenize

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    return tokenize(tokenizer, reference_text() + "\n\n" + code_text())


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns of text."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [header, *rows])


def ended(name: str, process: subprocess.Popen[bytes], result: Path, log: Path, seconds: float, problems: list[str]) -> Any | None:
    """What an engine in a process of its own has written to ``result``; None, and one problem more, where it failed or was not done in time."""
    try:
        process.wait(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.returncode == 0 and result.is_file():
        return json.loads(result.read_text())
    problems.append(f"the engine '{name}' failed or was not done in time")
    print(f"--- last lines of '{name}'\n{log.read_text(errors='replace')[-3000:]}", flush=True)
    return None


def exit_status(problems: list[str]) -> int:
    """Print what is wrong; 1 where anything is."""
    for problem in problems:
        print(f"FAIL: {problem}")
    return int(bool(problems))


def print_memory_lines(log: Path) -> None:
    """What an engine with a host tier says of its memory."""
    said = ("host memory", "page-locked", "hot cache", "for prompts")
    print("\n".join(line for line in log.read_text(errors="replace").splitlines() if any(words in line for words in said)), flush=True)
