"""What `kvskim bench e2e` measures: the jobs of one engine, and the reading of the options that say so. Imports neither torch nor vllm."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvskim.bench.geometries import GEOMETRIES, LONGEST
from kvskim.engines.vllm.latent_model import is_latent
from kvskim.errors import KvskimError

DENSE, KVSKIM = "dense", "kvskim"
SIDES = (DENSE, KVSKIM)
EXTRA_STEPS = 64
"""Decode steps that the time per token is taken over: the second output length minus the first."""
LEAST_CONTEXT = 1024
FILL_STD = 0.5
"""Standard deviation of the keys and values that a cache is filled with; their mean is 0."""
LOAD_PREFILL, LOAD_OUTPUT = "2048", "64,448"
"""Of load jobs where nothing else is asked for: prompt tokens computed, shortest and longest output."""
QUICK_CASES = "1x16K,1x128K"
DEFAULT_CASES = {
    "glm4-9b-1m": "1x16K,1x128K,1x256K,1x1M,4x256K",
    "llama3.1-8b": "1x4K,1x16K,1x128K,4x128K,8x64K,32x16K,32x4K",
    "qwen3-8b": "1x4K,1x16K,1x128K,4x128K,32x16K",
    "deepseek-v2-lite": "1x4K,1x16K,1x128K,16x64K",
}
"""Decode cases where none are given; for other models `QUICK_CASES`."""
_SIZE = re.compile(r"(\d+)([kKmM]?)")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


@dataclass(frozen=True)
class Job:
    """One measurement of an engine.

    ``kind``: ``decode`` (time per token of ``batch`` requests whose context ends at ``context`` tokens), ``profile`` (where the time of a step of such
    requests goes), ``ttft`` (time of the prefill of one prompt of ``context`` tokens), or ``load`` (``batch`` requests of ``context`` prompt tokens in
    flight; the other fields belong to it).

    ``requests`` in all; ``prefill``: prompt tokens that are computed, the others are filled in (-1: all are computed); ``shortest`` and ``longest``
    output in tokens; ``rate``: arrivals per second, 0 for as fast as ``batch`` stay in flight.
    """

    kind: str
    batch: int
    context: int
    requests: int = 0
    prefill: int = -1
    shortest: int = 0
    longest: int = 0
    rate: float = 0.0

    @property
    def key(self) -> str:
        """The same for the same measurement on either side."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def title(self) -> str:
        shape = f"{self.batch} x {tokens_text(self.context)}"
        return {"decode": shape, "ttft": f"prefill of {tokens_text(self.context)}", "load": f"load {shape}", "profile": f"profile of {shape}"}[self.kind]

    @property
    def tokens(self) -> int:
        """Most tokens of one request, prompt and output."""
        return self.context + {"decode": 0, "profile": 0, "ttft": 1, "load": self.longest}[self.kind]

    @property
    def output_lengths(self) -> tuple[int, int]:
        """The two output lengths of a decode measurement; a profile runs the longer one.

        Requests of a batch start one after the other, at worst one in each step: the shorter length is long enough for all of them to run together.
        """
        first = max(24, self.batch + 16)
        return first, first + EXTRA_STEPS


def tokens_text(tokens: int) -> str:
    """131072 as 128K, 1048576 as 1M, 1000 as 1000."""
    if tokens % (1 << 20) == 0:
        return f"{tokens >> 20}M"
    return f"{tokens >> 10}K" if tokens % (1 << 10) == 0 else str(tokens)


def parse_size(text: str, option: str) -> int:
    """A whole number greater than 0: 131072, 128K or 1M."""
    match = _SIZE.fullmatch(text.strip())
    value = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if value < 1:
        raise KvskimError(f"{option} has {text.strip()!r}; it must be a whole number greater than 0, such as 131072, 128K or 1M")
    return value


def parse_sizes(text: str, option: str) -> list[int]:
    """Numbers of a comma list."""
    return [parse_size(word, option) for word in text.split(",")]


