"""Triton kernels run in the interpreter where there is no GPU; the choice must be made before triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def refused(monkeypatch, capsys):
    """Checks that a command line is refused in one sentence that has these words."""

    def check(words, *arguments):
        from kvskim import cli

        monkeypatch.setattr("sys.argv", ["kvskim", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        shown = capsys.readouterr()
        assert stop.value.code == 2
        assert words in shown.err
        assert shown.err.strip().count("\n") == 0

    return check
