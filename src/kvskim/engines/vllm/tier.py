"""Values, or keys and values, in host memory in vLLM: what a worker of variant ``mem-v`` or ``mem-kv`` has.

The cache spec of an attention layer leaves V out, so vLLM makes twice the blocks of the same memory; with ``mem-kv`` it leaves K out too, but for two
bytes a token, because vLLM plans no blocks for a layer without a cache. What is left out has a place for every block in page-locked host memory,
under vLLM's block ids, so prefix caching, preemption and the reuse of blocks need nothing of it. Two side layers stand beside each attention layer: its
records, and its *residency*, the directory of which pages are hot. vLLM sizes and binds both with the blocks. The hot cache is allocated in vLLM's
profiling run, the host memory when the number of blocks is known. The room for prompts is memory of a step, taken while a layer attends to them. See
docs/how-it-works.md, section "The host tier".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend

from kvskim.config import SkimConfig
from kvskim.engines.vllm.records import RecordsLayer
from kvskim.engines.vllm.support import held_on_host, host_keys_block_refusal
from kvskim.errors import UnsupportedError
from kvskim.layout import PAGE_TOKENS, ceil_div
from kvskim.ops.fetch import FetchScratch, copy_fetched, fetch_scratch
from kvskim.ops.stage import stage
from kvskim.ops.store import store
from kvskim.tier.host_memory import (
    GIB,
    SPARE,
    HostMemory,
    affordable_blocks,
    available_host_memory,
    host_memory_refusal,
    limit_refusal,
    request_refusal,
)
from kvskim.tier.pages import HotCache, hot_slots, join_tier, make_hot_cache

if TYPE_CHECKING:
    from kvskim.engines.vllm.layer_state import LayerState
    from kvskim.engines.vllm.staging import StagedRows

HOT_SHARE = {"mem-v": 0.012, "mem-kv": 0.5}
"""Hot cache, where ``hot_cache_gib`` is not set, as a share of the memory that vLLM gives to its cache. Without keys and values records are all that it
holds besides, and a working set of a twentieth of the pages takes more than their records."""

STEP_MEMORY = 4 * GIB
"""What a step and captured graphs need beside the cache is taken to be less than this, or than a tenth of the memory."""

DIRECTORY_BYTES = 4
"""Of one page of one kv head."""

_MIB = 2**20


class HostCache:
    """What all layers of a worker have in host memory.

    Args:
        vllm_config: of the engine.
        config: of kvskim, variant ``mem-v`` or ``mem-kv``.
        log: takes one line of text.
    """

    def __init__(self, vllm_config: VllmConfig, config: SkimConfig, log: Callable[[str], None]) -> None:
        self.vllm_config, self.config, self._log = vllm_config, config, log
        self.with_keys = config.variant == "mem-kv"
        self._parts = 2 if self.with_keys else 1
        self._what = held_on_host(config.variant)
        self.layers: list[LayerState] = []
        self.scratch: dict[str, FetchScratch] = {}
        """Of each layer, whose copies may be under way while the next layers fetch."""
        self._room_numbers = 0
        """Size of `room`."""
        self._hot: dict[str, HotCache] = {}
        self._memory: dict[str, HostMemory] = {}
        self._kernels = ""
        self._looked = False

    def add(self, layer: LayerState, cache_dtype: torch.dtype) -> RecordsLayer:
        """Take what is on the host out of the cache spec of a layer, and make its residency, a side layer of vLLM's."""
        module = layer.module
        whole_spec = module.get_kv_cache_spec
        left: dict[str, int] = dict(head_size_v=0, **(dict(num_kv_heads=1, head_size=1) if self.with_keys else {}))
        module.get_kv_cache_spec = lambda vllm_config: replace(whole_spec(vllm_config), **left)
        module.attn_backend = keys_only(module.attn_backend)
        residency = RecordsLayer(layer.name, layer.num_kv_heads, DIRECTORY_BYTES, cache_dtype, suffix="kvskim_residency")
        residency.when_bound = functools.partial(self._bind, layer)
        self.layers.append(layer)
        return residency

    # ---- memory ----

    def look_ahead(self, num_kv_heads: int, head_size: int) -> None:
        """Where the number of blocks is given, look whether the host can hold them before any weight is loaded.

        Raises:
            UnsupportedError: it can't.
        """
        blocks = self.vllm_config.cache_config.num_gpu_blocks_override
        if self.layers or self._looked or not blocks:
            return
        self._looked = True
        tokens = blocks * int(self.vllm_config.cache_config.block_size or PAGE_TOKENS)
        layers = int(self.vllm_config.model_config.get_num_layers(self.vllm_config.parallel_config))
        self._refuse(blocks, tokens * num_kv_heads * self._parts * head_size * self._element_size * layers, workers(self.vllm_config))

    def block_bytes(self, *, host: bool, resident: bool = False) -> int:
        """Memory of one block of all layers: on the host what is kept there, on the GPU the rest, records and directory. resident: were all on the GPU."""
        size = int(self.vllm_config.cache_config.block_size)
        total = 0
        for layer in self.layers:
            values = size * layer.num_kv_heads * layer.head_size * self._element_size
            rest = 2 * values if resident else size * self._element_size if self.with_keys else values
            beside = size // PAGE_TOKENS * layer.num_kv_heads * (layer.records.record_bytes + (0 if resident else DIRECTORY_BYTES))
            total += self._parts * values if host else rest + beside
        return total

    @property
    def _element_size(self) -> int:
        return int(self.vllm_config.model_config.dtype.itemsize)

    def allocate(self, kernels: str, rows: int, page_capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate the hot cache, after a look at whether the host can hold all blocks.

        Where the GPU has room for more blocks than the host, as it has with keys on the host too, vLLM is told to make fewer.

        Args:
            kernels: of the operations.
            rows: most rows of a decode launch.
            page_capacity: most pages of a request.
            device: of the cache.
            dtype: of the cache.

        Raises:
            UnsupportedError: the host has too little memory for as many blocks as vLLM may make, or for one request; blocks have another size
                than can be served; or the hot cache would be empty.
        """
        self._kernels = kernels
        size = int(self.vllm_config.cache_config.block_size)
        refusal = host_keys_block_refusal(size) if self.with_keys else None
        if refusal is not None:
            raise UnsupportedError(refusal)
        memory = cache_memory(self.vllm_config, device)
        given = self.config.hot_cache_gib
        hot = int(HOT_SHARE[self.config.variant] * memory if given is None else given * GIB)
        blocks = self._judge(memory, hot)
        heads, dim = max(layer.num_kv_heads for layer in self.layers), max(layer.head_size for layer in self.layers)
        slots = hot_slots(hot, len(self.layers), self._parts, dim, dtype.itemsize)
        if given is not None and slots == 0:
            raise UnsupportedError(f"hot_cache_gib is {given:g}, which is less than one page of each of {len(self.layers)} layers: set a larger hot_cache_gib")
        if given is None and blocks:
            slots = min(slots, blocks * size // PAGE_TOKENS * heads)  # more would stay empty
        slots = max(1, slots)
        self._hot = {layer.name: make_hot_cache(slots, self._parts, layer.head_size, dtype, device) for layer in self.layers}
        self.scratch = {layer.name: fetch_scratch(rows * heads, slots, device) for layer in self.layers}
        self._room_numbers = 2 * page_capacity * PAGE_TOKENS * max(layer.num_kv_heads * layer.head_size for layer in self.layers)

    def _judge(self, memory: int, hot: int) -> int:
        """The number of blocks that vLLM will make at most, lowered to what the host can hold, or refused where that can't be.

        Args:
            memory: bytes that vLLM may give to its cache.
            hot: bytes of the hot cache, which come off it unless vLLM was told how large its cache is.
        """
        cache, on_host, on_gpu = self.vllm_config.cache_config, self.block_bytes(host=True), self.block_bytes(host=False)
        count, size = workers(self.vllm_config), int(cache.block_size)
        affordable = affordable_blocks(on_host, available_host_memory(), count, self.config.host_memory_gib)
        longest = ceil_div(int(self.vllm_config.model_config.max_model_len), size)
        refusal = request_refusal(longest, affordable, size, on_host)
        if refusal is not None:
            raise UnsupportedError(refusal)
        # Told or not, `memory` is the most that there can be; not told, vLLM takes off what a step needs, which nobody knows yet.
        resident = memory // self.block_bytes(host=False, resident=True)
        least = memory
        if not cache.kv_cache_memory_bytes:
            memory = max(0, memory - hot)
            least = memory - max(memory // 10, STEP_MEMORY)
        blocks = cache.num_gpu_blocks_override or memory // on_gpu
        fewer = min(affordable, least // on_gpu)
        # The engine reads the setting after this run, and has the same one where its only worker is in its own process.
        if cache.num_gpu_blocks_override is None and blocks > affordable and count == 1 and fewer >= longest:
            cache.num_gpu_blocks_override = fewer
            more = f"; variant 'fast' has room for about {resident}" if resident > fewer else ""
            self._log(f"the GPU has room for up to {blocks} blocks, and host memory for {affordable}: {fewer} are made{more}")
            return fewer
        self._refuse(blocks, blocks * on_host, count)
        return int(blocks)

    def _refuse(self, blocks: int, needed: int, workers: int, spare: int = SPARE) -> None:
        refusal = limit_refusal(needed, self.config.host_memory_gib, blocks, self._what) or host_memory_refusal(
            needed * workers, available_host_memory(), blocks, self._what, spare
        )
        if refusal is not None:
            raise UnsupportedError(refusal)

    def _bind(self, layer: LayerState) -> None:
        """vLLM has bound the residency of a layer, or unbound it."""
        layer.tier = None
        held = self._memory.pop(layer.name, None)
        if held is not None:
            held.release()
        assert layer.residency is not None
        directory = layer.residency.records
        if directory is None:
            return
        cache = self._hot.get(layer.name)
        if cache is None:
            raise RuntimeError(f"the residency of layer {layer.name} was bound before vLLM's profiling run")
        pages, heads = directory.shape[0], layer.num_kv_heads
        shape, dtype = (pages, heads, self._parts, PAGE_TOKENS, layer.head_size), cache.hot.dtype
        if not self._memory:
            blocks = pages * PAGE_TOKENS // int(self.vllm_config.cache_config.block_size)
            # Since the profiling run compilers, graphs and other processes may have taken a part of what was left to them.
            self._refuse(blocks, blocks * self.block_bytes(host=True), workers=1, spare=SPARE // 2)
        memory = HostMemory(prod(shape) * dtype.itemsize, locked=directory.is_cuda)
        self._memory[layer.name] = memory
        # vLLM profiles in inference mode, and binds outside.
        with torch.inference_mode():
            layer.tier = join_tier(memory.view(shape, dtype), cache, directory.view(torch.int32).view(pages, heads))
            # Made now, and not in a step that is captured.
            _ = layer.tier.value_cache
            if self.with_keys:
                _ = layer.tier.key_cache
            # None yet. Eager steps do not call it with the CUDA kernels, and a captured one can't load a kernel.
            self.scratch[layer.name].fetched_pages.zero_()
            copy_fetched(layer.tier, self.scratch[layer.name], kernels=self._kernels)
        if len(self._memory) == len(self.layers):
            for line in self.lines():
                self._log(line)

    def lines(self) -> list[str]:
        """Where every byte of the cache is, once all is bound."""
        tier = self.layers[0].tier
        assert tier is not None
        size = int(self.vllm_config.cache_config.block_size)
        blocks = tier.pages * PAGE_TOKENS // size
        hot = sum(c.hot.nbytes + c.owner.nbytes + c.stamp.nbytes for c in self._hot.values())
        kept = "records and directory" if self.with_keys else "keys, records and directory"
        on_gpu, on_host = (blocks * self.block_bytes(host=host) for host in (False, True))
        share = tier.slots / (tier.pages * tier.heads)
        return [
            f"{self._what} in host memory, {blocks} blocks of {size} tokens",
            f"  GPU   {on_gpu / GIB:.2f} GiB of {kept}; {hot / _MIB:.1f} MiB of hot cache, {tier.slots} slots a layer ({share:.1%} of all "
            f"pages and kv heads)",
            f"  step  {self.room_bytes / _MIB:.1f} MiB for prompts while a layer attends to them, taken from memory for activations",
            f"  host  {on_host / GIB:.2f} GiB of {self._what}, page-locked",
        ]

    # ---- steps ----

    def store(self, layer: LayerState, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Write what is on the host of the tokens of a step: ``key`` and ``value [T', H, D]`` for ``slot_mapping`` int64 ``[T]``.

        For steps that `SkimState.write` does not write.
        """
        if layer.tier is None:
            raise RuntimeError(f"layer {layer.name} writes {self._what} before vLLM has bound its cache")
        store(layer.tier, value, slot_mapping, keys=key if self.with_keys else None, kernels=self._kernels)

    def room(self, layer: LayerState, block_size: int) -> Tensor:
        """Memory for the keys and values of the longest request in one layer, ``[blocks, 2, block_size, H, D]``; it holds anything, NaN too.

        Taken for the attention of one layer, on the stream that attends and on no other. What else a step needs most memory for is not alive then, so that
        the room adds to the peak of a step only as far as it is larger. The size is always the same: requests of many lengths do not leave the allocator
        blocks of many sizes, the one that it found once it can find again, and memory that does not suffice shows with the first prompt.

        Raises:
            torch.OutOfMemoryError: there is no memory, as for everything else that a step needs.
        """
        hot = self._hot[layer.name].hot
        count = self._blocks(layer, block_size)
        shape = (count, 2, block_size, layer.num_kv_heads, layer.head_size)
        return torch.empty(self._room_numbers, dtype=hot.dtype, device=hot.device)[: prod(shape)].view(shape)

    def measure_room(self, layer: LayerState) -> None:
        """Take the room and give it back where steps with prompts do, for vLLM to see in its profiling run, which is before caches are bound."""
        if layer.tier is None:
            self.room(layer, int(self.vllm_config.cache_config.block_size))

    @property
    def room_bytes(self) -> int:
        """GPU memory of `room`."""
        return self._room_numbers * next(iter(self._hot.values())).hot.itemsize

    def room_blocks(self, block_size: int) -> int:
        """Blocks that `room` has for every layer."""
        return min(self._blocks(layer, block_size) for layer in self.layers)

    def _blocks(self, layer: LayerState, block_size: int) -> int:
        return self._room_numbers // (2 * block_size * layer.num_kv_heads * layer.head_size)

    def stage(self, layer: LayerState, kv_cache: Tensor, rows: StagedRows, room: Tensor) -> None:
        """Copy the contexts of prompt rows together in the room.

        What is left of their blocks is for the tokens of the step, and behind these zero, or what the page of a context has there.
        """
        key_cache, tier = layer.views(kv_cache)
        assert tier is layer.tier
        assert layer.tier is not None
        # Attention may read behind the last token, with no weight: a NaN that another tensor has left there would be its result.
        room.index_fill_(0, rows.last_blocks, 0)
        if rows.has_context:
            keys = None if self.with_keys else key_cache
            stage(layer.tier, keys, rows.block_table, rows.context_lens, rows.starts, room, blocks=rows.blocks, kernels=self._kernels)


@functools.cache
def keys_only(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """A backend whose caches leave values out: ``[blocks, 1, block_size, kv heads, head size]``, of a spec without keys one element a token."""

    class KeysOnly(backend):  # type: ignore[misc, valid-type]
        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
        ) -> tuple[int, ...]:
            blocks, _, *rest = backend.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str)
            return (blocks, 1, *rest)

    return KeysOnly


def cache_memory(vllm_config: VllmConfig, device: torch.device) -> int:
    """Bytes that vLLM may give to its cache, or a little more: what it was told, or what its share of the GPU leaves beside the weights."""
    told = vllm_config.cache_config.kv_cache_memory_bytes
    if told:
        return int(told)
    if device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    return max(0, int(total * vllm_config.cache_config.gpu_memory_utilization) - int(torch.cuda.memory_allocated(device)))


def workers(vllm_config: VllmConfig) -> int:
    """Workers of an engine. They are taken to share one host."""
    parallel: Any = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
