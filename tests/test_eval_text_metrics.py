"""Text metrics on answers whose score is known, worked out by hand."""

import pytest

from kvskim.eval import text_metrics as metrics
from kvskim.eval.benchmarks import infinitebench, longbench
from kvskim.eval.math_answers import boxed, equal, final_answer, math_equality, normalise


@pytest.mark.parametrize(("metric", "prediction", "references", "score"), [
    (metrics.string_match_all, "It is BLUE and red.", ["blue", "red", "green"], 2 / 3),
    (metrics.string_match_part, "It is BLUE.", ["green", "blue"], 1.0),
    (metrics.string_match_part, "It is grey.", ["green", "blue"], 0.0),
    (metrics.token_f1, "The cat sat", ["a cat, sat!"], 1.0),
    (metrics.token_f1, "cat cat dog", ["cat bird", "no"], 0.4),
    (metrics.token_f1, "cat cat dog", ["cat cat"], 0.8),
    (metrics.token_f1, "", ["x"], 0.0),
    (metrics.character_f1, "北京。", ["北京市"], 0.8),
    (metrics.exact_match, "The Answer.", ["answer"], 1.0),
    (metrics.exact_match, "The answers", ["answer"], 0.0),
    (metrics.rouge_l, "the cat sat on a mat", ["the dog sat on the mat"], 4 / 6),
    (metrics.rouge_l, "a b c d", ["d c b a"], 0.25),
    (metrics.rouge_l, "a b", ["x", "A, b"], 1.0),
    (metrics.rouge_l, "", ["x"], 0.0),
    (metrics.character_rouge_l, "我爱北京", ["我在北京"], 0.75),
    (metrics.right_numbers, "Paragraph 3", ["Paragraph 3"], 1.0),
    (metrics.right_numbers, "3 or 4 or 3", ["3"], 2 / 3),
    (metrics.right_numbers, "13", ["3"], 0.0),
    (metrics.right_numbers, "none", ["3"], 0.0),
    (metrics.code_similarity, "```python\n# it is\nx = 1\ny = 2", ["x = 1"], 1.0),
    (metrics.code_similarity, "z = 9  # nine\nx = 1", ["x = 1"], 1.0),
    (metrics.code_similarity, "abcd", ["abef"], 0.5),
    (metrics.code_similarity, "", ["abef"], 0.0),
    (metrics.choice, "The correct answer is (C). Not A.", ["C"], 1.0),
    (metrics.choice, "**Answer is B**, since A is wrong", ["B"], 1.0),
    (metrics.choice, "A man said: D", ["A"], 1.0),
    (metrics.choice, "Definitely", ["D"], 0.0),
    (metrics.choice, "", ["D"], 0.0),
    (infinitebench.first_integer, "It is 123, not 456", ["123"], 1.0),
    (infinitebench.first_integer, "1234", ["123"], 0.0),
    (infinitebench.contains_word, 'the value is "a-b".', ["a-b"], 1.0),
    (infinitebench.contains_word, "xa-b", ["a-b"], 0.0),
    (infinitebench.contains, "xa-b", ["a-b"], 1.0),
    (infinitebench.name_among_words, "It is Ada, I think.", ["ADA", "ADA KING"], 1.0),
    (infinitebench.name_among_words, "It is Adam.", ["ADA"], 0.0),
    (infinitebench.name_among_words, "King", ["ADA", "KING"], 0.0),
    (longbench.stated_choice, "So: **The correct answer is (C)**.", ["C"], 1.0),
    (longbench.stated_choice, "The correct answer is C, not (A)", ["C"], 1.0),
    (longbench.stated_choice, "A man said C", ["A"], 0.0),
    (infinitebench.last_integer, "f(2) is 4, so: -7.", ["-7"], 1.0),
    (infinitebench.last_integer, "7 apples", ["7"], 0.0),
    (infinitebench.last_integer, "", ["7"], 0.0),
    (infinitebench.first_number, "about 4.50 or 6", ["4.5"], 1.0),
    (infinitebench.first_number, "about 6 or 4.5", ["4.5"], 0.0),
    (infinitebench.leading_numbers, "[1, 2, 4]", ["1", "2", "3", "4"], 0.5),
    (infinitebench.leading_numbers, "1 2 3 4 5", ["1", "2", "3", "4"], 1.0),
    (infinitebench.option_or_name, "B. the_name", ["B", "the_name"], 1.0),
    (infinitebench.option_or_name, "The right answer is: the_name", ["B", "the_name"], 1.0),
    (infinitebench.option_or_name, "A. other", ["B", "the_name"], 0.0),
    (infinitebench.option_or_name, "The answer is:", ["B", "the_name"], 0.0),
])
def test_known_scores(metric, prediction, references, score):
    assert metric(prediction, references) == pytest.approx(score)


def test_classification_shares_its_point_among_the_classes_named():
    classes = ["Human", "Human group", "City"]
    assert metrics.classification("City", ["City"], classes) == 1.0
    assert metrics.classification("City or Human", ["City"], classes) == 0.5
    # "Human" is named only as a part of "Human group".
    assert metrics.classification("Human group", ["Human group"], classes) == 1.0
    assert metrics.classification("Human group", ["Human"], classes) == 0.5
    assert metrics.classification("Nothing", ["City"], classes) == 0.0


def test_the_longest_common_subsequence():
    assert metrics.longest_common_subsequence("AGGTAB", "GXTXAYB") == 4
    assert metrics.longest_common_subsequence("", "abc") == 0


def test_the_last_box_counts_with_all_its_braces():
    assert boxed(r"first \boxed{1}, then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert boxed(r"\boxed{2} and \boxed{3") == "2"
    assert boxed("none") is None
    assert final_answer("So the answer is: 12.\n") == "12"
    assert final_answer("We get 3 and then 1,024") == "1,024"
    assert final_answer("no") == ""


@pytest.mark.parametrize(("a", "b"), [
    (r"\dfrac{1}{2}", r"\frac12"), ("1/2", "0.5"), (r"\frac{-1}{2}", "-0.50"), ("1,000", "1000"), (r"x = 5", "5"), (r"90^\circ", "90"),
    (r"5\text{ cm}^2", "5"),
    (r"\left(1, 2\right)", "(1,2)"),
    (r"\text{even}", "even"), (r"\$12", "12"), (r"50\%", "50"), (".5", "0.5"), (r"\sqrt2", r"\sqrt{2}"), ("007", "7"), ("3.", "3"),
])
def test_equal_answers(a, b):
    assert equal(a, b)
    assert equal(b, a)


@pytest.mark.parametrize(("a", "b"), [("1/2", "2"), ("12", "1.2"), (r"\sqrt{2}", "2"), ("(1,2)", "(2,1)"), ("", "0"), ("-3", "3"), ("1,2", "12")])
def test_different_answers(a, b):
    assert not equal(a, b)


def test_a_solution_is_right_by_its_last_box():
    assert math_equality(r"First \boxed{3}. No: $\boxed{\frac{3}{6}}$", ["0.5"]) == 1.0
    assert math_equality(r"First \boxed{0.5}. No: $\boxed{3}$", ["0.5"]) == 0.0
    assert math_equality("The answer is 204", [r"Thus it is \boxed{204}."]) == 1.0
    assert math_equality("", ["204"]) == 0.0
    assert normalise(r"\mathrm{B}") == "B"
