"""Eigen-decomposition of a symmetric 16 x 16 matrix inside a Triton program, by parallel Jacobi rotations.

Source: Golub and Van Loan, "Matrix Computations", section 8.5 (the symmetric Jacobi method, parallel ordering). A round rotates eight
disjoint pairs of rows at once; fifteen rounds, a sweep, meet every pair once (round-robin tournament).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _partner(turn, i):
    """Whom row ``i`` meets in round ``turn``: 15 stays, i meets the j with i + j = 2 turn (mod 15); who would meet itself meets 15."""
    partner = (2 * turn + 15 - i) % 15
    partner = tl.where(partner == i, 15, partner)
    return tl.where(i == 15, turn, partner)


@triton.jit
def _off_diagonal(a, row, column):
    """Sum of the squares outside the diagonal."""
    return tl.sum(tl.sum(tl.where(row == column, 0.0, a * a), 1), 0)


@triton.jit
def symmetric_eigen(a):
    """Eigenvalues and vectors of ``a``, float32 ``[16, 16]``, symmetric, finite and of a scale whose squares don't overflow.

    Returns ``(diagonalised [16, 16], vectors [16, 16])``: eigenvalue i is ``diagonalised[i, i]``, its vector is column i; in no order.
    It stops when the couplings left are below 1e-4 of the matrix (root of the summed squares), far below what int8 codes resolve; since
    convergence is quadratic they usually are smaller by orders then. That takes four or five sweeps, none for a diagonal matrix, eight at most.
    """
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 16)[None, :]
    u = tl.where(row == column, 1.0, 0.0)
    enough = 1e-8 * tl.sum(tl.sum(a * a, 1), 0)
    sweep = 0
    while (sweep < 8) & (_off_diagonal(a, row, column) > enough):
        for turn in range(0, 15):
            partner = _partner(turn, row)
            met = column == partner
            own = tl.sum(tl.where(row == column, a, 0.0), 1)[:, None]
            other = tl.sum(tl.where(met, tl.sum(tl.where(row == column, a, 0.0), 0)[None, :], 0.0), 1)[:, None]
            # Both halves of a pair must see the same coupling, so that they rotate by exactly opposite angles.
            upper = tl.sum(tl.where(met, a, 0.0), 1)
            lower = tl.sum(tl.where(row == _partner(turn, column), a, 0.0), 0)
            coupling = (0.5 * (upper + lower))[:, None]
            tau = (other - own) / (2.0 * tl.where(coupling == 0.0, 1.0, coupling))
            sign = tl.where(tau > 0.0, 1.0, tl.where(tau < 0.0, -1.0, tl.where(row < partner, 1.0, -1.0)))
            tangent = tl.where(coupling == 0.0, 0.0, sign / (tl.abs(tau) + tl.sqrt(1.0 + tau * tau)))
            cosine = 1.0 / tl.sqrt(1.0 + tangent * tangent)
            rotation = tl.where(row == column, cosine, tl.where(met, tangent * cosine, 0.0))
            a = tl.dot(tl.trans(rotation), tl.dot(a, rotation, input_precision="ieee"), input_precision="ieee")
            u = tl.dot(u, rotation, input_precision="ieee")
        sweep += 1
    return a, u
