"""Scores of a predicted text against references, from 0 to 1, as the long-context benchmarks define them.

Sources: string matches: RULER (Hsieh et al. 2024, arXiv 2404.06654); token F1 and answer normalisation: SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250);
ROUGE-L: Lin 2004; the others: LongBench (Bai et al. 2023, arXiv 2308.14508).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

Metric = Callable[[str, Sequence[str]], float]
"""Prediction and references to a score."""


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that the prediction contains, in any case of letters."""
    text = prediction.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if the prediction contains any of the references, in any case of letters."""
    text = prediction.lower()
    return float(any(reference.lower() in text for reference in references))


NEVER_FALLING: frozenset[Metric] = frozenset({string_match_all, string_match_part})
"""Metrics of an answer that cannot fall when the answer goes on: it may end as soon as it scores 1."""


def normal_form(text: str) -> str:
    """Lower case, no punctuation, no English articles, single spaces."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))


def characters(text: str) -> list[str]:
    """Tokens of a text without spaces between words, such as Chinese: its characters, without punctuation, in lower case.

    LongBench cuts words with a dictionary first; characters need none and rank answers alike, but the numbers are not the same.
    """
    return [c for c in text.lower() if not c.isspace() and not unicodedata.category(c).startswith(("P", "S"))]


def overlap_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of tokens as multisets."""
    common = sum((Counter(prediction) & Counter(reference)).values())
    return 2 * common / (len(prediction) + len(reference)) if common else 0.0


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Best `overlap_f1` over the references, of words in `normal_form`."""
    words = normal_form(prediction).split()
    return max(overlap_f1(words, normal_form(reference).split()) for reference in references)


def character_f1(prediction: str, references: Sequence[str]) -> float:
    """Best `overlap_f1` over the references, of `characters`."""
    return max(overlap_f1(characters(prediction), characters(reference)) for reference in references)


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1 if the `normal_form` is that of any reference."""
    return float(normal_form(prediction) in {normal_form(reference) for reference in references})


def longest_common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest sequence that is part of both, gaps allowed."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            above = row[j]
            row[j] = diagonal + 1 if x == y else max(above, row[j - 1])
            diagonal = above
    return row[-1]


def _rouge_l(prediction: Sequence[str], reference: Sequence[str]) -> float:
    common = longest_common_subsequence(prediction, reference)
    return 2 * common / (len(prediction) + len(reference)) if common else 0.0


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """Best F1 of the longest common subsequence of words, over the references."""
    words = re.findall(r"\w+", prediction.lower())
    return max(_rouge_l(words, re.findall(r"\w+", reference.lower())) for reference in references)


def character_rouge_l(prediction: str, references: Sequence[str]) -> float:
    """`rouge_l` of `characters`."""
    return max(_rouge_l(characters(prediction), characters(reference)) for reference in references)


def classification(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """One over the number of classes named in the prediction, if the right one is among them, else 0. A class name inside a longer named one does not count."""
    named = [name for name in classes if name in prediction]
    best = 0.0
    for reference in references:
        left = [name for name in named if name == reference or name not in reference]
        best = max(best, 1 / len(left) if reference in left else 0.0)
    return best


def right_numbers(prediction: str, references: Sequence[str]) -> float:
    """Share of the numbers in the prediction that are the first number of the reference."""
    numbers = re.findall(r"\d+", prediction)
    best = 0.0
    for reference in references:
        wanted = re.search(r"\d+", reference)
        if wanted and numbers:
            best = max(best, numbers.count(wanted[0]) / len(numbers))
    return best


def code_similarity(prediction: str, references: Sequence[str]) -> float:
    """Similarity of the first line of the prediction that is code to the reference: ``1 - indel distance / total length``.

    The indel distance counts inserted and deleted characters, so this is ``2 LCS / (length + length)``. A line with a backquote, ``#`` or ``//`` anywhere
    counts as a fence or a comment.
    """
    lines = [line for line in prediction.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//"))]
    line = lines[0] if lines else ""
    return max(_rouge_l(line, reference) if line or reference else 1.0 for reference in references)


def first_letter(prediction: str, letters: str = "ABCD") -> str | None:
    """The option that an answer names: in parentheses after "answer is" first, else after it, else the first option letter that stands alone."""
    text = prediction.replace("*", "")
    for pattern in (rf"answer is:?\s*\(([{letters}])\)", rf"answer is:?\s*([{letters}])\b", rf"(?<![A-Za-z'])([{letters}])(?![A-Za-z'])"):
        found = re.search(pattern, text)
        if found:
            return found[1]
    return None


def choice(prediction: str, references: Sequence[str], letters: str = "ABCD") -> float:
    """1 if the option letter that the prediction names is a reference."""
    return float(first_letter(prediction, letters) in references)
