"""Two GPUs: tensor and pipeline parallel engines give the tokens of one GPU, and one calibration file serves all of them.

Models: SmolLM2 with a fourth kv head that adds nothing (`parallel_models.py`), a random one with one kv head on each of two ranks, and a random
one whose only kv head both ranks have. What is compared:

* all pages selected, on two GPUs, with full attention on one. Two GPUs sum in another order, so tokens differ where the likeliest two are nearly
  equal; how often, is seen from full attention on two GPUs. A difference is an error when the lead of the token of one GPU is larger than the tie
  of `equality.py`, or when fewer tokens agree than with full attention by more than --slack;
* the default rule on two GPUs with the default rule on one: the same, with leads up to --lead, since a page whose mass is at the threshold may be attended
  by one and not by the other; and the same share of pages attended, up to --pages;
* calibration: a file that one GPU made serves two, each way of two makes one file, and that serves one and two.

Engines run side by side, --at-once of them; one that needs a calibration which another makes waits for it. NVLink multicast stays off.

    python tests/gpu/vllm/parallel.py --model /tmp/smollm2
    python tests/gpu/vllm/parallel.py --model /tmp/smollm2 --only "two TP=2" again     # these, what they are compared with, and whose calibration they use
"""

import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from common import engine, parser, table, text_ids
from equality import TIES
from parallel_models import SHORTEST_TEXT, random_text, write_models

from kvskim.config import cache_directory
from kvskim.engines.vllm.check import ALL_PAGES, Agreement, compare, run_engine
from kvskim.errors import KvskimError

