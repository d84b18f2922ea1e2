"""A model made by hand that looks values up: its attention finds the key that is asked for, so what an answer needs is known exactly.

One layer, one kv head with two query heads, no positions. The pair "key: value" is one token; "key:" alone is a question, and its query looks for
the pair with that key. The answer to any other token is the end of the text, which the first token of the prompt holds.
"""

from __future__ import annotations

import re
import zlib
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from kvskim.eval.model import EvalModel, _attention

DIM = 64
SHARPNESS = 60.0
BEGIN, END, FILLER = 0, 1, 2


class LookupTokenizer:
    """Tokens by the order in which texts show them. ``pairs[token]`` is (key, value); values are tokens of their own."""

    bos_token_id, eos_token_id = BEGIN, END

    def __init__(self) -> None:
        self.words = ["<begin>", "<end>", "filler"]
        self.ids: dict[str, int] = {}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        pieces = re.findall(r"[\w-]+: \d+|[\w-]+:|\S+", text)
        return {"input_ids": [self._id(piece) for piece in pieces]}

    def _id(self, piece: str) -> int:
        if ":" not in piece:
            return FILLER
        _, _, value = piece.partition(": ")
        for word in (piece, value) if value else (piece,):
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
        return self.ids[piece]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(self.words[i] for i in ids if i > END)


@cache
def _vector(name: str) -> Tensor:
    """The same random unit vector for the same name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return nn.functional.normalize(torch.randn(DIM, generator=generator), dim=0)


class LookupModel(nn.Module):
    """Stands where a transformers model stands in `EvalModel`: ``model.model`` gives hidden states, ``model.lm_head`` logits."""

    def __init__(self, tokenizer: LookupTokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.config = SimpleNamespace(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=DIM, hidden_size=2 * DIM, eos_token_id=END)
        self.config.get_text_config = lambda decoder=True: self.config
        self.layer_idx, self.q_proj = 0, nn.Identity()
        self.unused = nn.Parameter(torch.zeros(1))
        self.fed: list[list[int]] = []
        self.table = torch.zeros(0, DIM)

    def model(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        self.fed.append(input_ids[0].tolist())
        q, k, v = (torch.cat(parts) for parts in zip(*map(self.projected, input_ids.tolist())))
        out, _ = _attention(self, q, k, v, scaling=1.0)
        return SimpleNamespace(last_hidden_state=out.mean(2))

    def projected(self, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Query ``[1, 2, n, D]``, key and value ``[1, 1, n, D]`` of tokens."""
        keys, queries, values = [], [], []
        for token in tokens:
            word = self.tokenizer.words[token]
            key, colon, value = word.partition(":")
            pair = colon and value
            keys.append(_vector(key) if pair else _vector("<end>") if token == BEGIN else torch.zeros(DIM))
            values.append(_vector(value.strip()) if pair else _vector("<end>") if token == BEGIN else torch.zeros(DIM))
            queries.append(SHARPNESS * (_vector(key) if colon and not pair else _vector("<end>")))
        k, v = torch.stack(keys)[None, None], torch.stack(values)[None, None]
        return torch.stack(queries)[None, None].expand(-1, 2, -1, -1), k, v

    def lm_head(self, hidden: Tensor) -> Tensor:
        known = self.table.shape[0]
        fresh = list(enumerate(self.tokenizer.words))[known:]
        rows = [_vector(word) if i == END or (":" not in word and i > FILLER) else torch.zeros(DIM) for i, word in fresh]
        if rows:
            self.table = torch.cat([self.table, torch.stack(rows)])
        return hidden @ self.table.T


def lookup_model() -> EvalModel:
    tokenizer = LookupTokenizer()
    return EvalModel(LookupModel(tokenizer).eval(), tokenizer)
