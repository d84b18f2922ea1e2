"""A call at the end of loading for latent attention, whose implementation vLLM tells neither its layer nor when the weights are there.

vLLM's loader gives every module that has a ``quant_method`` a chance to process its weights once all are loaded, when all layers exist and before
caches are planned. A module without weights beside the projection that every such implementation is given takes that chance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

MODULE_NAME = "kvskim"


class AfterLoading(QuantizeMethodBase):
    """Has no weights; `process_weights_after_loading` calls back."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        """There are none."""

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("this module computes nothing")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._callback()


@contextlib.contextmanager
def plain_defaults() -> Iterator[None]:
    """torch's own default dtype and device: while vLLM loads, they are those of the model."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def call_after_loading(projection: nn.Module, callback: Callable[[], None]) -> None:
    """Let vLLM's loader call ``callback`` once the weights of the model are there; again where it loads them anew."""
    module = nn.Module()
    module.quant_method = AfterLoading(callback)
    projection.add_module(MODULE_NAME, module)
