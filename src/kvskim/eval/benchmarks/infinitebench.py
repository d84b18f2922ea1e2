"""InfiniteBench (Zhang et al. 2024, arXiv 2402.13718) and SCBench (Li et al. 2024, arXiv 2412.10319), which asks several questions about one context.

Fields: InfiniteBench ``context, input, answer, options``; SCBench ``context`` and ``multi_turns``, a list of ``input, answer, options, task``. SCBench is asked
in its mode of one context and independent questions, which is what a cache is reused for. Its two tasks with RepoQA need that benchmark's own
similarity search and are not here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvskim.errors import KvskimError
from kvskim.eval import text_metrics as metrics
from kvskim.eval.benchmarks.files import as_strings, field
from kvskim.eval.sample import Question, Sample
from kvskim.eval.text_metrics import Metric


def first_integer(prediction: str, references: Sequence[str]) -> float:
    """1 if the first run of digits is the reference."""
    found = re.search(r"[0-9]+", prediction)
    return float(found is not None and found[0] == references[0])


def contains(prediction: str, references: Sequence[str]) -> float:
    """1 if the reference stands in the prediction as it is."""
    return float(references[0] in prediction)


def contains_word(prediction: str, references: Sequence[str]) -> float:
    """1 if the reference is one of the words, punctuation aside."""
    return float(references[0] in re.split(r"[\s:\"'.,?!{}]+", prediction))


def name_among_words(prediction: str, references: Sequence[str]) -> float:
    """1 if the first reference, a name in capital letters, is one of the words of the prediction in capital letters, punctuation aside."""
    return contains_word(prediction.upper(), references)


def last_integer(prediction: str, references: Sequence[str]) -> float:
    """1 if the last word is the reference as a number."""
    words = re.split(r"[\s.`'\":]+", prediction.strip(" \n.`'\":"))
    return float(bool(re.fullmatch(r"[-+]?[0-9]+", words[-1])) and int(words[-1]) == int(references[0]))


def first_number(prediction: str, references: Sequence[str]) -> float:
    """1 if the first number, whole or decimal, is the reference."""
    found = re.search(r"[0-9]+(?:\.[0-9]+)?", prediction)
    return float(found is not None and float(found[0]) == float(references[0]))


def leading_numbers(prediction: str, references: Sequence[str]) -> float:
    """Share of the reference numbers that the prediction gives in order before its first mistake."""
    right = 0
    for mine, wanted in zip(re.findall(r"[0-9]+", prediction), references):
        if int(mine) != int(wanted):
            break
        right += 1
    return right / len(references)


def option_or_name(prediction: str, references: Sequence[str]) -> float:
    """1 if the answer begins with the option letter or, after "answer is:" and the like, with the letter or the name. References: letter, then name."""
    letter, *names = references
    text = prediction.strip()
    if text[:2] in (f"{letter}.", f"{letter}:") or text == letter:
        return 1.0
    plain = re.sub(r"[\n`'\"*-]|[Oo]ption", " ", text)
    found = re.search(r"(?:answer is:|is:|answer:)\s*", re.sub(r" +", " ", plain))
    rest = re.sub(r" +", " ", plain)[found.end() :] if found else ""
    return float(any(rest.startswith(name) for name in (letter, *names)) and bool(rest))


# Metric, most tokens of an answer, words before the context, the question.
_BOOK = "Read the book and answer the question briefly.\n\n"
_HIDDEN = "One important thing is hidden in a long text without meaning. Remember it.\n\n"
_FORMS: dict[str, tuple[Metric, int, str, str]] = {
    "passkey": (first_integer, 6, _HIDDEN, "\n\n{input}\nThe pass key is"),
    "number_string": (first_integer, 12, _HIDDEN, "\n\n{input}\nThe sequence of digits is"),
    "kv_retrieval": (contains_word, 50, "Find the value of a key in this JSON object.\n\n", "\n\n{input}"),
    "longbook_sum_eng": (metrics.rouge_l, 1200, "Read the book and write a summary of it.\n\n", "\n\nSummary:"),
    "longbook_choice_eng": (metrics.choice, 40, _BOOK, "\n\nQuestion: {input}\n{options}\nThe letter of the right answer is"),
    "longbook_qa_eng": (metrics.token_f1, 40, _BOOK, "\n\nQuestion: {input}\nAnswer:"),
    "longbook_qa_chn": (metrics.character_f1, 40, "阅读这本书，简短地回答问题。\n\n", "\n\n问题：{input}\n回答："),
    "longdialogue_qa_eng": (
        name_among_words, 40, "One name in this script is hidden by $$MASK$$. Find out who it is.\n\n", "\n\nThe name hidden by $$MASK$$ is",
    ),
    "math_find": (first_number, 3, "{input}\n\n", "\n\n{input}"),
    "math_calc": (leading_numbers, 30_000, "Add up step by step and give the result after every step.\n\n", "\n\nResults after every step:"),
    "code_run": (last_integer, 5, "Work out what a call in this Python code gives.\n\n", "\n\n{input}\nThe returned value is"),
    "code_debug": (
        option_or_name, 5, "One function in this code has an obvious mistake. Which one?\n\n", "\n\n{options}\nGive the letter.\nThe right option is:",
    ),
}
INFINITE_TASKS = tuple(_FORMS)
# The form of InfiniteBench that a task has; None: the context says everything, and the input is the question.
_SHARED: dict[str, tuple[Metric, int, str | None]] = {
    "scbench_kv": (contains, 150, "kv_retrieval"),
    "scbench_prefix_suffix": (contains, 150, None),
    "scbench_vt": (metrics.string_match_all, 30, None),
    "scbench_qa_eng": (metrics.string_match_part, 40, "longbook_qa_eng"),
    "scbench_qa_chn": (metrics.character_f1, 40, "longbook_qa_chn"),
    "scbench_choice_eng": (metrics.choice, 40, "longbook_choice_eng"),
    "scbench_many_shot": (metrics.string_match_part, 10, None),
    "scbench_mf": (first_number, 5, None),
    "scbench_summary": (metrics.rouge_l, 200, None),
    "scbench_passkey": (first_integer, 15, None),
    "scbench_summary_with_needles": (metrics.rouge_l, 800, None),
}
SHARED_TASKS = tuple(name for name in _SHARED if name != "scbench_passkey")
"""``scbench_passkey`` is a kind of turn in ``scbench_summary_with_needles``."""


def _options(task: str, record: Mapping[str, Any], where: str) -> tuple[str, tuple[str, ...]]:
    """The options as lines, and the references that the metric needs."""
    answers = as_strings(field(record, ("answer",), where))
    options = as_strings(record.get("options") or ())
    if not options:
        return "", answers
    lines = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCDEFGH", options))
    if task.endswith(("choice_eng", "code_debug")):
        letters = tuple("ABCDEFGH"[options.index(answer)] for answer in answers if answer in options)
        already = tuple(answer for answer in answers if answer in tuple("ABCDEFGH"[: len(options)]))
        letters = tuple(dict.fromkeys(letters + already))
        if not letters:
            raise KvskimError(f"{where} has a record whose answer {answers[0]!r} is none of its options")
        answers = (letters[0], options["ABCDEFGH".index(letters[0])]) if task.endswith("code_debug") else letters
    return lines, answers


def sample(task: str, record: Mapping[str, Any], where: str) -> Sample:
    """A record of InfiniteBench."""
    metric, limit, before, ask = _FORMS[task]
    lines, references = _options(task, record, where)
    given = str(record.get("input") or "")
    question = ask.replace("{input}", given).replace("{options}", lines)
    return Sample(task, before.replace("{input}", given) + str(field(record, ("context",), where)), (Question(question, references, metric, limit),))


def shared_sample(task: str, record: Mapping[str, Any], where: str) -> Sample:
    """A record of SCBench: all of its turns are questions about the one context."""
    form = _SHARED[task][2]
    before = _FORMS[form][2] if form else ""
    questions = []
    for turn in field(record, ("multi_turns",), where):
        kind = str(turn.get("task") or task)
        metric, limit, _ = _SHARED[kind if kind in _SHARED else task]
        lines, references = _options(task, turn, where)
        ask = _FORMS[form][3] if form else "\n\n{input}"
        questions.append(Question(ask.replace("{input}", str(field(turn, ("input",), where))).replace("{options}", lines), references, metric, limit))
    if not questions:
        raise KvskimError(f"{where} has a record without turns")
    return Sample(task, before + str(field(record, ("context",), where)), tuple(questions))
