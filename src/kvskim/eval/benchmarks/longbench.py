"""LongBench (Bai et al. 2023, arXiv 2308.14508) and LongBench v2 (Bai et al. 2024, arXiv 2412.15204).

Fields: version 1 ``context, input, answers, all_classes``, one file a task; version 2 ``context, question, choice_A`` to ``choice_D``, ``answer``, one file.
Metrics are those of the papers; Chinese is cut into characters instead of words, see `text_metrics.characters`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvskim.eval import text_metrics as metrics
from kvskim.eval.benchmarks.files import as_strings, field
from kvskim.eval.sample import Question, Sample
from kvskim.eval.text_metrics import Metric

_DOCUMENT = "Read the text and answer the question as briefly as you can, with a word or a phrase if possible.\n\n"
_CHINESE = "阅读下面的材料，然后用尽量简短的话回答问题。\n\n"
_SUMMARY = "Read the text and write a summary of it.\n\n"
_CODE = "Go on with this code. Write the next line only.\n\n"
_NEXT_LINE = "The next line:\n"
_EXAMPLES = "Here are examples of a task. Do the last one in the same way.\n\n"


@dataclass(frozen=True)
class TaskForm:
    """How a task is asked. ``ask``: the question, with ``{input}``. ``first_line``: only the first line of an answer counts. ``plain``: never as a chat,
    as examples or code are gone on with."""

    metric: Metric | None
    limit: int
    before: str
    ask: str
    first_line: bool = False
    plain: bool = False


_QA = "\n\nQuestion: {input}\nAnswer:"
_ZH_QA = "\n\n问题：{input}\n回答："
FORMS: dict[str, TaskForm] = {
    "narrativeqa": TaskForm(metrics.token_f1, 128, _DOCUMENT, _QA),
    "qasper": TaskForm(metrics.token_f1, 128, _DOCUMENT + 'Say "unanswerable", "yes" or "no" where that is the answer.\n\n', _QA),
    "multifieldqa_en": TaskForm(metrics.token_f1, 64, _DOCUMENT, _QA),
    "multifieldqa_zh": TaskForm(metrics.character_f1, 64, _CHINESE, _ZH_QA),
    "hotpotqa": TaskForm(metrics.token_f1, 32, _DOCUMENT, _QA),
    "2wikimqa": TaskForm(metrics.token_f1, 32, _DOCUMENT, _QA),
    "musique": TaskForm(metrics.token_f1, 32, _DOCUMENT, _QA),
    "dureader": TaskForm(metrics.character_rouge_l, 128, _CHINESE, _ZH_QA),
    "gov_report": TaskForm(metrics.rouge_l, 512, _SUMMARY, "\n\nSummary of the report:"),
    "qmsum": TaskForm(metrics.rouge_l, 512, "Read the minutes of a meeting and answer in a few sentences.\n\n", "\n\nQuery: {input}\nAnswer:"),
    "multi_news": TaskForm(metrics.rouge_l, 512, _SUMMARY, "\n\nSummary of all the news:"),
    "vcsum": TaskForm(metrics.character_rouge_l, 512, "阅读下面的会议记录，写出总结。\n\n", "\n\n会议总结："),
    "trec": TaskForm(None, 64, _EXAMPLES, "\n{input}", first_line=True, plain=True),
    "triviaqa": TaskForm(metrics.token_f1, 32, _EXAMPLES, "\n\n{input}", first_line=True, plain=True),
    "samsum": TaskForm(metrics.rouge_l, 128, _EXAMPLES, "\n\n{input}", first_line=True, plain=True),
    "lsht": TaskForm(None, 64, "下面是一些分类的例子。请按同样的方式做最后一个。\n\n", "\n{input}", first_line=True, plain=True),
    "passage_count": TaskForm(
        metrics.right_numbers, 32, "Some of the paragraphs below are there more than once.\n\n",
        "\n\nHow many different paragraphs are there? Give the number only.\nNumber:",
    ),
    "passage_retrieval_en": TaskForm(
        metrics.right_numbers, 32, "One of the paragraphs below is summed up at the end.\n\n",
        "\n\nSummary: {input}\nWhich paragraph does it sum up? Answer in the form: Paragraph 1.\nAnswer:",
    ),
    "passage_retrieval_zh": TaskForm(
        metrics.right_numbers, 32, "下面若干段落之一的摘要在最后。\n\n", "\n\n摘要：{input}\n这是哪一段的摘要？请按“段落1”的格式回答。\n回答：",
    ),
    "lcc": TaskForm(metrics.code_similarity, 64, _CODE, _NEXT_LINE, plain=True),
    "repobench-p": TaskForm(metrics.code_similarity, 64, _CODE, "{input}" + _NEXT_LINE, plain=True),
}
ENGLISH_EVEN = tuple(name for name in FORMS if name in (
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en",
    "lcc", "repobench-p",
))
"""Tasks that LongBench-E has too, in files named with ``_e``."""


def _first_line(metric: Metric, prediction: str, references: Sequence[str]) -> float:
    return metric(prediction.lstrip("\n").split("\n")[0], references)


def _among(classes: tuple[str, ...], prediction: str, references: Sequence[str]) -> float:
    return metrics.classification(prediction, references, classes)


def stated_choice(prediction: str, references: Sequence[str]) -> float:
    """1 if the answer says, in these words, "The correct answer is (A)" or "The correct answer is A" with the letter of the reference."""
    text = prediction.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return float(found is not None and found[1] in references)


def sample(task: str, record: Mapping[str, Any], where: str) -> Sample:
    """A record of version 1."""
    form = FORMS[task.removesuffix("_e")]
    metric = form.metric or partial(_among, as_strings(field(record, ("all_classes",), where)))
    if form.first_line:
        metric = partial(_first_line, metric)
    question = form.ask.format(input=record.get("input") or "") if "{input}" in form.ask else form.ask
    references = as_strings(field(record, ("answers",), where))
    context = form.before + str(field(record, ("context",), where))
    return Sample(task, context, (Question(question, references, metric, form.limit),), plain=form.plain)


def sample_v2(task: str, record: Mapping[str, Any], where: str) -> Sample:
    """A record of version 2."""
    options = "\n".join(f"({letter}) {field(record, (f'choice_{letter}',), where)}" for letter in "ABCD")
    question = (
        f"\n\nQuestion: {field(record, ('question',), where)}\n{options}\n\nOne option is right. Answer in the form: The correct answer is (A)."
    )
    answer = as_strings(field(record, ("answer",), where))
    return Sample(task, "Read the text and answer the question about it.\n\n" + str(field(record, ("context",), where)), (
        Question(question, answer, stated_choice, 128),
    ))
