"""A calibration file for a model without weights: one basis, fitted on random keys, for all layers. For timing only.

The time of a decode step does not depend on what is in the tables. The decode-time script fills the cache without a prefill, so the engine could
not calibrate by itself.

    python tests/gpu/vllm/random_calibration.py FOLDER_WITH_CONFIG_JSON OUT.safetensors
    python tests/gpu/vllm/random_calibration.py --tpot tpot.py --geom llama8b OUT.safetensors
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig

from kvskim.calibration import Calibration, fit_layer, model_fingerprint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="folder with the model's config.json")
    parser.add_argument("out")
    parser.add_argument("--tpot", help="the decode-time script, for its geometries")
    parser.add_argument("--geom")
    parser.add_argument("--record-bytes", type=int, default=256)
    a = parser.parse_args()
    folder = Path(a.folder or "")
    if a.tpot:
        spec = importlib.util.spec_from_file_location("tpot", a.tpot)
        assert spec is not None
        assert spec.loader is not None
        tpot = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tpot)
        folder = Path(tempfile.gettempdir(), f"geometry-{a.geom}")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(tpot.GEOMETRIES[a.geom]))
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config()
    heads, dim = config.num_key_value_heads, config.head_dim
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(heads, 1024, dim, generator=generator) * torch.linspace(0.2, 2.0, dim)
    queries = torch.randn(config.num_attention_heads, 64, dim, generator=generator)
    fitted = fit_layer(keys, queries * dim**-0.5, record_bytes=a.record_bytes)
    calibration = Calibration(folder.name, model_fingerprint(config.to_dict()), dict.fromkeys(range(config.num_hidden_layers), fitted))
    calibration.save(a.out)
    print(f"wrote {a.out}: {config.num_hidden_layers} layers, {heads} kv heads, head dim {dim}")


if __name__ == "__main__":
    main()
