"""Latent rows of 576 channels with planted structure, and absorbed queries that look for some of them: what a DeepSeek-V2 layer caches, at random.

Tokens hold hidden factors, of a passage and of words that carry over from those before. A layer of random weights with falling spectra turns them into a
normalised latent of 512 channels and a rotary part of 64. Each head of a query looks for one of a few earlier tokens, by what it sees of its latent and by
its rotary part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvskim.calibration import LayerCalibration, fit_layer
from kvskim.eval.methods import CALIBRATION_TOKENS
from kvskim.layout import PAGE_TOKENS
from kvskim.rotary import Rotary

LATENT, ROTARY, DIM = 512, 64, 576
PLACES = 24
"""Earlier tokens that the heads of one query look for."""
SHARPNESS = 5.0
"""Standard deviation of the logits of a query."""
CARRY, OWN = 0.9, 0.6
"""How much a token carries over from the one before, and how far tokens are from their passage. With these, eight directions hold nearly all of a page,
as they do in trained models."""
PASSAGE = 40
"""Tokens of a passage."""
FACTORS, HEAD_CHANNELS = 64, 48
ROTATION = Rotary(1e4 ** (-torch.arange(0, ROTARY, 2).float() / ROTARY), interleaved=True, first=LATENT)
CALIBRATION_QUERIES = torch.arange(64, CALIBRATION_TOKENS, 4)


class PlantedRows:
    """One random layer, a text of ``pages`` pages, and queries of its last tokens.

    Args:
        heads: query heads.
        seed: of the weights; the text and the text of the calibration have seeds of their own that follow from it.
    """

    def __init__(self, pages: int = 1024, heads: int = 16, queries: int = 16, seed: int = 0) -> None:
        self.heads = heads
        generator = torch.Generator().manual_seed(3 * seed)
        strength = torch.arange(1, FACTORS + 1).float().pow(-0.4)[:, None]
        self.to_latent = torch.randn(FACTORS, LATENT, generator=generator) * strength
        self.to_rotary = torch.randn(FACTORS, ROTARY, generator=generator) * 0.15 * strength
        self.gain = torch.exp(0.5 * torch.randn(LATENT, generator=generator))
        self.to_key = torch.randn(heads, HEAD_CHANNELS, LATENT, generator=generator) / LATENT**0.5
        generator = torch.Generator().manual_seed(3 * seed + 2)
        tokens = PAGE_TOKENS * pages
        hidden, rows = self._text(tokens, generator)
        self.pages = rows.unflatten(0, (pages, 1, PAGE_TOKENS))
        """Rows by page, ``[P, 1, 16, 576]``."""
        self.queries = self._queries(rows, hidden, torch.arange(tokens - queries, tokens), generator)[:, None]
        """Scaled queries ``[N, 1, heads, 576]``."""
        generator = torch.Generator().manual_seed(3 * seed + 1)
        hidden, rows = self._text(CALIBRATION_TOKENS, generator)
        self._fitting = rows, self._queries(rows, hidden, CALIBRATION_QUERIES, generator).transpose(0, 1)

    def calibration(self, record_bytes: int) -> LayerCalibration:
        """Fitted on another text, for all positions of this one."""
        rows, queries = self._fitting
        return fit_layer(
            rows[None], queries, record_bytes=record_bytes, rotary=ROTATION, served_positions=PAGE_TOKENS * len(self.pages),
            query_positions=CALIBRATION_QUERIES,
        )

    def _text(self, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Hidden factors ``[T, FACTORS]`` and cache rows ``[T, 576]``: latents are normalised and rotary parts turned by their positions."""
        passage = torch.randn(-(-tokens // PASSAGE), FACTORS, generator=generator).repeat_interleave(PASSAGE, 0)[:tokens]
        words = torch.randn(tokens, FACTORS, generator=generator)
        for t in range(1, tokens):
            words[t] = CARRY * words[t - 1] + (1 - CARRY**2) ** 0.5 * words[t]
        hidden = passage + OWN * words + 0.3 * torch.randn(tokens, FACTORS, generator=generator)
        latent = hidden @ self.to_latent + 0.5 * torch.randn(tokens, LATENT, generator=generator)
        latent = latent / latent.square().mean(1, keepdim=True).sqrt() * self.gain
        return hidden, ROTATION.rotate(torch.cat([latent, hidden @ self.to_rotary], 1), torch.arange(tokens))

    def _queries(self, rows: Tensor, hidden: Tensor, at: Tensor, generator: torch.Generator) -> Tensor:
        """Scaled queries ``[n, heads, 576]`` of the tokens ``at``."""
        places = (torch.rand(len(at), PLACES, generator=generator) * at[:, None]).long()
        wanted = places.gather(1, torch.randint(PLACES, (len(at), self.heads), generator=generator))
        seen = torch.einsum("hcl,nhl->nhc", self.to_key, rows[wanted, :LATENT] - rows[:, :LATENT].mean(0))
        seen = seen + 0.7 * seen.std() * torch.randn(seen.shape, generator=generator)
        latent = torch.einsum("hcl,nhc->nhl", self.to_key, seen)
        query = torch.cat([latent, 0.05 * hidden[wanted] @ self.to_rotary * float(latent.std())], -1)
        query = ROTATION.rotate(query, at[:, None])
        sample = rows[torch.randint(len(rows), (2048,), generator=generator)]
        return query * (SHARPNESS / (query @ sample.T).std())
