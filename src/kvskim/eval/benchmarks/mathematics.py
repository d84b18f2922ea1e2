"""MATH-500 (Lightman et al. 2023, arXiv 2305.20050, of MATH, Hendrycks et al. 2021) and AIME: short problems with long answers.

Fields: ``problem`` and ``answer`` (or ``solution`` with the answer boxed); AIME files also say ``question``, ``Problem`` and ``Answer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvskim.eval.benchmarks.files import field
from kvskim.eval.math_answers import math_equality
from kvskim.eval.sample import Question, Sample

LIMIT = 4096
"""Tokens of an answer; models that reason at length need more, see the option ``--limit``."""
_ASK = "\n\nThink step by step, and put the final answer in \\boxed{}.\n"


def sample(task: str, record: Mapping[str, Any], where: str) -> Sample:
    """A problem."""
    problem = field(record, ("problem", "Problem", "question", "Question"), where)
    answer = field(record, ("answer", "Answer", "solution", "Solution"), where)
    return Sample(task, f"Solve this problem.\n\n{problem}", (Question(_ASK, (str(answer),), math_equality, LIMIT),))
