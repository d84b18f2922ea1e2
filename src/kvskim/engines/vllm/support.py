"""What kvskim can and can't make sparse in vLLM, as pure functions of plain facts: one sentence for each refusal.

Nothing here imports vllm, so every sentence is tested without it. The table in docs/vllm.md follows these functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

OLDEST_VLLM = (0, 24)
NEWEST_VLLM = (0, 33)
MLA_VLLM = (0, 24)
TIER_VLLM = (0, 24)
MLA_HEAD_SIZES = (320, 576)
"""Latent and rotary channels together."""
LARGEST_MLA_GROUP = 128
HEAD_SIZES = (64, 96, 128, 256)
LARGEST_GROUP = 16
BLOCK_SIZES = (16, 32, 64, 128)
HOST_KEYS_BLOCK_SIZE = 16
"""With keys in host memory a block is a page: the rows of a larger one do not lie at one distance from each other."""
DTYPES = ("bfloat16", "float16")
CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "DecodeBenchConnector")
"""KV connectors that move or fill every cache layer of an engine, the records among them, and keep nothing for other engines."""
LOWEST_CAPABILITY = (8, 0)
WORKSPACE_BYTES = 512 * 2**20
"""Most bytes of scores and page tables; everything else that decode works in is small beside them."""

WAY_OUT = "run without kvskim, or set on_unsupported to 'dense' to keep full attention"


@dataclass(frozen=True)
class EngineFacts:
    """What is true for a whole engine.

    ``vllm_version`` as vLLM reports it; ``capability`` of the GPU, (9, 0) for an H200; ``dtype`` of the model without "torch.";
    ``cache_dtype`` as given to vLLM; ``context_parallel``: decode times prefill context-parallel size; ``connector``: KV connector, with its kind of
    store where that is not the memory of this machine; ``fused_mla_update``: vLLM's compiler joins the rotary embedding of latent attention with
    the write into its cache; ``pinned_memory``: the GPU can read and write page-locked memory of the host; ``dense_layers``: some layers are to keep full
    attention.
    """

    vllm_version: str = "0.24.0"
    capability: tuple[int, int] | None = (9, 0)
    dtype: str = "bfloat16"
    cache_dtype: str = "auto"
    block_size: int | None = None
    context_parallel: int = 1
    state_space_layers: bool = False
    reference_window: bool = False
    batch_invariant: bool = False
    overlapped_batches: bool = False
    connector: str | None = None
    sleep_mode: bool = False
    fused_mla_update: bool = False
    variant: str = "fast"
    speculative: bool = False
    pinned_memory: bool = True
    dense_layers: bool = False
    page_frame: bool = False
    selector: str = "sketch"


@dataclass(frozen=True)
class LayerFacts:
    """What is true for one attention layer (on this tensor-parallel rank)."""

    head_size: int = 128
    num_heads: int = 32
    num_kv_heads: int = 8
    attention_type: str = "decoder"
    mla: bool = False
    trained_indexer: bool = False
    alibi: bool = False
    sinks: bool = False
    bidirectional: bool = False
    per_head_scales: bool = False
    shares_cache_of: str | None = None


def parse_version(text: str) -> tuple[int, int] | None:
    """(major, minor) of a version such as "0.24.0" or "0.31.1rc2.dev4+g123"; None where it is no version."""
    match = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def version_refusal(version: str) -> str | None:
    """Why this vLLM version is refused, or None."""
    parsed = parse_version(version)
    if parsed is not None and OLDEST_VLLM <= parsed <= NEWEST_VLLM:
        return None
    return f"kvskim supports vLLM {_dotted(OLDEST_VLLM)} to {_dotted(NEWEST_VLLM)}, and this is vLLM {version}: install a supported version, or {WAY_OUT}"


def engine_refusal(facts: EngineFacts) -> str | None:
    """Why no layer of this engine can be sparse, in one sentence, or None."""
    version = version_refusal(facts.vllm_version)
    if version is not None:
        return version
    if facts.capability is None or facts.capability < LOWEST_CAPABILITY:
        has = "no CUDA GPU" if facts.capability is None else f"a GPU of compute capability {_dotted(facts.capability)}"
        return f"kvskim needs a GPU of compute capability {_dotted(LOWEST_CAPABILITY)} or newer, and this machine has {has}: {WAY_OUT}"
    if facts.dtype not in DTYPES:
        return f"kvskim needs a model in {' or '.join(DTYPES)}, and this one runs in {facts.dtype}: set --dtype, or {WAY_OUT}"
    if facts.cache_dtype not in ("auto", facts.dtype):
        return f"kvskim does not read a KV cache of type {facts.cache_dtype} for a model in {facts.dtype} yet: set --kv-cache-dtype auto, or {WAY_OUT}"
    if facts.block_size is not None and facts.block_size not in BLOCK_SIZES:
        return f"kvskim works with blocks of {_listed(BLOCK_SIZES)} tokens, and --block-size is {facts.block_size}: choose one of them, or {WAY_OUT}"
    if facts.context_parallel > 1:
        return f"kvskim does not work with decode or prefill context parallelism: set both sizes to 1, or {WAY_OUT}"
    if facts.state_space_layers:
        return f"kvskim does not work with models that have state-space layers: {WAY_OUT}"
    if facts.reference_window:
        return f"kvskim does not work with reference sliding-window attention, where decode sees the prompt and a window: {WAY_OUT}"
    if facts.batch_invariant:
        return f"kvskim is not batch invariant: unset VLLM_BATCH_INVARIANT, or {WAY_OUT}"
    if facts.overlapped_batches:
        return f"kvskim does not work with dual batch overlap, because both halves would use one workspace: leave out --enable-dbo, or {WAY_OUT}"
    if facts.connector is not None and facts.connector not in CONNECTORS:
        return f"kvskim can't rely on KV connector {facts.connector} to keep records with their keys: use {' or '.join(CONNECTORS[:2])}, or {WAY_OUT}"
    tier = tier_refusal(facts) if facts.variant != "fast" else None
    if tier is not None:
        return tier
    if facts.page_frame:
        return "selector option page_frame is a reference option without a kernel: leave it out in vLLM"
    if facts.selector == "oracle":
        return "selector 'oracle' keeps no records and is for evaluation only: choose another selector in vLLM"
    return None


def tier_refusal(facts: EngineFacts) -> str | None:
    """Why values, or keys and values, can't be in host memory in this engine, beside what `engine_refusal` says, or None.

    They are where `do_kv_cache_update` puts them: whatever writes, copies or moves the cache of a layer past it would miss them.
    """
    out = "or set variant to 'fast'"
    variant, what = f"variant {facts.variant!r}", held_on_host(facts.variant)
    if parse_version(facts.vllm_version) != TIER_VLLM:
        return f"{variant} works with vLLM {_dotted(TIER_VLLM)} only, and this is vLLM {facts.vllm_version}: install that version, {out}"
    if facts.connector is not None:
        return f"{variant} does not work with KV connectors, which would not move its {what}, and this is {facts.connector}: leave it out, {out}"
    if facts.sleep_mode:
        return f"{variant} does not work with sleep mode, which would not keep its {what}: leave out --enable-sleep-mode, {out}"
    if facts.speculative:
        return f"{variant} does not work with speculative decoding yet: leave out --speculative-config, {out}"
    if facts.dense_layers:
        return f"{variant} keeps the {what} of all layers in host memory, so no layer can keep full attention: leave out dense_layers, {out}"
    if not facts.pinned_memory:
        return f"{variant} needs page-locked host memory, which this machine does not have: set variant to 'fast'"
    if facts.variant == "mem-kv" and facts.block_size is not None:
        return host_keys_block_refusal(facts.block_size)
    return None


def held_on_host(variant: str) -> str:
    """What a variant with host memory has there, as words of a sentence."""
    return "keys and values" if variant == "mem-kv" else "values"


def host_keys_block_refusal(block_size: int) -> str | None:
    """Why keys can't be in host memory with blocks of so many tokens, or None."""
    if block_size == HOST_KEYS_BLOCK_SIZE:
        return None
    return (
        f"variant 'mem-kv' works with blocks of {HOST_KEYS_BLOCK_SIZE} tokens, and these have {block_size}: set --block-size to {HOST_KEYS_BLOCK_SIZE}, "
        "or set variant to 'fast'"
    )


