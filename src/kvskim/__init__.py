"""kvskim: decode long contexts by skimming a compact record of every KV page and attending only the pages that matter."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvskim")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
