"""Models for `parallel.py`: SmolLM2 with a number of heads that two GPUs divide, and small ones with few kv heads, random weights and peaked attention.

    python tests/gpu/vllm/parallel_models.py --smollm2 /tmp/smollm2 --output /tmp/parallel
"""

import argparse
import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 1024
"""Of the random models: few tokens, so that the likeliest ones are not near ties, and no more than the hidden size, so that embeddings are orthogonal."""
SHORTEST_TEXT = 2 * VOCABULARY
"""Least tokens of a prompt for the random models."""
MATCH = 20.0
"""Logit of a token that is looked for: its weight is a thousand times that of thousands of others together."""
ROTARY_BASE = 1e20
TURNING = 16
"""The first pairs of rotary channels, so many of them, turn; the others, by less than a tenth of a radian over the longest text, and carry the match."""


def repeat_heads(source: Path, target: Path, kv_heads: int) -> None:
    """Write the model with ``kv_heads`` kv heads: the first ones once more, with their query heads, and outputs that are multiplied by 0.

    It computes what the source computes. SmolLM2 has 9 query heads, which vLLM refuses to split in two.
    """
    config = json.loads((source / "config.json").read_text())
    have, heads, dim = config["num_key_value_heads"], config["num_attention_heads"], config["head_dim"]
    group, more = heads // have, kv_heads - have
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if ".self_attn." in name]:
        old = tensors[name]
        if name.endswith("o_proj.weight"):
            tensors[name] = torch.cat([old, old.new_zeros(old.shape[0], more * group * dim)], 1)
        else:
            rows = more * dim * (group if "q_proj" in name else 1)
            tensors[name] = torch.cat([old, old[:rows]])
    target.mkdir(parents=True, exist_ok=True)
    config.update(num_key_value_heads=kv_heads, num_attention_heads=kv_heads * group)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})
    for file in source.glob("*token*.json"):
        shutil.copy(file, target)


def random_llama(target: Path, kv_heads: int, *, heads: int = 8, layers: int = 4, dim: int = 128) -> None:
    """Write a Llama with seeded random weights whose attention is peaked: each query head looks for one other token of the vocabulary.

    With weights that are only random no page stands out, the rule takes the best of a crowd, and the rounding of an all-reduce decides which: two GPUs
    then give other tokens than one, though both are right. Here a few pages have nearly all of the mass, in every layer, and are chosen in spite of it.

    The embeddings ``e`` are orthogonal. A query head with the permutation ``p`` has the query weights ``K P`` where ``K`` are the key weights of its kv head
    and ``P e(x) = e(p(x))``: the logit of a token ``x`` and an earlier ``p(x)`` is about ``MATCH``, that of others is noise of ``MATCH`` divided by the square
    root of the channels. Each kv head has channels of its own, so that the records of one can't be made or read with the tables of another. A file, because
    vLLM's dummy weights depend on how many GPUs share them.
    """
    hidden, inner = heads * dim, 2048
    generator = torch.Generator().manual_seed(kv_heads)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)

    embeddings = torch.linalg.qr(torch.randn(hidden, VOCABULARY, generator=generator))[0].T * hidden**0.5
    tensors = {"model.embed_tokens.weight": embeddings, "model.norm.weight": torch.ones(hidden), "lm_head.weight": matrix(VOCABULARY, hidden, 3.0)}
    pair = torch.arange(dim) % (dim // 2)
    for layer in range(layers):
        name = f"model.layers.{layer}."
        keys, queries = [], []
        for head in range(kv_heads):
            own = (pair >= TURNING) & (pair % kv_heads == head)
            key = matrix(dim, hidden, (MATCH * dim**0.5 / int(own.sum())) ** 0.5)
            key[~own] = matrix(int((~own).sum()), hidden, 0.3)
            keys.append(key)
            for _ in range(heads // kv_heads):
                wanted = embeddings[torch.randperm(VOCABULARY, generator=generator)]
                query = (key @ wanted.T) @ embeddings / hidden
                query[~own] = matrix(int((~own).sum()), hidden, 0.3)
                queries.append(query)
        # Little is added to the embeddings before the last layer, so that all layers find what they look for; in the last one it counts what they found.
        scale = 2.0 if layer == layers - 1 else 0.2
        tensors[f"{name}self_attn.q_proj.weight"], tensors[f"{name}self_attn.k_proj.weight"] = torch.cat(queries), torch.cat(keys)
        tensors[f"{name}self_attn.v_proj.weight"] = matrix(kv_heads * dim, hidden)
        tensors[f"{name}self_attn.o_proj.weight"] = matrix(hidden, heads * dim, scale)
        for projection, rows, columns, size in (("gate_proj", inner, hidden, 1.0), ("up_proj", inner, hidden, 1.0), ("down_proj", hidden, inner, scale)):
            tensors[f"{name}mlp.{projection}.weight"] = matrix(rows, columns, size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = torch.ones(hidden)
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, head_dim=dim,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=VOCABULARY, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_theta=ROTARY_BASE, hidden_act="silu", attention_bias=False, tie_word_embeddings=False, torch_dtype="float16", bos_token_id=1, eos_token_id=2,
    )
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: tensor.half().contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})


def random_text(tokens: int) -> list[int]:
    """Seeded token ids, all of the vocabulary once in some order, then again in another: any ``SHORTEST_TEXT`` of them have whatever a query looks for."""
    rng = random.Random(0)
    text: list[int] = []
    while len(text) < tokens:
        text += rng.sample(range(VOCABULARY), VOCABULARY)
    return text[:tokens]


def write_models(smollm2: Path, folder: Path) -> dict[str, Path]:
    """The three models: ``smollm2`` with 12 query and 4 kv heads, ``two`` and ``one``: random ones with so many kv heads."""
    models = {name: folder / name for name in ("smollm2", "two", "one")}
    repeat_heads(smollm2, models["smollm2"], 4)
    random_llama(models["two"], 2)
    random_llama(models["one"], 1)
    return models


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--smollm2", required=True, type=Path)
    arguments.add_argument("--output", required=True, type=Path)
    a = arguments.parse_args()
    for name, path in write_models(a.smollm2, a.output).items():
        print(name, path)


if __name__ == "__main__":
    main()
