"""kvskim in vLLM: an attention backend whose decode rows attend selected pages only. The only code, with the bench, that imports vllm."""