def parse_shape(text: str, option: str, form: str = "BATCHxCONTEXT") -> tuple[int, int]:
    """``BATCHxCONTEXT`` as two numbers. form: how a message calls that."""
    batch, cross, context = text.strip().lower().partition("x")
    if not cross:
        raise KvskimError(f"{option} has {text.strip()!r}; it must be {form}, such as 4x131072 or 4x128K")
    return parse_size(batch, option), parse_size(context, option)


def decode_jobs(cases: str | None, batch: str | None, context: str | None) -> list[Job]:
    """Jobs of ``--cases``, or of every pair of ``--batch`` and ``--ctx``; none without any of them. Each job once, in the order given."""
    if cases is not None and (batch is not None or context is not None):
        raise KvskimError("--cases excludes --batch and --ctx: give one or the other")
    if cases is not None:
        shapes = [parse_shape(word, "--cases") for word in cases.split(",")]
    elif context is not None:
        shapes = [(b, c) for c in parse_sizes(context, "--ctx") for b in parse_sizes(batch or "1", "--batch")]
    elif batch is not None:
        raise KvskimError("--batch needs --ctx, the context lengths in tokens, such as --ctx 16384,131072")
    else:
        shapes = []
    jobs = [Job("decode", b, c) for b, c in dict.fromkeys(shapes)]
    for job in jobs:
        least = max(LEAST_CONTEXT, 2 * job.output_lengths[1])
        if job.context < least:
            raise KvskimError(f"{job.title} has a context of {job.context} tokens; with a batch of {job.batch} it must be at least {least}")
    return jobs


def profile_jobs(decode: Sequence[Job]) -> list[Job]:
    """The profile of each decode job. Profiles come after everything else: what the profiler leaves behind in a process must slow down no measurement."""
    if not decode:
        raise KvskimError("--profile looks at decode cases, and there are none: give --cases")
    return [Job("profile", job.batch, job.context) for job in decode]


def ttft_jobs(lengths: str | None) -> list[Job]:
    """Jobs of ``--ttft``."""
    return [] if lengths is None else [Job("ttft", 1, length) for length in dict.fromkeys(parse_sizes(lengths, "--ttft"))]


def load_jobs(
    shape: str | None, *, requests: int | None = None, prefill: str | None = None, output: str | None = None, rate: float | None = None, real: bool = False
) -> list[Job]:
    """The job of ``--load`` and the options that belong to it; none without ``--load``.

    Args:
        shape: requests in flight and prompt tokens; None: no load, and then none of the other options may be given.
        prefill: None: `LOAD_PREFILL`, or with real weights the whole prompt, because nothing can be filled in there.
        output: None: `LOAD_OUTPUT`.
        real: real weights.
    """
    if shape is None:
        named = {"--load-requests": requests, "--load-prefill": prefill, "--load-output": output, "--load-rate": rate}
        lonely = [option for option, value in named.items() if value is not None]
        if lonely:
            raise KvskimError(f"{lonely[0]} needs --load, the requests in flight and their prompt tokens, such as --load 32x32K")
        return []
    if real and prefill not in (None, "real"):
        raise KvskimError(f"--load-prefill is {prefill}; with --real whole prompts are computed: leave it out")
    return [_load_job(shape, requests=requests, prefill=prefill or ("real" if real else LOAD_PREFILL), output=output or LOAD_OUTPUT, rate=rate)]


def _load_job(shape: str, *, requests: int | None, prefill: str, output: str, rate: float | None) -> Job:
    batch, context = parse_shape(shape, "--load", "REQUESTSxCONTEXT")
    bounds = parse_sizes(output, "--load-output")
    if len(bounds) != 2 or bounds[0] > bounds[1]:
        raise KvskimError(f"--load-output is {output!r}; it must be the shortest and the longest output in tokens, such as 64,448")
    computed = {"real": -1, "fill": 1}.get(prefill) or parse_size(prefill, "--load-prefill")
    if computed > context:
        raise KvskimError(f"--load-prefill is {prefill}, more than the {context} prompt tokens of --load: give fewer, or real")
    total = 3 * batch if requests is None else requests
    if total < 1:
        raise KvskimError(f"--load-requests is {total}; it must be at least 1")
    if rate is not None and not rate > 0:
        raise KvskimError(f"--load-rate is {rate}; it must be a number of arrivals per second, greater than 0")
    return Job("load", batch, context, total, computed, bounds[0], bounds[1], rate or 0.0)


