"""The tasks of RULER: what a sample holds, how long it is, and what right and wrong answers score."""

import random
import re
from collections import Counter

import pytest

from kvskim.errors import KvskimError
from kvskim.eval.answers import Answer, score_samples
from kvskim.eval.ruler import TASKS, make_samples, words
from kvskim.eval.ruler.haystack import hidden
from kvskim.eval.ruler.run import in_turn, run_ruler
from kvskim.eval.ruler.tasks import RULER_TASKS
from kvskim.eval.sample import PromptFormat, Question, Sample, check_tasks
from kvskim.eval.text_metrics import string_match_all


class WordTokenizer:
    """A token for each word and each mark: near enough to a real tokenizer in length."""

    bos_token_id, eos_token_id, chat_template = 1, 2, None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [3 + hash(piece) % 1000 for piece in re.findall(r"\w{1,5}|[^\w\s]", text)]}


class ChatTokenizer(WordTokenizer):
    chat_template = "a template"

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        return f"<user> {messages[0]['content'].strip()} <end> <assistant>"


class CharacterTokenizer(WordTokenizer):
    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [3 + ord(character) % 90 for character in text]}


PROMPTS = PromptFormat(WordTokenizer())


def first(name, tokens=2048, **more):
    return next(iter(make_samples(name, tokens, 1, PROMPTS, **more)))


def needles(text):
    return re.findall(r"The secret (number|uuid) of ([\w-]+) is ([\w-]+)\.", text)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_a_sample_fills_its_context_and_is_the_same_again(name, tokens):
    samples = list(make_samples(name, tokens, 3, PROMPTS))
    for sample in samples:
        assert (sample.task, sample.context_tokens) == (name, tokens)
        # Less than full by one unit at most: the largest is a long sentence.
        assert 0.85 * tokens < PROMPTS.length(sample) <= tokens
    again = list(make_samples(name, tokens, 2, PROMPTS))
    assert [s.context for s in again] == [s.context for s in samples[:2]]
    assert [q.references for s in again for q in s.questions] == [q.references for s in samples[:2] for q in s.questions]
    assert len({s.context for s in samples}) == 3
    assert next(iter(make_samples(name, tokens, 1, PROMPTS, seed=1))).context != samples[0].context


@pytest.mark.parametrize("name", TASKS)
def test_every_reference_stands_in_the_context_and_not_in_the_question(name):
    sample = first(name)
    for question in sample.questions:
        assert question.references
        for reference in question.references:
            assert reference in sample.context
            assert reference not in question.text + question.answer_prefix


@pytest.mark.parametrize(("name", "keys", "values", "asked", "uuids"), [
    ("niah_single_1", 1, 1, 1, False), ("niah_single_2", 1, 1, 1, False), ("niah_single_3", 1, 1, 1, True), ("niah_multikey_1", 4, 1, 1, False),
    ("niah_multivalue", 1, 4, 1, False), ("niah_multiquery", 4, 1, 4, False),
])
def test_needles_in_a_haystack(name, keys, values, asked, uuids):
    sample = first(name)
    found = needles(sample.context)
    assert len(found) == keys * values
    assert len({key for _, key, _ in found}) == keys
    question = sample.questions[0]
    wanted = {key for _, key, value in found if value in question.references}
    assert len(wanted) == asked
    assert len(question.references) == asked * values
    assert all(key in question.text and key in question.answer_prefix for key in wanted)
    pattern = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if uuids else r"\d{7}"
    assert all(re.fullmatch(pattern, value) for _, _, value in found)
    assert ("kettle is on the stove" in sample.context) == (name == "niah_single_1")


@pytest.mark.parametrize(("name", "uuids"), [("niah_multikey_2", False), ("niah_multikey_3", True)])
def test_a_haystack_of_needles(name, uuids):
    sample = first(name)
    found = needles(sample.context)
    lines = [line for line in sample.context.split("\n\n")[1].split("\n") if line]
    assert len(lines) == len(found) > 20
    assert len({key for _, key, _ in found}) == len(found)
    (reference,) = sample.questions[0].references
    (key,) = [key for _, key, value in found if value == reference]
    assert key in sample.questions[0].text
    assert ("-" in reference) == uuids


def test_needles_lie_anywhere():
    random_ = random.Random(0)
    places = Counter(hidden(random_, ["a"] * 9, ["X"]).index("X") for _ in range(2000))
    assert set(places) == set(range(10))
    assert min(places.values()) > 130
    assert [w for w in hidden(random_, ["a"] * 5, ["1", "2", "3"], keep_order=True) if w != "a"] == ["1", "2", "3"]


