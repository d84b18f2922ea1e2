"""Models for `parallel.py`: SmolLM2 with a number of heads that two GPUs divide, and small random models with few kv heads.

    python tests/gpu/vllm/parallel_models.py --smollm2 /tmp/smollm2 --output /tmp/parallel
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 1024
"""Of the random models: few tokens, so that the likeliest ones are not near ties."""


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
    """Write a Llama with seeded random weights. A file, because vLLM's dummy weights depend on how many GPUs share them."""
    hidden, inner = heads * dim, 2048
    generator = torch.Generator().manual_seed(kv_heads)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)).half()

    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, hidden, 32.0), "model.norm.weight": torch.ones(hidden).half()}
    tensors["lm_head.weight"] = matrix(VOCABULARY, hidden, 3.0)
    for layer in range(layers):
        name = f"model.layers.{layer}."
        # Sharp enough that it matters what is attended.
        for projection, rows in (("q_proj", heads * dim), ("k_proj", kv_heads * dim), ("v_proj", kv_heads * dim)):
            tensors[f"{name}self_attn.{projection}.weight"] = matrix(rows, hidden, 1.0 if projection == "v_proj" else 1.4)
        tensors[f"{name}self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        for projection, (rows, columns) in {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}.items():
            tensors[f"{name}mlp.{projection}.weight"] = matrix(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = torch.ones(hidden).half()
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, head_dim=dim,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=VOCABULARY, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=5e5,
        hidden_act="silu", attention_bias=False, tie_word_embeddings=False, torch_dtype="float16", bos_token_id=1, eos_token_id=2,
    )
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


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
