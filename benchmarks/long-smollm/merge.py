"""Merge an adapter into SmolLM2-135M-Instruct: a Hugging Face folder that transformers, vLLM and `kvskim eval` load.

    python benchmarks/long-smollm/merge.py --model MODEL_FOLDER --adapter adapter.safetensors --output LONG_MODEL_FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from low_rank import merge

from kvskim.errors import KvskimError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of the base model")
    parser.add_argument("--adapter", type=Path, default=Path(__file__).parent / "adapter.safetensors")
    parser.add_argument("--output", required=True, help="folder to write")
    options = parser.parse_args()
    merge(options.model, options.adapter, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    try:
        main()
    except KvskimError as error:
        sys.exit(f"error: {error}")