def test_variable_tracking_hands_a_value_on_four_times():
    sample = first("vt")
    body = sample.context.rsplit("Variables get values", 1)[1]
    steps = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", body)
    question = sample.questions[0]
    assert len(steps) == 5
    holder = {}
    for name, source in steps:
        holder[name] = holder.get(source, source)
    value = re.search(r"value (\d+)", question.text)[1]
    assert {name for name, held in holder.items() if held == value} == set(question.references)
    assert len(question.references) == 5


@pytest.mark.parametrize(("tokens", "often", "seldom"), [(1024, 10, 1), (4096, 30, 3)])
def test_common_words_come_often_and_others_seldom(tokens, often, seldom):
    sample = first("cwe", tokens)
    listed = sample.context.rsplit("Here is a numbered list", 1)[1]
    counts = Counter(re.findall(r"\d+\. (\w+)", listed))
    assert sorted(word for word, count in counts.items() if count == often) == sorted(sample.questions[0].references)
    assert set(counts.values()) == {often, seldom}
    assert len(sample.questions[0].references) == 10


@pytest.mark.parametrize("tokens", [512, 8192])
def test_the_three_most_frequent_coded_words_fall_by_the_square_of_their_rank(tokens):
    sample = first("fwe", tokens)
    counts = Counter(sample.context.split("\n\n")[1].split()).most_common()
    assert counts[0][0] == "..."
    assert [word for word, _ in counts[1:4]] == list(sample.questions[0].references)
    assert counts[1][1] > counts[2][1] > counts[3][1] > counts[4][1]
    if tokens > 4096:
        for rank in (2, 3):
            assert counts[rank - 1][1] * rank**2 == pytest.approx(counts[0][1], rel=0.1)


def test_few_coded_words_still_have_three_that_are_most_frequent():
    sample = TASKS["fwe"].make(random.Random(0), 3, 512)
    counts = Counter(sample.context.split("\n\n")[1].split())
    wanted = [counts[word] for word in sample.questions[0].references]
    assert wanted[0] > wanted[1] > wanted[2] > max(count for word, count in counts.items() if word != "..." and word not in sample.questions[0].references)


def test_questions_on_facts_take_one_document_or_two():
    single, double = first("qa_1"), first("qa_2")
    company = re.search(r"the company (\w+)\?", single.questions[0].text)[1]
    assert re.search(rf"The company {company} makes [\w ]+ in the town of {single.questions[0].references[0]}\.", single.context)
    company = re.search(r"the company (\w+) born", double.questions[0].text)[1]
    founder = re.search(rf"The company {company} makes .*? by (\w+ \w+)\.", double.context)[1]
    answer = double.questions[0].references[0]
    (document,) = [d for d in double.context.split("\n\n") if answer in d]
    assert document.split("\n")[1].startswith(f"{founder} was born in the town of {answer} ")
    assert company not in document


def test_recall_asks_several_keys_of_one_list():
    sample = first("kv_recall")
    pairs = dict(re.findall(r"([\w-]+): (\d{4})", sample.context))
    assert len(sample.questions) == 4
    assert all(pairs[q.answer_prefix.rstrip(":")] == q.references[0] for q in sample.questions)


def test_words_do_not_repeat_however_many():
    random_ = random.Random(0)
    for make, count in ((words.key_phrases, 40_000), (words.plain_words, 30_000), (words.made_up_names, 30_000), (words.variable_names, 500)):
        made = make(random_, count)
        assert len(made) == len(set(made)) == count
    with pytest.raises(ValueError, match=r"different keys were asked for"):
        words.key_phrases(random_, 10**8)


def test_a_very_long_sample():
    sample = first("niah_multikey_2", 100_000)
    assert 0.98 * 100_000 < PROMPTS.length(sample) <= 100_000


def test_a_context_that_is_too_short_or_long_and_an_unknown_task_are_one_sentence():
    with pytest.raises(KvskimError, match=r"the task cwe needs at least .* more than the context of 512: use a longer one"):
        list(make_samples("cwe", 512, 1, PromptFormat(CharacterTokenizer())))
    for tokens in (511, 2_000_000):
        with pytest.raises(KvskimError, match=f"--contexts has {tokens}; a context has 512 to 1048576 tokens"):
            first("fwe", tokens)
    with pytest.raises(KvskimError, match=r"--tasks names 'niah'; the tasks are niah_single_1, "):
        check_tasks(["vt", "niah"], list(TASKS))
    assert check_tasks([], list(RULER_TASKS)) == list(RULER_TASKS)
    assert len(RULER_TASKS) == 13


