"""Several runs of `kvskim eval ruler` as one: the samples of all their seeds in the same tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvskim.errors import KvskimError

OF_A_RUN = ("command", "date", "device", "torch", "samples", "seeds", "time_limit", "seconds")
"""What runs that are joined may differ in, and is kept of each."""
OF_THE_MODEL = ("layers", "kv_heads", "head_dim", "heads")


def join_runs(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """One result with the answers of all runs; what was run, in ``runs``, with the samples that each adds (``added``) and that one before it has (``known``).

    A sample is known by task, context, seed and its number in the seed. Where two runs have it, it counts once, with the answers of the first.

    Args:
        runs: file and result of each, made with the same settings; as `kvskim.eval.ruler.run.run_ruler` gives it, also where it was stopped.

    Raises:
        KvskimError: a run is of another model or has other settings, or adds no sample.
    """
    (first_file, first), *_ = runs
    seeds = list(dict.fromkeys(seed for _, run in runs for seed in run["seeds"]))
    samples = max(run["samples"] for _, run in runs)
    known: set[tuple[str, int, int]] = set()
    answers: list[dict[str, Any]] = []
    kept = []
    for file, run in runs:
        for key in OF_THE_MODEL:
            if run[key] != first[key]:
                raise KvskimError(f"{file} is of another model than {first_file}, {key} {run[key]} and not {first[key]}: give it a name of its own")
        rows = [{**row, "sample": _number(run, row["sample"], seeds, samples)} for row in run["answers"]]
        here = {_place(row) for row in rows}
        if not here:
            raise KvskimError(f"{file} has no samples: its run was stopped before the first was answered; leave it out")
        # Equal commands may have run with other defaults. A run may lack settings where an engine failed.
        mine, theirs = ({row["setting"] for row in one["answers"]} for one in (run, first))
        if mine - theirs and theirs - mine:
            other, wanted = (", ".join(sorted(found)) for found in (mine - theirs, theirs - mine))
            raise KvskimError(f"{file} has answers under {other}, {first_file} under {wanted}: give it a name of its own")
        if here <= known:
            raise KvskimError(f"{file} has no sample that the files before it don't have: join runs with other seeds (--first-seed {max(seeds) + 1})")
        answers += [row for row in rows if _place(row) not in known]
        kept.append({**{key: run[key] for key in OF_A_RUN}, "added": len(here - known), "known": len(here & known)})
        known |= here
    about = {key: value for key, value in first.items() if key not in OF_A_RUN}
    contexts = sorted({context for _, run in runs for context in run["contexts"]})
    return {**about, "contexts": contexts, "samples": samples, "seeds": seeds, "runs": kept, "answers": answers}


def _number(run: Mapping[str, Any], number: int, seeds: Sequence[int], samples: int) -> int:
    """Number among all seeds of the joined runs of the ``number``-th sample among those of ``run``."""
    position, index = divmod(number, run["samples"])
    return seeds.index(run["seeds"][position]) * samples + index


def _place(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row["task"], row["context_tokens"], row["sample"]
