"""Cells of tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def text(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f}%"


def figure(value: float | None, error: str, digits: int = 2) -> str:
    return f"failed: {error}" if error else text(value, digits)


@dataclass(frozen=True)
class Table:
    """Columns and cells as text."""

    title: str
    columns: tuple[str, ...]
    cells: Sequence[tuple[str, ...]]