RULE: dict[str, Any] = {"full_pages": 0}
"""The default rule, with short requests decoded sparsely too."""
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
ENVIRONMENT = {**WITHOUT_MULTICAST, "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
ENGINE_SECONDS = 110.0


@dataclass(frozen=True)
class Run:
    """One engine: the model, how many GPUs split its layers and how many have parts of them, the settings (None: full attention), and its cache directory,
    where it finds a calibration or leaves one."""

    name: str
    model: str
    tensor: int = 1
    pipeline: int = 1
    settings: dict[str, Any] | None = None
    cache: str = "none"
    custom_all_reduce: bool = False
    """vLLM's own all-reduce instead of NCCL's."""


REFUSED = Run("smollm2, 9 heads", "original", tensor=2)
RUNS = [
    # Those that others wait for, and take longest.
    Run("smollm2 rule", "smollm2", settings=RULE, cache="one GPU"),
    Run("smollm2 TP=2 rule, own fit", "smollm2", tensor=2, settings=RULE, cache="TP=2"),
    Run("smollm2 PP=2 rule, own fit", "smollm2", pipeline=2, settings=RULE, cache="PP=2"),
    Run("two rule", "two", settings=RULE, cache="two, one GPU"),
    Run("one TP=2 all pages, own fit", "one", tensor=2, settings=ALL_PAGES, cache="one, TP=2"),
    # Those that are compared with.
    Run("smollm2 dense", "smollm2"),
    Run("smollm2 TP=2 dense", "smollm2", tensor=2),
    Run("two dense", "two"),
    Run("one dense", "one"),
    Run("smollm2 TP=2 rule", "smollm2", tensor=2, settings=RULE, cache="one GPU"),
    Run("two TP=2 rule", "two", tensor=2, settings=RULE, cache="two, one GPU"),
    Run("smollm2 TP=2 all pages", "smollm2", tensor=2, settings=ALL_PAGES, cache="one GPU"),
    Run("smollm2 PP=2 all pages", "smollm2", pipeline=2, settings=ALL_PAGES, cache="one GPU"),
    Run("two TP=2 all pages", "two", tensor=2, settings=ALL_PAGES, cache="two, one GPU", custom_all_reduce=True),
    Run("smollm2 TP=2 rule, again", "smollm2", tensor=2, settings=RULE, cache="TP=2"),
    # They start soonest.
    Run("smollm2 rule, file of TP=2", "smollm2", settings=RULE, cache="TP=2"),
    Run("smollm2 rule, file of PP=2", "smollm2", settings=RULE, cache="PP=2"),
    Run("one all pages, file of TP=2", "one", settings=ALL_PAGES, cache="one, TP=2"),
]
NOISE = "smollm2 TP=2 dense"
"""What two GPUs change without kvskim is seen from this run."""
MAKES = {"one GPU": "smollm2 rule", "two, one GPU": "two rule", "TP=2": "smollm2 TP=2 rule, own fit", "PP=2": "smollm2 PP=2 rule, own fit"}
MAKES["one, TP=2"] = "one TP=2 all pages, own fit"
"""Which run leaves the file in a cache directory."""


class Machine:
    """Runs engines until ``deadline``, and keeps their results or why there are none."""

    def __init__(self, models: dict[str, Path], folder: Path, prompts: dict[str, tuple[list[list[int]], list[int]]], tokens: int, kernels: str) -> None:
        self.models, self.folder, self.prompts, self.tokens, self.kernels = models, folder, prompts, tokens, kernels
        self.results: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self.deadline = 0.0

    def run(self, run: Run, gpus: str) -> None:
        """One engine in a process of its own."""
        if time.monotonic() > self.deadline:
            self.errors[run.name] = "not run: the time was up"
            return
        arguments = engine(str(self.models[run.model]), "eager", tensor_parallel_size=run.tensor, pipeline_parallel_size=run.pipeline)
        arguments.update(
            max_num_seqs=8, kv_cache_memory_bytes=5 << 30, gpu_memory_utilization=0.1, skip_tokenizer_init=True,
            disable_custom_all_reduce=not run.custom_all_reduce,
            # Decode graphs without compilation: all-reduces and our kernels in one graph, and a start of seconds.
            enforce_eager=False, compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        )
        prompts, warm = self.prompts["smollm2" if run.model == "original" else run.model]
        environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": gpus, "KVSKIM_CACHE_DIR": str(self.cache(run))}
        settings = None if run.settings is None else {**run.settings, "kernels": self.kernels}
        try:
            self.results[run.name] = run_engine(
                arguments, prompts, settings=settings, max_tokens=self.tokens, batches=(8,), warm_prompt=warm, activity=run.settings is not None,
                environment=environment, timeout=max(1.0, min(ENGINE_SECONDS, self.deadline - time.monotonic())),
            )
            print(f"{run.name}: started in {self.results[run.name]['start_seconds']:.0f} s, ran {self.results[run.name]['seconds']:.1f} s", flush=True)
        except KvskimError as error:
            self.errors[run.name] = str(error)

    def cache(self, run: Run) -> Path:
        """The cache directory of a run; all have the compiled kernels of this machine."""
        path = self.folder / run.cache.replace(" ", "-").replace(",", "").replace("=", "")
        path.mkdir(exist_ok=True)
        (kernels := cache_directory() / "cuda").mkdir(parents=True, exist_ok=True)
        if not (path / "cuda").exists():
            (path / "cuda").symlink_to(kernels)
        return path

    def all(self, runs: Sequence[Run], at_once: int) -> None:
        """Run some engines, so many at a time: always the first one whose calibration is there or is its own to make."""
        waiting, ended, change = list(runs), set[str](), threading.Condition()
        alone = [run.name for run in runs if run.tensor == run.pipeline == 1]
        for run in runs:
            self.cache(run)

        def work() -> None:
            while True:
                with change:
                    change.wait_for(lambda: not waiting or any(free(run) for run in waiting))
                    if not waiting:
                        return
                    run = next(run for run in waiting if free(run))
                    waiting.remove(run)
                try:
                    self.run(run, str(alone.index(run.name) % 2) if run.name in alone else "0,1")
                finally:
                    with change:
                        ended.add(run.name)
                        change.notify_all()

        def free(run: Run) -> bool:
            return run.settings is None or MAKES[run.cache] in (run.name, *ended)

        with ThreadPoolExecutor(at_once) as pool:
            for work_of_one in [pool.submit(work) for _ in range(at_once)]:
                work_of_one.result()

    def files(self, cache: str) -> list[str]:
        """Names of the calibrations in a cache directory."""
        return sorted(path.name for path in (self.cache(Run("", "", cache=cache)) / "calibrations").glob("*"))


def reference_of(run: Run) -> str:
    """Name of the run that a run is compared with."""
    return f"{run.model} rule" if run.settings is RULE else f"{run.model} dense"


def chosen(words: Sequence[str]) -> list[Run]:
    """The runs with any of these words in their names, and all that these need: what they are compared with, and whose calibration they use.

    Raises:
        ValueError: no run has one of the words in its name.
    """
    if unknown := [word for word in words if not any(word in run.name for run in RUNS)]:
        raise ValueError(f"--only is {unknown[0]!r}, which is in the name of no run; use words of {', '.join(run.name for run in RUNS)}")
    names = {run.name for run in RUNS if not words or any(word in run.name for word in words)}
    while True:
        runs = [run for run in RUNS if run.name in names]
        needed = {reference_of(run) for run in runs} | {MAKES[run.cache] for run in runs if run.settings is not None}
        if any(run.model == "smollm2" for run in runs):
            needed |= {NOISE, "smollm2 dense"}
        if needed <= names:
            return runs
        names |= needed


def share(result: dict[str, Any]) -> float:
    seen = result["activity"]
    return float(seen["attended"]) / max(1, seen["total"])


def lines(result: dict[str, Any], words: str) -> int:
    """How many lines of kvskim in the log have these words."""
    return sum(words in line for line in result["log"])


def faults(machine: Machine, run: Run, a: Any) -> tuple[Agreement | None, str, list[str]]:
    """Agreement of a run with the one it is compared with, the name of that one, and what is wrong."""
    result = machine.results.get(run.name)
    if result is None:
        return None, "", [machine.errors.get(run.name, "not run").strip().splitlines()[-1][:150]]
    wrong = []
    if run.settings is not None:
        makes = MAKES[run.cache] == run.name
        kept = lines(result, "calibration: kept in")
        if kept != (1 if makes else 0):
            wrong.append(f"{kept} lines say that a calibration was kept")
        if not makes and lines(result, "(made with") == 0:
            wrong.append("the file was not used")
        if lines(result, "in vLLM, variant") != run.pipeline:
            wrong.append(f"{lines(result, 'in vLLM, variant')} blocks in the log")
        if not result["ready"]:
            wrong.append("decode never became sparse")
    reference = reference_of(run)
    if run.name == reference or reference not in machine.results:
        return None, "", wrong if run.name == reference else [*wrong, f"{reference} failed"]
    agreement = compare(machine.results[reference], result)
    tie, floor = TIES["bfloat16" if run.model == "smollm2" else "float16"], 0.95 - a.slack
    noise = machine.results.get(NOISE)
    if run.model == "smollm2" and noise is not None:
        # What two GPUs change without kvskim.
        floor_of = compare(machine.results[f"{run.model} dense"], noise)
        tie, floor = max(tie, 1.5 * floor_of.gap), floor_of.tokens - a.slack
    if run.settings is ALL_PAGES and (agreement.gap > tie or share(result) != 1):
        wrong.append(f"lead {agreement.gap:.3f}, {share(result):.1%} of the pages")
    if run.settings is RULE and agreement.gap > a.lead:
        wrong.append(f"lead {agreement.gap:.3f}, more than {a.lead}")
    if run.settings is RULE and abs(share(result) / share(machine.results[reference]) - 1) > a.pages:
        wrong.append(f"{share(result):.2%} of the pages, not {share(machine.results[reference]):.2%}")
    if run.settings is not None and agreement.tokens < floor:
        wrong.append(f"{agreement.tokens:.1%} of the tokens, less than {floor:.1%}")
    return agreement, reference, wrong


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--prompts", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=32)
    arguments.add_argument("--slack", type=float, default=0.25)
    arguments.add_argument("--pages", type=float, default=0.05, help="relative difference of the share of pages attended")
    arguments.add_argument("--lead", type=float, default=0.5, help="with the default rule, largest lead of a token that the other run does not choose")
    arguments.add_argument("--at-once", type=int, default=6, help="engines side by side")
    arguments.add_argument("--only", nargs="+", default=[], help="words of the names of runs; without it, all runs, and the refusal of 9 heads")
    arguments.add_argument("--seconds", type=float, default=235, help="after so long no engine is started, and those that run are ended")
    a = arguments.parse_args()
    started = time.monotonic()
    try:
        runs = chosen(a.only)
    except ValueError as error:
        print(f"FAIL: {error}")
        return 2
    if not any(entry.value.startswith("kvskim.") for entry in entry_points(group="vllm.general_plugins")):
        print("FAIL: kvskim is on the path but not installed, so workers would not load it: install it with pip (--target is enough)")
        return 2
    from kvskim.ops.cuda.build import build_library

    build_library(progress=print)
    with tempfile.TemporaryDirectory(prefix="kvskim-parallel-") as name:
        folder = Path(name)
        models = {**write_models(Path(a.model), folder / "models"), "original": Path(a.model)}
        ids, noise = text_ids(a.model), random_text(60_000)
        prompts = {}
        for model, text, shortest in (("smollm2", ids, 1000), ("two", noise, SHORTEST_TEXT), ("one", noise, SHORTEST_TEXT)):
            lengths = [shortest + (6500 - shortest) * i // max(1, a.prompts - 1) for i in range(a.prompts)]
            prompts[model] = [text[500 * i : 500 * i + n] for i, n in enumerate(lengths)], text[40_000:46_000]
        machine = Machine(models, folder, prompts, a.tokens, a.kernels)
        machine.deadline = started + a.seconds
        machine.all(runs if a.only else [*runs[:-3], REFUSED, *runs[-3:]], a.at_once)
        return report(machine, runs, a, started)


def report(machine: Machine, runs: Sequence[Run], a: Any, started: float) -> int:
    """Print the table; 1 where something is wrong."""
    rows, failed = [], False
    for run in runs:
        agreement, reference, wrong = faults(machine, run, a)
        failed |= bool(wrong)
        result = machine.results.get(run.name, {})
        compared = ["", "", "", "", ""] if agreement is None else [
            reference, f"{agreement.equal}/{agreement.prompts}", f"{agreement.tokens:.1%}", f"{agreement.gap:.3f}", f"{agreement.logprob:.3f}",
        ]
        pages = f"{share(result):.2%}" if "activity" in result else ""
        rows.append([run.name, *compared, pages, f"{result['start_seconds']:.0f}" if result else "", "FAIL: " + "; ".join(wrong) if wrong else "ok"])
    if not a.only:
        why = machine.errors.get(REFUSED.name, "it was not refused")
        said = next((line.strip() for line in why.splitlines() if "must be divisible" in line), None)
        failed |= said is None
        print(f"9 query heads on two GPUs: {said or 'FAIL: ' + why[-300:]}")
    for cache, made in MAKES.items():
        if not any(run.name == made for run in runs):
            continue
        files = machine.files(cache)
        wrong = made in machine.results and (len(files) != 1 or "share" in files[0])
        failed |= wrong
        print(f"{cache}: {', '.join(files) or 'no file'}{' FAIL: one file was expected' if wrong else ''}")
    for run_name, error in machine.errors.items():
        if run_name != REFUSED.name:
            print(f"--- {run_name}\n{error[-3000:]}")
    for run_name in ("smollm2 TP=2 rule", "smollm2 PP=2 rule, own fit"):
        print("\n".join(machine.results.get(run_name, {}).get("log", [])))
    print(table(["run", "compared with", "equal", "tokens", "largest lead", "logprob diff", "pages", "start s", ""], rows))
    print(f"{time.monotonic() - started:.0f} s in all")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
