"""One worker among others: which kv heads and layers of the model it has, and what workers tell each other.

With tensor parallelism of size ``n`` a worker has ``1/n`` of the query heads and of the kv heads of each of its layers; where a model has fewer kv heads than
that, several workers have the same one, each for other query heads. With pipeline parallelism it has some of the layers. Everything a worker decides in a
step it decides for its own heads, so workers need no word of each other while they decode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvskim.calibration_shares import Worker


def rank_heads(total_heads: int, rank: int, world: int) -> tuple[int, int]:
    """(first kv head, number of kv heads) of a tensor-parallel rank; with fewer heads than ranks several ranks have the same head."""
    if total_heads >= world:
        count = total_heads // world
        return rank * count, count
    return rank // (world // total_heads), 1


def heads_of_this_rank(vllm_config: Any) -> tuple[int, int, int]:
    """(kv heads of the model, first of this tensor-parallel rank, number on this rank). With latent attention every rank has the one there is."""
    if getattr(vllm_config.model_config, "use_mla", False):
        return 1, 0, 1
    total, own = int(vllm_config.model_config.get_total_num_kv_heads()), worker(vllm_config)
    return (total, *rank_heads(total, own.tensor_rank, own.tensor_size))


def worker(vllm_config: Any) -> Worker:
    """Which worker of its engine this process is."""
    tensor, pipeline = int(vllm_config.parallel_config.tensor_parallel_size), int(vllm_config.parallel_config.pipeline_parallel_size)
    if tensor * pipeline == 1:
        return Worker()
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    engine = int(getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0)
    return Worker(get_tensor_model_parallel_rank(), tensor, get_pp_group().rank_in_group if pipeline > 1 else 0, pipeline, engine)


def is_first_tensor_rank(vllm_config: Any) -> bool:
    """Whether this worker speaks for those that have the same layers: what all of them would log or count is logged and counted by one."""
    # vLLM writes the rank into its configuration before it makes a layer.
    return int(getattr(vllm_config.parallel_config, "rank", 0) or 0) % int(vllm_config.parallel_config.tensor_parallel_size) == 0


def is_first_worker(vllm_config: Any) -> bool:
    """Whether this worker is the first one of its engine."""
    return int(getattr(vllm_config.parallel_config, "rank", 0) or 0) == 0


def all_ranks_agree(vllm_config: Any, found: bool) -> bool:
    """Whether every tensor-parallel rank says True; called by all of them, at start. A file may come while they look for it, or lie on one host only.

    They must not differ in whether they calibrate: `queries_of_all_ranks` waits for all.
    """
    if int(vllm_config.parallel_config.tensor_parallel_size) == 1:
        return found
    from vllm.distributed import get_tp_group

    everyone = torch.tensor([int(found)], device="cpu")
    torch.distributed.all_reduce(everyone, op=torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    return bool(everyone.item())


def queries_of_all_ranks(vllm_config: Any, queries: Tensor) -> Tensor:
    """Queries for the fit of this rank's kv heads: its own, or where several ranks have the same kv head, those of all of them.

    So ranks with the same kv head fit the same basis, and it suits all of its query heads, however many ranks the next engine has.

    Args:
        queries: ``[n, Hq, D]``, the query heads of this rank.

    Returns:
        ``[n // r, r * Hq, D]`` where ``r`` ranks have the same kv head: every r-th query of each, which takes no more memory.
    """
    world = int(vllm_config.parallel_config.tensor_parallel_size)
    total, first, _ = heads_of_this_rank(vllm_config)
    if total >= world:
        return queries
    from vllm.distributed import get_tp_group

    ranks = world // total
    heads = ranks * queries.shape[1]
    # Latent attention: every rank has the only head there is, so ``first`` is 0 and all of them are taken.
    everyone: Tensor = get_tp_group().all_gather(queries[::ranks].contiguous(), dim=1)
    return everyone[:, first * heads : (first + 1) * heads]
