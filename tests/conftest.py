"""Triton kernels run in the interpreter where there is no GPU; the choice must be made before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
