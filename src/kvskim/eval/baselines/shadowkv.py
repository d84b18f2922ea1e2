"""ShadowKV: choose small chunks of the prompt by their mean key, keep outlier chunks, and read keys from a low-rank form.

H. Sun et al., "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference", arXiv:2410.21465.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvskim.eval.baselines.base import Baseline, Option, key_bytes, layer_rotary, top_mask
from kvskim.layout import PAGE_TOKENS

if TYPE_CHECKING:
    from kvskim.eval.model import EvalModel

CHUNK_TOKENS = 8
LOCAL_TOKENS = 32
"""Tokens at the end of the prompt whose keys stay exact."""
OUTLIER_SHARE = 384 / 2048
"""Share of the budget for outlier chunks: 48 chunks of 8 tokens at the paper's 2048 tokens."""
RANK_SHARE = 160 / 1024
"""Rank of the key matrix of all kv heads: the paper's 160 at 8 kv heads of 128 channels."""


@dataclass(frozen=True)
class PromptChunks:
    """``landmarks`` float32 ``[H, C, D]``, mean key of each whole chunk; ``likeness`` ``[H, C]``, the smallest cosine similarity of a
    chunk's key to its mean; ``low_rank`` ``[H, tokens, D]`` in the dtype of the cache, or None where keys are read exactly."""

    landmarks: Tensor
    likeness: Tensor
    low_rank: Tensor | None


def chunk_means(keys: Tensor) -> Tensor:
    """Mean keys ``[H, C, D]`` of whole chunks ``keys [H, 8 C, D]``, float32."""
    return keys.float().unflatten(1, (-1, CHUNK_TOKENS)).mean(2)


def low_rank_keys(keys: Tensor, rank: int) -> Tensor:
    """Best approximation of rank ``rank`` to the matrix ``[L, H D]`` of ``keys [H, L, D]``, all kv heads side by side, float32.

    ``K V V^T`` with the leading eigenvectors V of ``K^T K``: the truncated singular value decomposition of K.
    """
    matrix = keys.float().transpose(0, 1).flatten(1)
    axes = torch.linalg.eigh(matrix.T @ matrix).eigenvectors[:, -rank:]
    return (matrix @ axes @ axes.T).unflatten(1, (keys.shape[0], -1)).transpose(0, 1)


class ShadowKV(Baseline):
    """Every query attends the chunks (8 tokens) whose mean key promises most, and the prompt's outlier chunks, whose keys are least like
    their mean. A chunk's score is the softmax of ``q . mean`` over the chunks, the largest within the group of query heads. Keys of the prompt
    are read from their low-rank form before the rotary embedding, except those of outliers and of the last 32 tokens; values exactly.

    Where it deviates: outliers are counted in the budget, and their number and the rank are the paper's in proportion to the budget and the
    size of the heads; newly decoded tokens are kept, but beyond the newest page they are chosen like the prompt's, in chunks, so
    that the budget holds at every step; the cache of chunks on the GPU changes no result and is left out. A prompt within the
    budget is not compressed. Bytes are counted as if keys were read in full.
    """

    name = "shadowkv"
    known_options: ClassVar[Mapping[str, Option]] = {
        "rank": Option(0, "rank of the keys of all kv heads; 0: the paper's share of kv heads x head dim"),
        "exact_keys": Option(False, "read the exact keys instead of the low-rank ones"),
    }

    def prepare_layer(self, model: EvalModel, layer: int, tokens: int) -> PromptChunks:
        keys = model.keys[layer][:, :tokens]
        chunks = keys[:, : tokens // CHUNK_TOKENS * CHUNK_TOKENS]
        landmarks = chunk_means(chunks)
        likeness = F.cosine_similarity(chunks.float().unflatten(1, (-1, CHUNK_TOKENS)), landmarks[:, :, None], dim=-1).amin(2)
        if self.options["exact_keys"]:
            return PromptChunks(landmarks, likeness, None)
        width = keys.shape[0] * keys.shape[2]
        rank = min(width, self.options["rank"] or max(1, round(RANK_SHARE * width)))
        rotary, positions = layer_rotary(model, layer, f"{self.name} without exact_keys"), torch.arange(tokens, device=keys.device)
        rebuilt = rotary.rotate(low_rank_keys(rotary.rotate(keys.float(), -positions), rank), positions)
        return PromptChunks(landmarks, likeness, rebuilt.to(keys.dtype))

    def restart(self) -> None:
        count = max(1, round(OUTLIER_SHARE * self.budget_tokens / CHUNK_TOKENS))
        self.outliers = {layer: top_mask(-chunks.likeness, count) for layer, chunks in self.prepared.items()}

    def choose(self, layer: int, queries: Tensor, keys: Tensor, position: int, causal: Tensor) -> Tensor:
        newest = position // PAGE_TOKENS * PAGE_TOKENS
        total, prompt = newest // CHUNK_TOKENS, self.prepared[layer].landmarks[:, : newest // CHUNK_TOKENS]
        room, side_bytes = (self.budget_tokens - PAGE_TOKENS) // CHUNK_TOKENS, 0.0
        if total <= room:
            chosen = torch.ones(*queries.shape[:2], total, dtype=torch.bool, device=keys.device)
        else:
            landmarks = torch.cat([prompt, chunk_means(keys[:, prompt.shape[1] * CHUNK_TOKENS : newest])], 1)
            outliers = F.pad(self.outliers[layer][:, :total], (0, total - prompt.shape[1]), value=False)
            logits = torch.einsum("nhgd,hcd->nhgc", queries.float(), landmarks).masked_fill(outliers[:, None], -torch.inf)
            chosen = top_mask(logits.softmax(-1).amax(2).masked_fill(outliers, torch.inf), room)
            side_bytes = key_bytes(total, keys.shape[2])
        older = chosen.repeat_interleave(CHUNK_TOKENS, -1)
        selected = F.pad(older, (0, keys.shape[1] - newest), value=True)
        self.record(layer, queries, keys, causal, selected, side_bytes)
        return selected

    def read_keys(self, layer: int, keys: Tensor) -> Tensor:
        low_rank = self.prepared[layer].low_rank
        if low_rank is None or self.tokens <= self.budget_tokens:
            return keys
        exact = F.pad(self.outliers[layer].repeat_interleave(CHUNK_TOKENS, -1), (0, self.tokens % CHUNK_TOKENS), value=True)
        exact[:, -LOCAL_TOKENS:] = True
        prompt = torch.where(exact[..., None], keys[:, : self.tokens], low_rank)
        return torch.cat([prompt, keys[:, self.tokens :]], 1)
