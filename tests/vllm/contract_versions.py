"""Run the contract tests against the Python files of real vLLM releases, one after the other, and print a table.

    python tests/vllm/contract_versions.py                # the newest release of every supported minor version
    python tests/vllm/contract_versions.py 0.24.0 0.33.0  # these
    make contracts

Each wheel (hundreds of MB) is downloaded without its dependencies, its Python files are unpacked, and the rest is thrown away. No GPU is needed, and
nothing of vLLM that is compiled: `test_vllm_contract.py` puts torch in the place of its two kernels. The Python that runs this needs the packages of
requirements/test.txt; what else vLLM imports comes from `contract_packages.txt`, into a folder of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"
VERSIONS = ("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""The newest release of every minor version that `kvskim.engines.vllm.support` accepts."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def unpack_packages(folder: Path) -> Path:
    """Install what vLLM's imports need into ``folder/packages``, once."""
    target = folder / "packages"
    if not target.is_dir():
        partial = folder / "packages.partial"
        subprocess.run([*PIP, "install", "--no-deps", "--target", str(partial), "-r", str(HERE / "contract_packages.txt")], check=True)
        partial.rename(target)
    return target


def unpack_vllm(version: str, folder: Path) -> Path:
    """Download one release and unpack its Python files and metadata into ``folder/vllm-<version>``, once."""
    target = folder / f"vllm-{version}"
    if not target.is_dir():
        partial = folder / f"vllm-{version}.partial"
        with tempfile.TemporaryDirectory(dir=folder) as downloads:
            subprocess.run([*PIP, "download", "--no-deps", "--no-cache-dir", "--dest", downloads, f"vllm=={version}"], check=True)
            (wheel,) = Path(downloads).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial, [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name])
        partial.rename(target)
    return target


def run_contracts(vllm: Path, packages: Path, version: str) -> tuple[bool, str]:
    """Whether the contract tests pass with this release, and the last line or the failed tests."""
    # Nothing may come from a vLLM that is installed, and nothing may look for a GPU.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (vllm, packages, SOURCE))), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    check = [sys.executable, "-c", "import vllm; print(vllm.__version__, vllm.__file__)"]
    found = subprocess.run(check, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=HERE)
    if f"{version} {vllm}" not in found.stdout:
        return False, f"not importable: {found.stdout.strip().splitlines()[-1]}"
    tests = [str(HERE / f"test_vllm_{name}.py") for name in ("contract", "mla_contract", "tier_contract")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=HERE)
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    passed = re.search(r"\b(\d+) passed", lines[-1])
    # Tests that are all skipped would prove nothing.
    return done.returncode == 0 and passed is not None and int(passed[1]) > 20, "\n".join([lines[-1], *failed])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="releases of vLLM (default: one for each supported minor version)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what was unpacked in this folder, and use what is there")
    arguments = parser.parse_args()
    results: dict[str, tuple[bool, str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        packages = unpack_packages(folder)
        for version in arguments.versions:
            results[version] = run_contracts(unpack_vllm(version, folder), packages, version)
            print(f"vLLM {version:8} {'holds' if results[version][0] else 'BROKEN'}  {results[version][1]}", flush=True)
    return 0 if all(ok for ok, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
