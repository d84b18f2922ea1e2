"""Files that commands write: refused before the work starts, not after it."""

from __future__ import annotations

import os
from pathlib import Path

from kvskim.errors import KvskimError


def writable(path: Path, option: str) -> Path:
    """``path``, where a file can be written there; raises KvskimError, naming ``option``, where it can't."""
    folder = path.absolute().parent
    if path.is_dir():
        raise KvskimError(f"{option} {path} is a folder: give the name of a file")
    if not folder.is_dir():
        raise KvskimError(f"{option} {path}: the folder {folder} does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise KvskimError(f"{option} {path} can't be written: give the name of a file in a folder of yours")
    return path


def check_outputs(json_path: Path | None, markdown_path: Path | None, plot_path: Path | None = None) -> None:
    """`writable` for each file that a command was asked for."""
    for option, path in (("--json", json_path), ("--markdown", markdown_path), ("--plot", plot_path)):
        if path is not None:
            writable(path, option)
