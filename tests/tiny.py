"""A tiny random Llama and a tokenizer that maps every character to a token: enough to run the commands end to end in seconds."""

from __future__ import annotations

import torch


class CharacterTokenizer:
    eos_token_id = 2

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [3 + ord(character) % 90 for character in text]}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(33 + token) for token in ids)


def tiny_model(seed=0):
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def tiny_eval_model(seed=0):
    """The model as evaluators hold it."""
    from kvskim.eval.model import ATTENTION_NAME, EvalModel, register_attention

    register_attention()
    network = tiny_model(seed)
    network.set_attn_implementation(ATTENTION_NAME)
    return EvalModel(network, CharacterTokenizer())


def tiny_folder(path):
    """The model with a tokenizer of words, saved in a folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Punctuation, Sequence, WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{str(digit): digit + 3 for digit in range(10)}, **{chr(97 + i): 13 + i for i in range(26)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Sequence([WhitespaceSplit(), Punctuation()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>").save_pretrained(path)
    tiny_model().save_pretrained(path)
    return str(path)
