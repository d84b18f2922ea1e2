rank, world_size = 0, 1


def get_tensor_model_parallel_rank() -> int:
    return rank


def get_tensor_model_parallel_world_size() -> int:
    return world_size
