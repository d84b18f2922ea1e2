"""Selectors: record formats and their scores. Importing this package imports every file in it, which fills the registry."""

import importlib
import pkgutil

from kvskim.selectors.base import SELECTORS, PageTables, Selector, get_selector, register

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["SELECTORS", "PageTables", "Selector", "get_selector", "register"]
