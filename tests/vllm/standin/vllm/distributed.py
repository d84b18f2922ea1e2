from types import SimpleNamespace
from typing import Any

rank, world_size = 0, 1
pipeline_rank = 0
tp_group: Any = None
"""What a test puts in the place of the group of tensor-parallel ranks: ``cpu_group``, ``all_gather``."""


def get_tensor_model_parallel_rank() -> int:
    return rank


def get_tensor_model_parallel_world_size() -> int:
    return world_size


def get_tp_group() -> Any:
    assert tp_group is not None, "tensor model parallel group is not initialized"
    return tp_group


def get_pp_group() -> Any:
    return SimpleNamespace(rank_in_group=pipeline_rank)
