"""`r8`: page mean and the 8 largest principal directions in int8. The most exact of the eigen records, and the largest."""

from __future__ import annotations

from kvskim.selectors.base import register
from kvskim.selectors.rki4 import PrincipalKeys


@register
class R8(PrincipalKeys):
    """Directions in int8; record and score as in `kvskim.selectors.rki4.PrincipalKeys`."""

    name = "r8"
    converges = True
    vector_bits = 8
