"""A small stand-in for vLLM, see tests/vllm/standin/README.md."""

__version__ = "0.24.0"
