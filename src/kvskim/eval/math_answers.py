"""Equality of the answers of mathematical problems written in LaTeX: the last ``\\boxed{...}``, normalised, then compared as text and as a number.

The normalisation is that of the MATH benchmark (Hendrycks et al. 2021, arXiv 2103.03874): spacing, units, degree and dollar signs, ``\\left`` and ``\\right``,
the ways to write a fraction, and a leading "x =" do not count. Numbers are compared exactly, as fractions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction


def boxed(text: str) -> str | None:
    """Contents of the last ``\\boxed{...}`` or ``\\fbox{...}`` whose braces close; None where there is none."""
    for start in reversed([found.end() for found in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if not depth:
                return text[start:i]
    return None


def final_answer(text: str) -> str:
    """The answer that a solution ends with: boxed, else after the last "answer is", else the last number, else nothing."""
    found = boxed(text)
    if found is not None:
        return found
    said = re.findall(r"answer is:?\s*\$?([^\n$]+)", text, re.IGNORECASE)
    if said:
        return str(said[-1]).strip().rstrip(".")
    numbers = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text)
    return str(numbers[-1]) if numbers else ""


_REMOVED = ("\\left", "\\right", "\\!", "\\,", "\\;", "\\:", "\\ ", "\\$", "$", "\\%", "%", "^\\circ", "^{\\circ}", "\\displaystyle")


def normalise(answer: str) -> str:
    """One spelling for equal answers."""
    text = answer.strip().replace("\n", "")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    for part in _REMOVED:
        text = text.replace(part, "")
    # Units and words: "5\text{ cm}", "\text{even}".
    text = re.sub(r"(?<=\d)\s*\\(?:text|mbox|mathrm)\s*\{[^{}]*\}(?:\^\{?[23]\}?)?$", "", text)
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"^[A-Za-z]\s*=\s*", "", text).replace(" ", "").rstrip(".")
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\w)\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\{([^{}]*)\}(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"^(-?\d+)/(\d+)$", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\{-([^{}]*)\}", r"-\\frac{\1}", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text)
    return re.sub(r"^(-?)\.(\d)", r"\g<1>0.\2", text)


def number(text: str) -> Fraction | None:
    """The value of a normalised answer that is a whole number, a decimal, or a fraction of whole numbers."""
    found = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", text)
    if found and int(found[3]):
        return Fraction(int(found[1] + found[2]), int(found[3]))
    return Fraction(text) if re.fullmatch(r"-?\d+(?:\.\d+)?", text) else None


def equal(a: str, b: str) -> bool:
    """Whether two answers are the same after normalisation."""
    x, y = normalise(a), normalise(b)
    if x == y:
        return True
    p, q = number(x), number(y)
    return p is not None and p == q


def math_equality(prediction: str, references: Sequence[str]) -> float:
    """1 if the final answer of the prediction equals a reference, boxed or bare."""
    answer = final_answer(prediction)
    return float(any(equal(answer, boxed(reference) or reference) for reference in references))
