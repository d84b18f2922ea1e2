"""Rule ``threshold``: attend every page whose estimated group-mean mass is at least tau."""

from __future__ import annotations

import torch
from torch import Tensor

from .ranking import candidate_positions


def threshold_pages(mass: Tensor, candidates: Tensor, tau: float) -> Tensor:
    """How many candidates have at least the mass tau.

    Args:
        mass: rankable float32 [..., P], estimated group-mean mass.
        candidates: int64 [...], how many leading positions of each row are candidates.
        tau: compared in float32, as the kernels do.

    Returns:
        int64 [...].

    Source: docs/how-it-works.md.
    """
    heavy = mass >= torch.tensor(tau, dtype=torch.float32, device=mass.device)
    return (heavy & candidate_positions(mass, candidates)).sum(-1)