@dataclass(frozen=True)
class Model:
    """What is loaded: ``name`` for tables; ``folder`` of its config.json, None for a geometry that is still to be written; ``positions`` it has;
    ``latent``: it has latent attention (MLA); ``heads``: query heads, None where its config.json does not say."""

    name: str
    folder: Path | None
    positions: int
    latent: bool = False
    heads: int | None = None


def find_model(text: str, *, real: bool) -> Model:
    """The geometry or the model folder that the user named."""
    if text in GEOMETRIES and not real:
        return Model(text, None, LONGEST, is_latent(GEOMETRIES[text]), GEOMETRIES[text]["num_attention_heads"])
    if text in GEOMETRIES:
        raise KvskimError(f"{text} is a geometry without weights: leave out --real, or give the folder of a model")
    config = Path(text, "config.json")
    if not config.is_file():
        raise KvskimError(f"the model is {text!r}, which is neither a geometry ({', '.join(GEOMETRIES)}) nor a folder with a config.json")
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise KvskimError(f"{config} can't be read: {error}") from error
    inner = settings.get("text_config") or settings
    positions = int(inner.get("max_position_embeddings") or LONGEST)
    return Model(config.parent.resolve().name, config.parent.resolve(), positions, is_latent(settings), inner.get("num_attention_heads"))


def check_tensor_parallel(model: Model, gpus: int) -> None:
    """Refuse to split a model among more GPUs than its heads allow."""
    if model.heads is not None and model.heads % gpus:
        raise KvskimError(f"--tensor-parallel is {gpus}; {model.name} has {model.heads} query heads, which vLLM splits evenly: give a divisor of that")


def check_positions(model: Model, jobs: Sequence[Job]) -> None:
    """Refuse jobs that are longer than the model allows, and an empty list of jobs."""
    if not jobs:
        raise KvskimError("there is nothing to measure: give --cases, --ttft or --load")
    longest = max(jobs, key=lambda job: job.tokens)
    if longest.tokens > model.positions:
        raise KvskimError(f"{longest.title} needs {longest.tokens} positions, and {model.name} has {model.positions}: give shorter ones")


def engine_arguments(jobs: Sequence[Job], *, real: bool, memory: float, blocks: int | None, tensor_parallel: int = 1) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that one engine needs for all jobs, the same for both sides; without ``model``.

    Args:
        real: real weights and prefill. Else weights are dummy, and the cache of a request that asks for it is filled without prefill.
        memory: gpu_memory_utilization.
        blocks: num_gpu_blocks_override, None to let vLLM size the cache.
        tensor_parallel: GPUs that share every layer.
    """
    longest = max(job.tokens for job in jobs)
    arguments: dict[str, Any] = dict(
        max_model_len=-(-longest // 16) * 16, max_num_seqs=max(job.batch for job in jobs), max_num_batched_tokens=8192, gpu_memory_utilization=memory,
        disable_log_stats=False, skip_tokenizer_init=True, worker_extension_cls="kvskim.bench.e2e_probe.BenchWorkerExtension",
        # Real prompts are prefilled once and decoded several times.
        enable_prefix_caching=real,
    )
    if not real:
        arguments["load_format"] = "dummy"
        arguments["kv_transfer_config"] = dict(
            kv_connector="FillConnector", kv_connector_module_path="kvskim.bench.e2e_fill", kv_role="kv_both",
            kv_connector_extra_config=dict(fill_mean=0.0, fill_std=FILL_STD),
        )
    if blocks is not None:
        arguments["num_gpu_blocks_override"] = blocks
    if tensor_parallel > 1:
        arguments["tensor_parallel_size"] = tensor_parallel
    return arguments