def test_chat_templates():
    sample = Sample("t", "  The context.\n\n", (Question("What?", ("x",), string_match_all, 5, "It is"),))
    (question,) = sample.questions
    plain = WordTokenizer()
    both = PromptFormat(plain, "auto").parts(sample, question)
    assert both[0] == [1, *plain("The context.")["input_ids"]]
    assert both[1] == plain("What? It is")["input_ids"]
    chat = PromptFormat(ChatTokenizer(), "auto").parts(sample, question)
    assert chat[0] == plain("<user> The context.")["input_ids"]
    assert chat[1] == plain("What? <end> <assistant> It is")["input_ids"]
    assert PromptFormat(ChatTokenizer(), "off").parts(sample, question) == both
    assert PromptFormat(ChatTokenizer()).parts(Sample("t", sample.context, sample.questions, plain=True), question) == both
    with pytest.raises(KvskimError, match=r"no chat template: use --chat off"):
        PromptFormat(plain, "on")
    with pytest.raises(KvskimError, match=r"--chat is 'maybe'"):
        PromptFormat(plain, "maybe")


def test_a_context_that_is_too_long_loses_its_middle():
    sample = Sample("t", " ".join(f"w{i}" for i in range(100)), (Question("end", ("x",), string_match_all, 5),))
    before, after = PromptFormat(WordTokenizer(), longest=46).parts(sample, sample.questions[0])
    whole, _ = PROMPTS.parts(sample, sample.questions[0])
    assert len(before) + len(after) + 5 == 46
    assert before == whole[:20] + whole[-20:]
    with pytest.raises(KvskimError, match=r"leave no room for a context in the 7 tokens"):
        PromptFormat(WordTokenizer(), longest=7).parts(sample, sample.questions[0])


ONE = {"niah_multivalue": 0.25, "niah_multiquery": 0.25, "vt": 0.2, "cwe": 0.1, "fwe": 1 / 3}
"""Score of one right reference where a task has more."""


class Scripted:
    """Answers with what a function makes of the question, under two settings."""

    def __init__(self, speak):
        self.speak = speak

    def answers(self, sample):
        for index, question in enumerate(sample.questions):
            yield index, question, 100, Answer("full", "all", " and ".join(question.references), 50.0, 1.0, 1000.0)
            yield index, question, 100, Answer("some", "64 tokens", self.speak(index, question), 4.0, 0.08, 80.0)


@pytest.mark.parametrize(("speak", "scores"), [
    (lambda i, q: "I think: " + ", ".join(q.references).upper(), dict.fromkeys(TASKS, 1.0)),
    (lambda i, q: "I don't know", dict.fromkeys(TASKS, 0.0)),
    (lambda i, q: q.references[0], ONE),
    (lambda i, q: q.references[0] if i == 0 else "", {**ONE, "kv_recall": 0.25}),
])
def test_right_and_wrong_answers_get_exactly_their_score(speak, scores):
    for name in TASKS:
        rows = score_samples(make_samples(name, 2048, 1, PROMPTS), Scripted(speak), log=lambda _: None)
        found = [row.score for row in rows if row.answer.method == "some"]
        assert sum(found) / len(found) == pytest.approx(scores.get(name, 1.0)), name
        assert all(row.score == 1.0 for row in rows if row.answer.method == "full")


def test_the_table_has_the_mean_over_tasks_and_the_difference_to_full_attention(monkeypatch):
    def speak(index, question):
        # All of the four values, none of the single one.
        return " ".join(question.references) if len(question.references) == 4 else ""

    saved = []
    monkeypatch.setattr("kvskim.eval.ruler.run.SAVE_SECONDS", -1.0)
    result, page = run_ruler(
        in_turn(Scripted(speak), PROMPTS), tasks=["niah_single_1", "niah_multivalue"], contexts=[1024, 2048], samples=3, seeds=[0, 1], heads=10,
        log=lambda _: None,
        save=lambda so_far: saved.append((len(so_far["answers"]), "tables" in so_far)),
    )
    # Answers after every sample, and the tables at the end.
    assert saved == [(2 * n, False) for n in range(1, 25)] + [(48, True)]
    assert result["counts"] == {context: {"niah_single_1": 6, "niah_multivalue": 6} for context in ("1024", "2048")}
    assert list(result["tables"]) == ["1024", "2048"]
    full, some = result["tables"]["2048"]
    assert full["score"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert some["tasks"] == {"niah_single_1": 0.0, "niah_multivalue": 1.0}
    assert some["score"]["mean"] == 0.5
    assert some["difference"] == {"mean": -0.5, "low": -0.5, "high": -0.5}
    assert some["bytes_per_step"] == 800.0
    assert len(result["answers"]) == 2 * 2 * 2 * 3 * 2
    assert "## 2048 tokens" in page
    assert "| some | 50.0 [50.0, 50.0] |" in page
    assert "| some | 64 tokens | 0.0 | 100.0 | 50.0 | -50.0 [-50.0, -50.0] | 4.0 | 8.0% | 1 |" in page
