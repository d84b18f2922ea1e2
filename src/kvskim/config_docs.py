"""docs/configuration.md, made from the settings: `python -m kvskim.config_docs` writes it, `--check` tells whether it is up to date."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvskim.config import ENVIRONMENT_VARIABLES, SELECTOR_OPTIONS, SkimConfig
from kvskim.config_legacy import PREDECESSOR_KEYS, PREDECESSOR_VARIABLES
from kvskim.config_model import allowed_values

DEFAULT_PATH = Path("docs/configuration.md")

_HEAD = """\
# Configuration

<!-- Made by `python -m kvskim.config_docs` from the code: change it there. -->

Every setting has a default; `{}` is a complete configuration. `kvskim config` prints the effective one and where each value came from.

## Where settings come from

Later wins:

1. defaults
2. `KVSKIM_CONFIG`: the path of a JSON or YAML file, or an inline JSON object
3. arguments: of the command line, of the engine, or of `SkimConfig`

```sh
export KVSKIM_CONFIG=kvskim.yaml
export KVSKIM_CONFIG='{"rule": "budget", "budget_pages": 64}'
kvskim config rule=threshold tau=0.01
```

Types are strict: `"8"` is not a number and `true` is not 1. Unknown settings, and settings that the chosen rule, selector or variant would
ignore, are errors that name the setting, its value and the fix. When arguments choose another rule, selector or variant than
`KVSKIM_CONFIG`, the settings that belong to the replaced choice are dropped with a warning.
"""

_OPTIONS_HEAD = """\
Under `selector_options`, such as `{"selector": "rki4", "selector_options": {"rank": 4}}`."""

_PREDECESSOR_HEAD = """\
(a path or inline JSON) are understood while `KVSKIM_CONFIG` is not set; a warning
prints the equivalent `KVSKIM_CONFIG`. Other keys are errors. `budget_pages` counts sink and window pages here, on every path."""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(value: object) -> str:
    return f"`{json.dumps(value)}`"


def _settings_table() -> str:
    rows = []
    for name, field in SkimConfig.model_fields.items():
        must_be = allowed_values(name).removeprefix("must be ")
        rows.append([f"`{name}`", _code(field.default), must_be, str(field.description)])
    return _table(["Setting", "Default", "Allowed", "Meaning"], rows)


def _options_table() -> str:
    rows = []
    for selector, options in SELECTOR_OPTIONS.items():
        for name, option in options.items():
            rows.append([f"`{selector}`", f"`{name}`", _code(option.default), option.allowed_text(), option.meaning])
        if not options:
            rows.append([f"`{selector}`", "none", "", "", ""])
    return _table(["Selector", "Option", "Default", "Allowed", "Meaning"], rows)


def _predecessor_table() -> str:
    rows = []
    for key, entry in PREDECESSOR_KEYS.items():
        values = ", ".join(f"{_code(theirs)} → {_code(ours)}" for theirs, ours in entry.values) or "the same value"
        notes = [f"also sets `rule` to `{entry.rule}`"] if entry.rule else []
        notes += [f"only with `score` {' or '.join(f'`{score}`' for score in entry.scores)}"] if entry.scores else []
        rows.append([f"`{key}`", f"`{entry.setting}`", "; ".join([values, *notes])])
    return _table(["Key there", "Setting here", "Values"], rows)


def render() -> str:
    """The whole page as Markdown."""
    variables = [[f"`{name}`", meaning] for name, meaning in ENVIRONMENT_VARIABLES.items()]
    predecessors = " and ".join(f"`{name}`" for name in PREDECESSOR_VARIABLES)
    sections = [
        _HEAD,
        f"## Settings\n\n{_settings_table()}\n",
        f"## Options of the selectors\n\n{_OPTIONS_HEAD}\n\n{_options_table()}\n",
        f"## Environment variables\n\n{_table(['Variable', 'Meaning'], variables)}\n",
        f"## Coming from a predecessor\n\n{predecessors} {_PREDECESSOR_HEAD}\n\n{_predecessor_table()}\n",
    ]
    return "\n".join(sections)


def main(words: Sequence[str]) -> int:
    """Write the page to the path given (default docs/configuration.md), or with `--check` return 1 when that file differs."""
    paths = [Path(word) for word in words if word != "--check"]
    path = paths[0] if paths else DEFAULT_PATH
    if "--check" in words:
        current = path.read_text(encoding="utf-8") if path.is_file() else ""
        if current == render():
            return 0
        print(f"{path} is not up to date: run python -m kvskim.config_docs", file=sys.stderr)
        return 1
    path.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
