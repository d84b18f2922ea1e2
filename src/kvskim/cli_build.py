"""`kvskim build`: compile the CUDA kernels of this machine now instead of at first use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvskim.errors import KvskimError


def build(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the library; the cache directory when not given.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Compile even if an intact library of these sources exists.")] = False,
) -> None:
    """Compile the CUDA kernels (sm_90a, nvcc needed) once for this machine, and print where the library is.

    Other GPUs run the Triton kernels, which need no build.
    """
    from kvskim.ops.cuda.build import BuildError, build_library

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if output is not None and not output.is_dir():
        raise KvskimError(f"--output is {str(output)!r}, which is no folder: create it first")
    try:
        path = build_library(output_directory=output, progress=lambda line: console.print(line, style="dim", markup=False), fresh=fresh)
    except BuildError as error:
        raise KvskimError(str(error)) from error
    typer.echo(path)