def tier_layer_refusal(dense: dict[str, str], variant: str) -> str | None:
    """Why a model can't have its values, or keys and values, in host memory because of layers that keep full attention, or None.

    Args:
        dense: names of such layers, and why.
        variant: of the configuration.
    """
    for name, reason in dense.items():
        return f"variant {variant!r} needs every layer of a model, and {name} keeps full attention ({reason.split(': ')[0]}): set variant to 'fast'"
    return None


def mla_refusal(facts: EngineFacts) -> str | None:
    """Why latent attention (MLA) can't be sparse in this engine, beside what `engine_refusal` says, or None."""
    if parse_version(facts.vllm_version) != MLA_VLLM:
        only = f"kvskim makes latent attention (MLA) sparse with vLLM {_dotted(MLA_VLLM)} only"
        return f"{only}, and this is vLLM {facts.vllm_version}: install that version, or {WAY_OUT}"
    if facts.variant != "fast":
        return f"variant {facts.variant!r} is not there for latent attention (MLA), whose values are part of its keys: set variant to 'fast'"
    if facts.connector in CONNECTORS[:2]:
        return f"kvskim does not work with KV connector {facts.connector} and latent attention (MLA) yet: leave the connector out, or {WAY_OUT}"
    if facts.fused_mla_update:
        # The joined operation writes into the cache past the implementation: records would not be made.
        setting = '--compilation-config \'{"pass_config": {"fuse_rope_kvcache_cat_mla": false}}\''
        return f"kvskim does not see what vLLM's compiler pass fuse_rope_kvcache_cat_mla writes into the cache: set {setting}, or {WAY_OUT}"
    if facts.sleep_mode:
        # What decode needs is made while vLLM loads, and sleep of level 2 throws away what was made then.
        return f"kvskim does not work with sleep mode and latent attention (MLA) yet: leave out --enable-sleep-mode, or {WAY_OUT}"
    return None


