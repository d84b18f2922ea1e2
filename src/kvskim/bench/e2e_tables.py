"""The tables of `kvskim bench e2e`: as text cells, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from kvskim.bench.e2e_plan import DENSE, KVSKIM, tokens_text
from kvskim.bench.e2e_profile_tables import profile_tables
from kvskim.bench.e2e_report import Row, label, rows
from kvskim.bench.e2e_run import Run
from kvskim.bench.e2e_text import Table, figure, percent, text
from kvskim.layout import PAGE_TOKENS, ceil_div


def tables(runs: Sequence[Run], *, kernels: bool = False) -> list[Table]:
    """What the runs say: one table for each kind of measurement that there is, one of the engines, and those of the profiles.

    Args:
        runs: what was measured.
        kernels: also the kernels of each profile, dozens of lines.
    """
    found = rows(runs)
    by_kind: dict[str, list[Row]] = {"decode": [], "ttft": [], "load": [], "profile": []}
    for row in found:
        by_kind[row.job.kind].append(row)
    made = [_decode_table(by_kind["decode"]), _ttft_table(by_kind["ttft"]), _load_table(by_kind["load"]), _engine_table(runs)]
    return [table for table in made if table.cells] + profile_tables(found, kernels=kernels)


def _decode_table(found: Sequence[Row]) -> Table:
    columns = (
        "model", "selector and rule", "batch x context", "dense ms", "kvskim ms", "speed-up", "roofline speed-up", "dense floor ms", "kvskim floor ms",
        "dense tokens/s", "kvskim tokens/s", "pages attended", "of pages", "mass covered",
    )
    cells = [
        (
            row.model, row.selector, row.job.title, figure(row.of(DENSE), row.dense_error), figure(row.of(KVSKIM), row.kvskim_error),
            text(row.speedup, 2, "x"), text(row.roofline_speedup, 2, "x"), text(row.dense_floor_ms), text(row.kvskim_floor_ms),
            text(row.of(DENSE, "tokens_s"), 0), text(row.of(KVSKIM, "tokens_s"), 0), text(row.pages, 1),
            percent(None if row.pages is None else row.pages / ceil_div(row.job.context, PAGE_TOKENS)), percent(row.covered),
        )
        for row in found
    ]
    return Table("Time per token of a decode step", columns, cells)


def _ttft_table(found: Sequence[Row]) -> Table:
    cells = [
        (
            row.model, row.selector, tokens_text(row.job.context), figure(row.of(DENSE), row.dense_error, 1), figure(row.of(KVSKIM), row.kvskim_error, 1),
            percent(None if row.speedup is None else 1 / row.speedup - 1, 2),
        )
        for row in found
    ]
    return Table("Time to first token", ("model", "selector and rule", "prompt tokens", "dense ms", "kvskim ms", "kvskim longer by"), cells)


def _load_table(found: Sequence[Row]) -> Table:
    columns = (
        "model", "selector and rule", "in flight x prompt", "prompt tokens computed", "engine", "output tokens/s", "speed-up", "all tokens/s",
        "between tokens ms p50", "p99", "first token ms p50", "p99", "most decoding",
    )
    cells = []
    for row in found:
        job = row.job
        arrivals = f", {job.rate:g} arrivals/s" if job.rate else ""
        shape = f"{job.batch} x {tokens_text(job.context)}, {job.requests} requests of {job.shortest} to {job.longest} output tokens{arrivals}"
        for side, error in ((DENSE, row.dense_error), (KVSKIM, row.kvskim_error)):
            if row.of(side) is None and not error:
                continue
            figures = [text(row.of(side, name), 1) for name in ("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "ttft_p99_ms")]
            cells.append((
                row.model, row.selector, shape, "all" if job.prefill < 0 else str(job.prefill), side, figure(row.of(side), error, 0),
                text(row.speedup, 2, "x") if side == KVSKIM else "", text(row.of(side, "total_tokens_s"), 0), *figures, text(row.of(side, "most_decoding"), 0),
            ))
    return Table("Under load", columns, cells)


def _engine_table(runs: Sequence[Run]) -> Table:
    columns = ("model", "engine", "start s", "longest request", "most requests", "KV blocks", "lost to records", "tokens in a block", "kernels", "CUDA graphs")
    dense = {(run.model, run.weights): run for run in runs if run.side == DENSE and run.engine is not None}
    cells = []
    for run in runs:
        name = run.side if run.side == DENSE else label(run.settings)
        engine = run.engine
        if engine is None:
            cells.append((run.model, name, f"failed: {run.error}", *[""] * 7))
            continue
        cells.append((
            run.model, name, text(engine["start_s"], 1), str(run.arguments["max_model_len"]), str(run.arguments["max_num_seqs"]), str(engine["kv_blocks"]),
            percent(blocks_lost(run, dense.get((run.model, run.weights)))), str(engine["block_tokens"]), engine["kernels"], engine["graphs"],
        ))
    return Table("Engines", columns, cells)


def blocks_lost(run: Run, dense: Run | None) -> float | None:
    """Share of the dense engine's KV blocks that a kvskim engine lacks; None where the two were not sized by vLLM with the same arguments."""
    if run.side == DENSE or dense is None or dense.engine is None or run.engine is None:
        return None
    if run.arguments != dense.arguments or "num_gpu_blocks_override" in run.arguments:
        return None
    return 1 - float(run.engine["kv_blocks"]) / float(dense.engine["kv_blocks"])


def markdown(runs: Sequence[Run]) -> str:
    """All tables as Markdown, with the machine."""
    machine = runs[0].machine
    versions = sorted({run.engine["vllm"] for run in runs if run.engine is not None})
    lines = [
        f"{machine['gpu']}, torch {machine['torch']}, vLLM {', '.join(versions) or 'not started'}, copy bandwidth {machine['copy_bandwidth'] / 1e12:.2f} TB/s "
        f"(read and write). Weights: {', '.join(sorted({run.weights for run in runs}))}."
    ]
    for table in tables(runs, kernels=True):
        lines += ["", f"### {table.title}", "", f"| {' | '.join(table.columns)} |", "|" + "---|" * len(table.columns)]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table.cells]
    return "\n".join(lines) + "\n"
