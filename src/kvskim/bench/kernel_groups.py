"""What a GPU kernel of a decode step is for, told from its name: linear layers, attention, score, and so on."""

from __future__ import annotations

import re

UNKNOWN = "not recognised"
SMALL = "norms, rotary and other small kernels"

# The first group that knows a name has it. Triton kernels are named after their function, CUDA kernels by their signature.
_GROUPS: tuple[tuple[str, str], ...] = (
    ("encode", r"encode_(sketch|pages)\w*_kernel|^(_encode|_mean|_bounds|_keys|encode_eigen)_kernel"),
    ("score preparation", r"prepare_(sketch|pages|latent)\w*_kernel|^(_prepare|_forced|_join)_kernel"),
    ("score", r"score_(sketch|latent|pages)\w*_kernel|^_score_kernel"),
    ("select", r"\bselect\w*_kernel\b|^(_key|_peak|_row)_kernel"),
    ("attend", r"\battend\w*_kernel\b|^(_split|_merge|latent_split)_kernel"),
    ("values in host memory", r"\b(fetch|stage|store)\w*_kernel\b|^(_mark|_count|_assign|_copy|_stage|_store)_kernel$"),
    # Fused by torch.compile, and named after all that was fused.
    (SMALL, r"^triton_(poi|red|per|mix)_"),
    (
        "step preparation",
        r"^_?(prepare|combine|gather_block_tables|compute_slot_mapping|post_update|get_num_sampled|apply_write|expand_idx_mapping|copy_page_indices|"
        r"expand_page_indices|zero_kv_blocks|batch_memcpy|update)\w*$",
    ),
    ("cache write", r"reshape_and_cache|concat_and_cache|_reshape_cache|write_cache_kernel"),
    ("attention", r"flash|fmha|unified_attention|paged_attention|splitkv|prepare_varlen_num_blocks|merge_attn_states|reduce_segments|^_fwd_(grouped_)?kernel"),
    # How the driver copies a few bytes inside a graph.
    ("copies", r"^memcpy\d*_post$"),
    ("experts", r"moe|expert|topkGating|grouped_topk|router_gemm|(expand|shuffle)InputRows"),
    ("linear layers", r"nvjet|gemm|gemv|cutlass|cublas|splitk|xmma|^triton_tem_|dot_kernel|reduce_1Block"),
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device"),
    (
        "sampling",
        r"arg_?max|gumbel|sampl(e|ing)|soft_?max|sort|top_?[kp]|distribution_|^_(temperature|penalties|min_p|bias|bincount|ranks|bad_words|"
        r"apply_grammar_bitmask|flatten_sampled|fill_logprob_token_ids|num_nans)_kernel",
    ),
    (SMALL, r"norm|rotary|rope|act_and_mul|silu|gelu|embedding|at::native::|at_cuda_detail|at::cuda::"),
)
_ORDER = ("linear layers", "experts", "attention", "cache write", "encode", "score preparation", "score", "select", "values in host memory", "attend")
GROUPS = (*_ORDER, SMALL, "sampling", "step preparation", "communication", "copies", UNKNOWN)
"""All groups, in the order of a table."""
_KNOWN = tuple((group, re.compile(pattern, re.IGNORECASE)) for group, pattern in _GROUPS)


def kernel_group(name: str, category: str = "kernel") -> str:
    """The group of a kernel.

    Args:
        name: as the profiler gives it.
        category: the profiler's: ``kernel``, ``gpu_memcpy`` or ``gpu_memset``.
    """
    if category != "kernel":
        return "copies"
    return next((group for group, pattern in _KNOWN if pattern.search(name)), UNKNOWN)


def short_name(name: str, longest: int = 90) -> str:
    """The name of a kernel without what every name has, cut at so many characters."""
    plain = " ".join(name.removeprefix("void ").replace("(anonymous namespace)::", "").split())
    return plain if len(plain) <= longest else plain[: longest - 3] + "..."
