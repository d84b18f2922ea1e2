"""Workers of one `mini_engine`: each has some kv heads and layers of the same model. Run as a program it is a worker that talks to the others with gloo."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mini_engine import MiniEngine, Request, _table

TOTAL_HEADS, TOTAL_GROUP, LAYERS = 2, 2, 2
FEW = {"rule": "budget", "budget_pages": 6}


class RankEngine(MiniEngine):
    """One worker; layers and kv heads are those that vLLM would give it. With fewer kv heads than workers it has a part of the query heads of one.

    Args:
        tensor: (rank, size).
        pipeline: (rank, size).
        heads: kv heads of the model.
        group: query heads of the model for each of them.
    """

    def __init__(
        self, settings: dict[str, Any], tensor: tuple[int, int] = (0, 1), pipeline: tuple[int, int] = (0, 1), *, heads: int = TOTAL_HEADS,
        group: int = TOTAL_GROUP, **more: Any,
    ) -> None:
        self.tensor, self.pipeline, self.model_heads, self.model_group = tensor, pipeline, heads, group
        size = tensor[1]
        self.num_kv_heads = max(1, heads // size)
        self.group = heads * group // size // self.num_kv_heads
        self.first_layer = LAYERS // pipeline[1] * pipeline[0]
        super().__init__(settings, num_layers=LAYERS // pipeline[1], first_layer=self.first_layer, **more)

    def make_config(self, additional: dict[str, Any], max_rows: int, speculative: Any) -> Any:
        config = super().make_config(additional, max_rows, speculative)
        config.model_config.total_kv_heads = self.model_heads
        config.parallel_config.tensor_parallel_size = self.tensor[1]
        config.parallel_config.pipeline_parallel_size = self.pipeline[1]
        # vLLM writes it there.
        config.parallel_config.rank = self.pipeline[0] * self.tensor[1] + self.tensor[0]
        return config

    def head_slice(self, kind: str) -> slice:
        """The heads of the model that this worker has."""
        rank, size = self.tensor
        if kind == "query":
            count = self.model_heads * self.model_group // size
            return slice(rank * count, (rank + 1) * count)
        first = rank * self.model_heads // size
        return slice(first, first + self.num_kv_heads)

    def tokens(self, seed: int, layer: int, kind: str, first: int, count: int) -> torch.Tensor:
        whole = _table(seed, self.first_layer + layer, kind, self.model_heads, self.model_group, self.head_size)
        return whole[first : first + count, self.head_slice(kind)]


@contextlib.contextmanager
def as_rank(tensor: tuple[int, int], pipeline: tuple[int, int] = (0, 1), group: Any = None) -> Iterator[None]:
    """What vLLM's distributed state says in this worker."""
    import vllm.distributed as distributed

    before = distributed.rank, distributed.pipeline_rank, distributed.tp_group
    distributed.rank, distributed.pipeline_rank, distributed.tp_group = tensor[0], pipeline[0], group
    try:
        yield
    finally:
        distributed.rank, distributed.pipeline_rank, distributed.tp_group = before


def calibrate_on_prompts(engine: MiniEngine) -> int:
    """Prefill and decode until decode is sparse; returns the number of steps."""
    request = Request(1)
    engine.step([(request, 400)])
    for steps in range(1, 9):
        engine.step([(request, 1)])
        if engine.state.calibrator is None:
            return steps
    raise AssertionError("calibration does not come to its end")


def wait_for_file() -> None:
    """Until the calibration is written."""
    import threading

    from kvskim.engines.vllm.calibration_source import THREAD_NAME

    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(60)


class GlooGroup:
    """What kvskim uses of vLLM's group of tensor-parallel ranks."""

    def __init__(self) -> None:
        self.cpu_group = torch.distributed.group.WORLD

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, tensor)
        return torch.cat(parts, dim)


def main(rank: int, size: int, folder: Path, heads: int, group: int) -> None:
    """A worker: calibrate, keep the share, and write what it has found to ``folder/rank.json`` and ``folder/rank.pt``."""
    from kvskim.engines.vllm import calibrate

    calibrate.CAPTURE_TOKENS = 256
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    with torch.inference_mode(), as_rank((rank, size), group=GlooGroup()):
        engine = RankEngine(FEW, (rank, size), heads=heads, group=group)
        source = engine.state.calibration_source
        steps = 0 if engine.state.calibrator is None else calibrate_on_prompts(engine)
        wait_for_file()
    torch.save([{"mean": layer.tables.mean, "encode_matrix": layer.tables.encode_matrix} for layer in engine.state.layers.values()], folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps({"steps": steps, "source": source}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
