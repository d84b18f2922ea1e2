"""Errors that a user can do something about. Each message is one sentence that says what is wrong and what to do."""

from __future__ import annotations


class KvskimError(Exception):
    """Base of kvskim's own run-time errors; the command line prints the message and exits with code 2."""


class UnsupportedError(KvskimError, RuntimeError):
    """A model, layer or call that kvskim can't serve sparsely."""


class ModelNotFoundError(KvskimError, RuntimeError):
    """The model, or a package needed to read it, is not there."""
