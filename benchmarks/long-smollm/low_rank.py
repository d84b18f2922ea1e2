"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) on every linear layer, and how they are stored and merged.

The sum of weight and adapter is formed anew in every forward pass and rounded to the type of the weight; so training sees the very weights that the merged
model will have. The weights of this model are small beside the tokens of a batch, so this costs less than a second path beside every layer.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvskim.errors import KvskimError

ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
LARGEST_ADAPTER = 16 << 20
"""Bytes: an adapter that travels with the recipe must be smaller."""


class LowRankLinear(nn.Module):
    """``y = x (W + up down)^T``, with ``W [out, in]`` fixed, ``up [out, rank]`` and ``down [rank, in]`` trained in float32. No bias."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        down = (torch.rand(rank, columns, generator=generator) * 2 - 1) / math.sqrt(columns)
        self.down = nn.Parameter(down.to(weight.device))
        self.up = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def merged(self) -> Tensor:
        """The weight with the adapter, in the type of the weight."""
        return (self.weight.float() + self.up @ self.down).to(self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.merged())


def attach(model: nn.Module, rank: int, mlp_rank: int, seed: int = 0) -> dict[str, LowRankLinear]:
    """Give every linear layer of the decoder an adapter that changes nothing yet; everything else is fixed. Returns the layers by name."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    layers: dict[str, LowRankLinear] = {}
    for name, module in list(model.named_modules()):
        kind = name.rpartition(".")[2]
        if kind in ATTENTION_LAYERS + MLP_LAYERS:
            assert isinstance(module, nn.Linear)
            assert module.bias is None
            layers[name] = LowRankLinear(module.weight, rank if kind in ATTENTION_LAYERS else mlp_rank, generator)
            model.set_submodule(name, layers[name])
    size = sum(2 * (layer.up.numel() + layer.down.numel()) for layer in layers.values())
    if size >= LARGEST_ADAPTER:
        raise KvskimError(f"--rank {rank} and --mlp-rank {mlp_rank} make an adapter of {size / 2**20:.1f} MiB; it must be below 16 MiB: use smaller ranks")
    return layers


def save_adapter(path: Path, layers: dict[str, LowRankLinear], metadata: dict[str, str]) -> None:
    """Write the adapters in bfloat16, under a temporary name first, so that a run that is cut off leaves the older file whole."""
    tensors = {}
    for name, layer in layers.items():
        for part in ("up", "down"):
            tensors[f"{name}.{part}"] = getattr(layer, part).detach().to("cpu", torch.bfloat16).contiguous()
    partial = path.with_suffix(".partial")
    save_file(tensors, str(partial), metadata)
    partial.replace(path)


def read_adapter(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors ``NAME.up`` and ``NAME.down`` and the metadata of an adapter file; raises KvskimError where it is none."""
    if not path.exists():
        raise KvskimError(f"there is no adapter at {path}")
    with safe_open(str(path), "pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118 (no mapping)
    if "rope_theta" not in metadata:
        raise KvskimError(f"{path} has no rope_theta in its metadata: give an adapter that train.py has written")
    return tensors, metadata


def load_into(layers: dict[str, LowRankLinear], tensors: dict[str, Tensor]) -> None:
    """Put the tensors of an adapter file into attached layers; raises KvskimError where they don't fit."""
    wanted = {f"{name}.{part}": getattr(layer, part) for name, layer in layers.items() for part in ("up", "down")}
    wrong = sorted(set(wanted) ^ set(tensors)) or sorted(name for name in wanted if wanted[name].shape != tensors[name].shape)
    if wrong:
        raise KvskimError(f"the adapter does not fit this model and these ranks, first at {wrong[0]}: use the ranks it was trained with")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])


def load_base(folder: str, theta: float | None = None, positions: int | None = None, **arguments: Any) -> Any:
    """A causal language model of a Hugging Face folder, with another rotary base and number of positions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if theta is not None:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    if positions is not None:
        config.max_position_embeddings = positions
    return AutoModelForCausalLM.from_pretrained(folder, config=config, local_files_only=True, **arguments)


def merge(folder: str, adapter: Path, output: str) -> None:
    """Write the model at ``folder`` with the adapter in its weights, and its tokenizer, as a Hugging Face folder."""
    from transformers import AutoTokenizer

    tensors, metadata = read_adapter(adapter)
    model = load_base(folder, float(metadata["rope_theta"]), int(metadata["max_position_embeddings"]), dtype=torch.bfloat16)
    names = sorted({key.rpartition(".")[0] for key in tensors})
    with torch.no_grad():
        for name in names:
            linear = model.get_submodule(name)
            change = tensors[f"{name}.up"].float() @ tensors[f"{name}.down"].float()
            linear.weight.copy_((linear.weight.float() + change).to(linear.weight.dtype))
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(output)
