"""A calibration file for a model without weights: one basis, fitted on random keys, for all layers. For timing only.

    python tests/gpu/vllm/random_calibration.py FOLDER_WITH_CONFIG_JSON OUT.safetensors
    python tests/gpu/vllm/random_calibration.py --tpot tpot.py --geom llama8b OUT.safetensors
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path

from kvskim.bench.random_calibration import write_random_calibration


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
    calibration = write_random_calibration(folder, Path(a.out), record_bytes=a.record_bytes)
    heads, dim = calibration.layer(0).mean.shape
    print(f"wrote {a.out}: {len(calibration.layers)} layers, {heads} kv heads, head dim {dim}")


if __name__ == "__main__":
    main()
