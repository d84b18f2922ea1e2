"""Rotary position embedding as an exact operation on cached keys and queries.

A key that was cached at position ``p`` becomes the key at ``p + offset`` by one more rotation (RoFormer, Su et al. 2021, equation 15), so
calibration can see later positions without a forward pass, and a record can be made in the frame of its page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Rotation speeds of a model's rotary embedding.

    ``inverse_frequency`` float32 ``[rotary_dim / 2]``, radians per position. ``interleaved``: pairs are channels (2i, 2i+1), as in GLM and
    GPT-J; otherwise (i, i + rotary_dim / 2), as in Llama. ``first``: the first rotated channel, behind the latent ones of latent attention.
    Channels before it, and from ``first + 2 * len(inverse_frequency)`` on, are not rotated.
    """

    inverse_frequency: Tensor
    interleaved: bool = False
    first: int = 0

    def rotate(self, x: Tensor, offset: Tensor | int) -> Tensor:
        """Rotate ``x [..., D]`` by ``offset`` positions (an int, or an integer tensor that broadcasts against ``x.shape[:-1]``)."""
        half = self.inverse_frequency.numel()
        end = self.first + 2 * half
        if end > x.shape[-1]:
            raise ValueError(f"the rotary embedding turns {2 * half} channels from {self.first} on; the head has {x.shape[-1]}")
        positions = torch.as_tensor(offset, dtype=torch.float64, device=x.device)
        angle = positions[..., None] * self.inverse_frequency.to(x.device, torch.float64)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        before, turned, rest = x[..., : self.first], x[..., self.first : end], x[..., end:]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = turned[..., :half], turned[..., half:]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([before, turned, rest], -1)