def layer_refusal(facts: LayerFacts) -> str | None:
    """Why this layer can't be sparse although kvskim was asked for, in one sentence, or None."""
    if facts.trained_indexer:
        return f"this model chooses the tokens that it attends with an indexer of its own (DeepSeek V3.2 and later), which kvskim does not replace: {WAY_OUT}"
    if facts.mla and facts.head_size not in MLA_HEAD_SIZES:
        return f"kvskim works with latent rows (MLA) of {_listed(MLA_HEAD_SIZES)} channels, and this model has {facts.head_size}: {WAY_OUT}"
    if facts.mla and facts.num_heads > LARGEST_MLA_GROUP:
        return f"kvskim takes at most {LARGEST_MLA_GROUP} query heads with MLA, and this model has {facts.num_heads} on a rank: {WAY_OUT}"
    if facts.mla:
        return None
    if facts.attention_type != "decoder":
        return f"kvskim works on decoder attention, and this model has {facts.attention_type} attention: {WAY_OUT}"
    if facts.alibi:
        return f"kvskim does not score ALiBi position biases: {WAY_OUT}"
    if facts.sinks:
        return f"kvskim does not add learned attention sinks: {WAY_OUT}"
    if facts.bidirectional:
        return f"kvskim works on causal attention, and this model attends to later tokens: {WAY_OUT}"
    if facts.per_head_scales:
        return f"kvskim does not read a KV cache with one scale per head: {WAY_OUT}"
    if facts.shares_cache_of is not None:
        return f"kvskim does not work with layers that share the KV cache of another layer ({facts.shares_cache_of}): {WAY_OUT}"
    if facts.head_size not in HEAD_SIZES:
        return f"kvskim works with head sizes {_listed(HEAD_SIZES)}, and this model has {facts.head_size}: {WAY_OUT}"
    if facts.num_heads % facts.num_kv_heads:
        return f"kvskim needs the same number of query heads for each kv head, not {facts.num_heads} for {facts.num_kv_heads}: {WAY_OUT}"
    group = facts.num_heads // facts.num_kv_heads
    if group > LARGEST_GROUP:
        return f"kvskim takes at most {LARGEST_GROUP} query heads for each kv head, and this model has {group}: {WAY_OUT}"
    return None


def calibration_refusal(connector: str | None) -> str | None:
    """Why an engine can't calibrate on its own first prompts, or None: what was stored before the end of it would come back with other records."""
    if connector is None or connector not in CONNECTORS[:2]:
        return None
    return (
        f"{connector} would bring back records made before the engine has calibrated itself: make a calibration with `kvskim calibrate` "
        f"and set calibration to its file, or choose selector rki4, which needs none, or {WAY_OUT}"
    )


def mixed_windows_refusal(num_windowed: int, separate_blocks: bool) -> str | None:
    """Why records can't share the blocks of their layer in a model with ``num_windowed`` sliding-window or chunked layers, or None.

    ``separate_blocks``: vLLM's hybrid KV cache manager is on, which gives windowed layers blocks of their own.
    """
    if num_windowed and separate_blocks:
        return (
            f"this model has {num_windowed} sliding-window or chunked layers, whose blocks vLLM manages apart from those of the other layers: "
            f"add --disable-hybrid-kv-cache-manager, or {WAY_OUT}"
        )
    return None


def leading_single_token_rows(starts: Sequence[int] | np.ndarray, num_tokens: int) -> int:
    """How many rows from the first on have exactly one query token: the rows that are decoded sparsely, where row i is token i.

    vLLM puts them first. A row without a token (padding), or beyond ``num_tokens``, ends the run.

    Args:
        starts: ``[rows + 1]``, first token of each row, and the end.
        num_tokens: tokens of the step.
    """
    rows = min(len(starts) - 1, num_tokens)
    single = np.asarray(starts[1 : rows + 1]) == np.arange(1, rows + 1)
    return rows if single.all() else int(single.argmin())


def workspace_rows(num_kv_heads: int, columns: int, page_capacity: int, table_capacity: int, max_rows: int) -> int:
    """Rows that one decode launch serves: all of a step, unless their scores and page tables would take more than `WORKSPACE_BYTES`.

    A larger batch runs in parts of that many rows, which is only reached by hundreds of requests on an engine for very long ones.

    Args:
        num_kv_heads: kv heads on this rank.
        columns: query heads per kv head, padded as scores are stored.
        page_capacity: most pages of a request.
        table_capacity: most entries of a page table.
        max_rows: most rows of a step.
    """
    row = num_kv_heads * (page_capacity * columns * 2 + table_capacity * 4)
    return max(1, min(max_rows, WORKSPACE_BYTES // row))


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
