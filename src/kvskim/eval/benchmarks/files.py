"""Records of a data set: from JSON files of a directory, or from the hub where the package ``datasets`` is installed and there is network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvskim.errors import KvskimError

SUFFIXES = (".jsonl", ".json")


def data_file(directory: Path, stems: tuple[str, ...]) -> Path | None:
    """The file of one of these names in a directory or in its folder ``data``; None where there is none."""
    for folder in (directory, directory / "data"):
        for stem in stems:
            for suffix in SUFFIXES:
                if (folder / f"{stem}{suffix}").is_file():
                    return folder / f"{stem}{suffix}"
    return None


def check_directory(directory: Path) -> None:
    """Refuse what is no directory; raises KvskimError."""
    if not directory.is_dir():
        raise KvskimError(f"--data {directory} is no directory: give the one with the benchmark's .jsonl or .json files")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON list, of an object that holds one under ``data``, or of a file with one JSON object a line.

    Raises:
        KvskimError: what is wrong with the file, and in which line: a download that broke off ends in the middle of one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvskimError(f"{path} can't be read ({error}): download it again") from None
    if not text.strip():
        raise KvskimError(f"{path} is empty: download it again")
    if text.startswith("version https://git-lfs"):
        raise KvskimError(f"{path} is a Git LFS pointer, not the data: fetch the file itself with git lfs pull, or download it")
    records = _whole(path, text) if path.suffix == ".json" else _lines(path, text)
    if not records or not all(isinstance(record, dict) for record in records):
        raise KvskimError(f"{path} holds no list of records: each must be a JSON object")
    return records


def _lines(path: Path, text: str) -> list[Any]:
    records = []
    # Not splitlines: texts hold line separators that JSON leaves as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise KvskimError(f"line {number} of {path} is not JSON ({error.msg}): the file is damaged or not complete, download it again") from None
    return records


def _whole(path: Path, text: str) -> list[Any]:
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _lines(path, text)
        raise KvskimError(f"{path} is not JSON ({error.msg} in line {error.lineno}): the file is damaged or not complete, download it again") from None
    if isinstance(read, dict) and isinstance(read.get("data"), list):
        read = read["data"]
    return read if isinstance(read, list) else [read]


def hub_records(name: str, configuration: str | None, split: str, load: Callable[..., Any] | None = None) -> Iterator[Mapping[str, Any]]:
    """Records of a data set on the hub.

    load: in the place of `datasets.load_dataset`.

    Raises:
        KvskimError: the package is missing, or the hub can't be reached or has no such data set.
    """
    if load is None:
        try:
            from datasets import load_dataset as load  # type: ignore[import-not-found,no-redef,unused-ignore]
        except ImportError:
            raise KvskimError(
                "without --data the benchmark comes from the hub, which needs the package datasets: give --data DIR, or run pip install datasets"
            ) from None
    assert load is not None
    where = name if configuration is None else f"{name} ({configuration})"
    try:
        yield from load(name, configuration, split=split)
    except Exception as error:  # whatever the network, the hub and its cache may raise becomes one sentence
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise KvskimError(f"the data set {where} can't be had from the hub ({reason}): give --data DIR with its files") from error


def field(record: Mapping[str, Any], names: tuple[str, ...], where: str) -> Any:
    """The first of these fields that a record has; raises KvskimError that names them."""
    for name in names:
        if record.get(name) is not None:
            return record[name]
    has = ", ".join(map(repr, record)) or "nothing"
    raise KvskimError(f"{where} has a record without {' or '.join(map(repr, names))}; it has {has}: is it another data set?")


def as_strings(value: Any) -> tuple[str, ...]:
    """A reference or a list of them as strings."""
    return tuple(str(item) for item in value) if isinstance(value, (list, tuple)) else (str(value),)
