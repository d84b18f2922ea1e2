"""Prompt rows whose values, or keys and values, are in host memory: where both come together while FlashAttention reads them.

FlashAttention reads keys and values through one block table of one cache. What the rows of a step need is copied into a cache
of the usual layout, their blocks one after the other: contexts from GPU memory, hot cache and host, the tokens of the step as they come. Then vLLM's
own attention runs on that cache, with the same block size and so the same sums as on a cache of its own. Rows that don't fit together
are taken in groups, in order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from kvskim.layout import ceil_div


@dataclass(frozen=True)
class StagedRows:
    """Consecutive rows of a step that are staged together.

    Attributes:
        tokens: of the step; the slice is open at the end for the last rows, whose tensors may be longer than the step.
        metadata: FlashAttention's, of these rows; the block table numbers the blocks of the staging cache, for each row none but its own.
        block_table: int32 ``[R, columns]``, where the rows' blocks are.
        context_lens: int32 ``[R]``, tokens ahead of those of the step.
        starts: int32 ``[R + 1]``, first staged block of each row.
        last_blocks: int64, last staged block of each row that has any: the only one with places behind the row's last token, because lengths on the
            host are exact without speculative decoding.
        slots: int64, where in the staging cache each token of the step belongs.
        blocks: staged blocks.
        has_context: whether a row has tokens ahead of those of the step.
    """

    tokens: slice
    metadata: FlashAttentionMetadata
    block_table: Tensor
    context_lens: Tensor
    starts: Tensor
    last_blocks: Tensor
    slots: Tensor
    blocks: int
    has_context: bool


def plan_staging(
    metadata: FlashAttentionMetadata, common: CommonAttentionMetadata, first_row: int, block_size: int, room: int
) -> tuple[StagedRows, ...]:
    """Groups of the rows from ``first_row`` on, in order.

    Args:
        metadata: FlashAttention's, of these rows.
        common: of the whole step.
        first_row: the rows ahead have one token each.
        block_size: tokens of a block.
        room: blocks of the staging cache.

    Raises:
        RuntimeError: vLLM knows no lengths on the host, or a row is longer than the room.
    """
    if common.seq_lens_cpu_upper_bound is None:
        raise RuntimeError("vLLM gives no lengths of its requests on the host, which pages in host memory need for prompts: set variant to 'fast'")
    starts = common.query_start_loc_cpu[first_row : common.num_reqs + 1].tolist()
    lengths = common.seq_lens_cpu_upper_bound[first_row : common.num_reqs].tolist()
    counts = [end - start for start, end in pairwise(starts)]
    blocks = [ceil_div(length, block_size) if count else 0 for length, count in zip(lengths, counts)]
    if max(blocks, default=0) > room:
        raise RuntimeError(f"a prompt of {max(lengths)} tokens does not fit the {room * block_size} that are staged")
    groups: list[list[int]] = [[]]
    for row, own in enumerate(blocks):
        if groups[-1] and sum(blocks[r] for r in groups[-1]) + own > room:
            groups.append([])
        groups[-1].append(row)
    result = []
    for rows in groups:
        if not any(counts[r] for r in rows):
            continue
        whole = len(groups) == 1
        result.append(_stage(metadata, common, first_row, rows, counts, lengths, blocks, block_size, whole))
    if result:
        result[-1] = dataclasses.replace(result[-1], tokens=slice(result[-1].tokens.start, None))
    return tuple(result)


def _stage(
    metadata: FlashAttentionMetadata, common: CommonAttentionMetadata, first_row: int, rows: list[int], counts: list[int], lengths: list[int],
    blocks: list[int], block_size: int, whole: bool,
) -> StagedRows:
    device = common.seq_lens.device
    at = slice(first_row + rows[0], first_row + rows[-1] + 1)
    own = torch.tensor([blocks[r] for r in rows])
    ends = torch.cumsum(own, 0)
    starts = torch.cat([ends.new_zeros(1), ends])
    row_of_token = torch.repeat_interleave(torch.tensor([counts[r] for r in rows]))
    # One copy to the device.
    device_starts, device_rows, last_blocks = _to_device([starts, row_of_token, (ends - 1)[own > 0]], device)
    query_starts = common.query_start_loc[at.start : at.stop + 1]
    query_starts = query_starts - query_starts[0]
    seq_lens = common.seq_lens[at]
    context = seq_lens - (query_starts[1:] - query_starts[:-1])
    # Token i of row r has position context[r] + i - (first token of r).
    base = device_starts[:-1] * block_size + context - query_starts[:-1]
    slots = base[device_rows] + torch.arange(len(row_of_token), device=device)
    # As wide as it was: FlashAttention may look at the shape to decide how it shares out its work. Behind a row's blocks comes its last one: others may
    # not have been written.
    columns = torch.arange(common.block_table_tensor.shape[1], device=device)
    table = torch.minimum(device_starts[:-1, None] + columns, (device_starts[1:, None] - 1).clamp(min=0)).to(torch.int32)
    first_token = int(common.query_start_loc_cpu[at.start])
    tokens = len(row_of_token)
    changes: dict[str, Any] = {"block_table": table}
    if not whole:
        changes |= dict(
            num_actual_tokens=tokens, query_start_loc=query_starts, seq_lens=seq_lens, slot_mapping=common.slot_mapping[first_token : first_token + tokens],
            scheduler_metadata=None,
        )
    return StagedRows(
        tokens=slice(first_token, first_token + tokens),
        metadata=dataclasses.replace(metadata, **changes),
        block_table=common.block_table_tensor[at],
        context_lens=context.to(torch.int32),
        starts=device_starts.to(torch.int32),
        last_blocks=last_blocks,
        slots=slots,
        blocks=int(ends[-1]),
        has_context=any(lengths[r] > counts[r] for r in rows if counts[r]),
    )


def _to_device(numbers: list[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Copies of host numbers that the host does not wait for."""
    packed = torch.cat(numbers)
    packed = packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed.to(device)
    return packed.split([len(part) for part in numbers])
