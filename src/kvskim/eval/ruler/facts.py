"""Questions about made-up companies and people, answered by one document, or by two that have to be joined, among many of the same kind.

RULER takes SQuAD and HotpotQA for these; both are under a licence that asks for more than this project can give, so the documents are generated.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvskim.eval.ruler import words
from kvskim.eval.sample import Question, Sample
from kvskim.eval.text_metrics import string_match_part

ANSWER_TOKENS = 32
_TRADES = ("clocks", "sailing boats", "woollen blankets", "tea", "bicycles", "printing presses", "glass lenses", "violins", "ceramic tiles", "garden tools")
_HOBBIES = ("plays chess", "keeps bees", "collects stamps", "climbs mountains", "grows roses", "restores clocks", "bakes bread", "sings in a choir")


@dataclass(frozen=True)
class GeneratedQuestions:
    """``hops`` 1: a fact of one document. 2: the birthplace of a company's founder, which another document tells."""

    hops: int = 1

    def make(self, random_: random.Random, units: int, context_tokens: int) -> Sample:
        """A sample with ``units`` companies, each with a document of its own and one about its founder."""
        count = max(units, 1)
        companies = words.made_up_names(random_, count)
        people = [f"{a} {b}" for a, b in zip(words.made_up_names(random_, count, 2 if count < 2000 else 4), words.made_up_names(random_, count))]
        towns = words.made_up_names(random_, 2 * count, 4)
        documents = []
        for company, person, seat, birthplace in zip(companies, people, towns[:count], towns[count:]):
            year = random_.randrange(1850, 1990)
            documents.append(
                f"The company {company} makes {random_.choice(_TRADES)} in the town of {seat}. It was founded in {year} by {person}. "
                f"About {random_.randrange(20, 900)} people work there."
            )
            documents.append(
                f"{person} was born in the town of {birthplace} and went to school there. After some years at sea, {person} started a business. "
                f"In free time {person} {random_.choice(_HOBBIES)}."
            )
        asked = random_.randrange(count)
        order = list(range(len(documents)))
        random_.shuffle(order)
        body = "\n\n".join(f"Document {i}:\n{documents[j]}" for i, j in enumerate(order, 1))
        context = f"Answer the question by means of the documents below. Give the answer only, without a sentence around it.\n\n{body}\n\n"
        if self.hops == 1:
            text, answer = f"Question: In which town is the company {companies[asked]}?", towns[asked]
        else:
            text, answer = f"Question: In which town was the founder of the company {companies[asked]} born?", towns[count + asked]
        return Sample("", context, (Question(text, (answer,), string_match_part, ANSWER_TOKENS, "Answer:"),), context_tokens)
