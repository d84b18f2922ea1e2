"""One process of `kvskim bench e2e`: ``python -m kvskim.bench.e2e_worker SPEC EVENTS`` does what the JSON file SPEC says.

It appends one JSON object per line to the file EVENTS, as things happen, so that what was measured before a crash is not lost:
``{"event": "phase", "text"}``, ``{"event": "machine", ...}``, ``{"event": "engine", ...}``,
``{"event": "job", "job"}``, ``{"event": "result", "job", "value", "error"}``,
and ``{"event": "done"}`` where nothing went wrong.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvskim.bench.e2e_plan import DENSE, Job
from kvskim.config import publish
from kvskim.engines.vllm.latent_model import backend_name

Emit = Callable[..., None]


def emitter(path: Path) -> Emit:
    """A function that appends an event to the file."""

    def emit(event: str, **fields: Any) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    return emit


def prepare(spec: Mapping[str, Any], emit: Emit) -> None:
    """What both engines need and neither should do: say what the machine is, measure its copy bandwidth, write a calibration for random weights."""
    import torch

    from kvskim.bench.timing import copy_bandwidth

    emit("phase", text="copy bandwidth")
    emit("machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__, cuda=torch.version.cuda, copy_bandwidth=copy_bandwidth())
    if spec["calibration"] is not None:
        from kvskim.bench.random_calibration import write_random_calibration

        emit("phase", text="calibration for random weights")
        write_random_calibration(Path(spec["model"]), Path(spec["calibration"]), record_bytes=spec["record_bytes"])


def measure(spec: Mapping[str, Any], emit: Emit) -> None:
    """Start an engine and run its jobs."""
    dense = spec["side"] == DENSE
    # Read by vLLM's processes and by kvskim's plugin in them, before either is imported.
    publish("KVSKIM_DISABLE", "1" if dense else "0")
    if spec["latent"] and not dense:
        # Only where it is configured does kvskim take the place of a backend of vLLM's.
        publish("KVSKIM_CONFIG", json.dumps(spec["settings"]))
    import vllm
    from kvskim.bench.e2e_engine import EngineBench, Prompts
    from vllm import LLM

    emit("phase", text="starting the engine")
    # The dense engine takes what vLLM chooses on this GPU.
    arguments = dict(spec["llm"])
    if not dense:
        arguments.update(attention_backend=backend_name(latent=spec["latent"]), additional_config={"kvskim": spec["settings"]})
    started = time.perf_counter()
    llm = LLM(**arguments)
    start_s = time.perf_counter() - started
    vocabulary = int(llm.llm_engine.vllm_config.model_config.get_vocab_size())
    prompts = Prompts(vocabulary, _text(spec["llm"]["model"]) if spec["real"] else ())
    title = ""

    def progress(text: str) -> None:
        emit("phase", text=f"{title}: {text}" if title else text)

    bench = EngineBench(llm, spec["side"], prompts, filled=not spec["real"], repetitions=spec["repetitions"], progress=progress)
    emit("engine", vllm=str(vllm.__version__), start_s=start_s, **bench.facts())
    bench.calibrate()
    for job in [Job(**fields) for fields in spec["jobs"]]:
        title = job.title
        emit("job", job=job.key)
        value, error, usable = bench.attempt(job)
        emit("result", job=job.key, value=value, error=error)
        if not usable:
            return


def _text(model: str) -> list[int]:
    from transformers import AutoTokenizer

    from kvskim.demo.text import reference_text, tokenize

    return list(tokenize(AutoTokenizer.from_pretrained(model, local_files_only=True), reference_text()))


def main(arguments: Sequence[str]) -> None:
    """Do what the spec file says."""
    spec = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    emit = emitter(Path(arguments[1]))
    {"prepare": prepare, "measure": measure}[spec["task"]](spec, emit)
    emit("done")


if __name__ == "__main__":
    main(sys.argv[1:])
