"""Greedy decoding under a policy, exact and yet many tokens at a time: earlier answers to the same prompt serve as drafts.

A policy whose choice depends on the prompt and the query only gives the same logits whether tokens are decoded one by one or together. So the answer
of full attention, or of another policy, is offered as a draft, up to the end of a page at a time; what the policy itself would not have written is
thrown away (Leviathan et al. 2023, arXiv 2211.17192, with greedy acceptance). The result is the policy's own greedy answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from kvskim.eval.model import EvalModel
from kvskim.eval.policy import Policy
from kvskim.layout import PAGE_TOKENS

LONGEST_MATCH = 8
"""Tokens of an answer that are looked for in the drafts, to find where one goes on in the same way."""


LEAST_REPEAT = 3
"""Tokens that an answer must repeat of itself or of one beside it, for what came next there to be worth checking."""


def draft(answer: Sequence[int], drafts: Sequence[Sequence[int]], count: int, beside: Sequence[Sequence[int]] = ()) -> list[int]:
    """Up to ``count`` tokens that may follow ``answer``: what follows its longest recent part in one of ``drafts``; may be empty.

    beside: answers that are being written, this one among them, where a part of `LEAST_REPEAT` tokens or more is looked for too: a model that has lost its
    way repeats itself.
    """
    if count < 1:
        return []
    for known in drafts:
        if len(known) > len(answer) and list(known[: len(answer)]) == list(answer):
            return list(known[len(answer) : len(answer) + count])
    for length in range(min(LONGEST_MATCH, len(answer)), 0, -1):
        tail = list(answer[-length:])
        for known in [*drafts, *beside] if length >= LEAST_REPEAT else drafts:
            for start in range(len(known) - length):
                if list(known[start : start + length]) == tail:
                    return list(known[start + length : start + length + count])
    return []


def never(answer: list[int]) -> bool:
    """No answer is settled."""
    return False


def accept(
    answer: list[int], best: Sequence[int], proposed: Sequence[int], limit: int, stop: Collection[int], settled: Callable[[list[int]], bool]
) -> bool:
    """Add to ``answer`` what the model itself writes after a draft was checked; whether the answer has ended.

    Args:
        best: likeliest tokens after the last token of the answer and after each token of the draft.
        proposed: the draft.
    """
    for i, token in enumerate(best):
        if token in stop:
            return True
        answer.append(token)
        if settled(answer) or len(answer) == limit:
            return True
        if i == len(proposed) or proposed[i] != token:
            break
    return False


def greedy(
    model: EvalModel, prompt: Tensor, policy: Policy | None, limit: int, stop: Collection[int] = (), drafts: Sequence[Sequence[int]] = (),
    settled: Callable[[list[int]], bool] = never,
) -> list[int]:
    """The greedy answer to a prompt whose tokens but the last are in the store.

    Args:
        model: holds keys and values of ``prompt[:-1]``, and has room for ``limit`` more tokens.
        prompt: int64 ``[tokens]``. Its last token is decoded under the policy, so every token of the answer comes from a decode step.
        policy: None attends everything.
        limit: most tokens of the answer.
        stop: tokens that end the answer; they are not part of it.
        drafts: answers that this one may resemble. They change the time, not the result; a stateful policy does not use them.
        settled: told the answer so far after every token; true ends it.

    Returns:
        token ids.
    """
    answer: list[int] = []
    sequence = torch.cat([prompt.cpu(), torch.zeros(limit, dtype=torch.int64)])
    position = len(prompt) - 1
    use_drafts = policy is None or not policy.stateful
    while len(answer) < limit:
        room = min(PAGE_TOKENS - 1 - position % PAGE_TOKENS, limit - len(answer) - 1) if use_drafts else 0
        proposed = draft(answer, drafts, room, [answer])
        end = position + 1 + len(proposed)
        sequence[position + 1 : end] = torch.tensor(proposed, dtype=torch.int64)
        best = model.decode(sequence, position, end, policy).argmax(-1).tolist()
        before = len(answer)
        if accept(answer, best, proposed, limit, stop, settled):
            return answer
        sequence[position + 1 : position + 1 + len(answer) - before] = torch.tensor(answer[before:], dtype=torch.int64)
        position += len(answer) - before
    return answer


def first_divergence(model: EvalModel, prompt: Tensor, policy: Policy, reference: Sequence[int]) -> int:
    """How many tokens the policy's greedy answer shares with ``reference``, the greedy answer of full attention, before the first difference."""
    sequence = torch.cat([prompt.cpu(), torch.tensor(reference[:-1], dtype=torch.int64)])
    best = model.decode(sequence, len(prompt) - 1, len(sequence), policy).argmax(-1).tolist()
    return next((i for i, (mine, other) in enumerate(zip(best, reference)) if mine != other), len(reference))
