"""`kvskim config`: the effective configuration, and where each value came from."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvskim.config import ConfigError, LoadedConfig, is_disabled, load_config
from kvskim.config_errors import DEFAULT_ORIGIN
from kvskim.config_sources import parse_assignments


def config(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override KVSKIM_CONFIG, such as tau=0.01 or selector_options.rank=4."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: config, origins, warnings, disabled.")] = False,
) -> None:
    """Print the effective configuration and where each value came from."""
    try:
        loaded = load_config(parse_assignments(settings or []))
        disabled = is_disabled()
    except ConfigError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(_as_json(loaded, disabled))
    else:
        _print_table(loaded, disabled)


def _as_json(loaded: LoadedConfig, disabled: bool) -> str:
    effective = loaded.config.model_dump(mode="json")
    origins = {name: loaded.origins[name] for name in effective}
    return json.dumps({"config": effective, "origins": origins, "warnings": loaded.warnings, "disabled": disabled}, indent=2)


def _print_table(loaded: LoadedConfig, disabled: bool) -> None:
    for warning in loaded.warnings:
        typer.echo(f"Warning: {warning}", err=True)
    if disabled:
        typer.echo("Warning: KVSKIM_DISABLE switches kvskim off; this configuration has no effect", err=True)
    table = Table(title="kvskim configuration", title_justify="left")
    table.add_column("Setting", no_wrap=True)
    table.add_column("Value", overflow="fold")
    table.add_column("From", overflow="fold")
    for name, value in loaded.config.model_dump(mode="json").items():
        origin = loaded.origins[name]
        style = "dim" if origin == DEFAULT_ORIGIN else "bold"
        shown = value if isinstance(value, str) else json.dumps(value)
        table.add_row(name, escape(shown), escape(origin), style=style)
    Console().print(table)
