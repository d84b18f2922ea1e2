"""Commands for vLLM: `kvskim serve`, `kvskim doctor`, `kvskim check`."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvskim.config import cache_directory, configured_by, is_disabled, load_config, nvcc_path, publish
from kvskim.config_sources import read_settings
from kvskim.engines.vllm.latent_model import backend_name, is_latent
from kvskim.errors import KvskimError

_FAULT = "!"
"""First character of a finding of `kvskim doctor` that is a fault."""
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
ConfigOption = Annotated[str | None, typer.Option("--config", help="Configuration of kvskim: a JSON or YAML file, or inline JSON. Default: KVSKIM_CONFIG.")]


def _vllm_version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        raise KvskimError("vllm is not installed here; install it with: pip install 'kvskim[vllm]'") from None


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The model, as for `vllm serve`.")],
    config: ConfigOption = None,
) -> None:
    """Serve a model with vLLM and sparse decode. Everything else on the line goes to `vllm serve`."""
    _vllm_version()
    rest = list(context.args)
    if is_disabled():
        raise KvskimError("KVSKIM_DISABLE is set; unset it, or use vllm serve")
    if config is not None:
        # vLLM's workers are other processes: they read it from there.
        publish("KVSKIM_CONFIG", config)
    load_config()
    latent = _is_latent(model, _given(rest, "--revision"))
    backend, wanted = _given(rest, "--attention-backend"), backend_name(latent=latent)
    if backend is not None and backend.upper() != wanted:
        raise KvskimError(f"--attention-backend is {backend!r}; kvskim serve sets it to {wanted}: leave it out, or use vllm serve")
    if latent and configured_by() is None:
        # Only where it is configured does kvskim take the place of a backend of vLLM's.
        publish("KVSKIM_CONFIG", "{}")
    backend_arguments = [] if backend is not None else ["--attention-backend", wanted]
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *backend_arguments, *rest])


def _given(arguments: list[str], option: str) -> str | None:
    for i, word in enumerate(arguments):
        if word == option:
            return arguments[i + 1] if i + 1 < len(arguments) else ""
        if word.startswith(f"{option}="):
            return word.split("=", 1)[1]
    return None


def _is_latent(model: str, revision: str | None) -> bool:
    """Whether the model has latent attention. Where its configuration can't be read here, the engine says in one sentence what to do if it has."""
    from transformers import PretrainedConfig

    try:
        settings, _ = PretrainedConfig.get_config_dict(model, **({} if revision is None else {"revision": revision}))
    except (OSError, ValueError):
        return False
    return is_latent(settings)


def doctor() -> None:
    """Say what this machine can run: versions, GPU, kernels, and whether vLLM finds kvskim."""
    console = Console()
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _findings():
        table.add_row(f"[bold]{name}[/bold]", _coloured(value))
    console.print(table)


def _coloured(value: str) -> str:
    """Red where a line reports a fault; a path or a device name that looks like markup stays text."""
    return f"[red]{escape(value[len(_FAULT) :])}[/red]" if value.startswith(_FAULT) else escape(value)


def _findings() -> list[tuple[str, str]]:
    rows = [(name, _installed(name)) for name in ("kvskim", "torch", "triton", "vllm", "transformers")]
    rows.append(("vLLM support", _or_error(_vllm_support)))
    rows.append(("vLLM plugin", _or_error(_plugin)))
    rows.append(("configuration", _or_error(_configuration)))
    rows.append(("GPU", _or_error(_gpu)))
    rows.append(("CUDA compiler", _or_error(lambda: str(nvcc_path() or "not found (only needed to build kernels for another GPU)"))))
    rows.append(("kernels", _or_error(_kernels)))
    rows.append(("cache", _or_error(lambda: str(cache_directory()))))
    return rows


def _or_error(find: Callable[[], str]) -> str:
    try:
        return find()
    except Exception as error:
        return f"{_FAULT}{type(error).__name__}: {error}"


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed" if importlib.util.find_spec(name) is None else "installed, version unknown"


def _vllm_support() -> str:
    from kvskim.engines.vllm.support import NEWEST_VLLM, OLDEST_VLLM, version_refusal

    supported = f"{OLDEST_VLLM[0]}.{OLDEST_VLLM[1]} to {NEWEST_VLLM[0]}.{NEWEST_VLLM[1]}"
    try:
        refusal = version_refusal(version("vllm"))
    except PackageNotFoundError:
        return f"{supported}; vLLM is not installed"
    return refusal or f"{supported}; this version is supported"


def _plugin() -> str:
    found = [entry for entry in entry_points(group="vllm.general_plugins") if entry.value.startswith("kvskim.")]
    if not found:
        return f"{_FAULT}NOT FOUND: kvskim is on the path but not installed (pip install); vLLM will not load it"
    return f"{found[0].name} = {found[0].value}"


def _configuration() -> str:
    if is_disabled():
        return "KVSKIM_DISABLE is set: kvskim is off"
    source = configured_by()
    load_config()
    return f"from {source}: FlashAttention is replaced" if source else "none set: vLLM stays stock unless --attention-backend CUSTOM"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    names = [f"{torch.cuda.get_device_name(i)} (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})" for i in range(torch.cuda.device_count())]
    return ", ".join(sorted(set(names))) + f", {len(names)} in all"


def _kernels() -> str:
    import torch

    from kvskim.ops import dispatch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return f"{dispatch.resolve('auto', device)} on {device.type}"


def check(
    model: Annotated[str, typer.Argument(help="A local model folder with weights and tokenizer.")],
    config: ConfigOption = None,
    context: Annotated[
        int | None, typer.Option(help="Prompt tokens of the longest prompt. Default: 8192, or as many as the model allows.", min=64)
    ] = None,
    prompts: Annotated[int, typer.Option(help="How many prompts.", min=1)] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens decoded for each prompt.", min=2)] = 64,
    eager: Annotated[bool, typer.Option(help="Without CUDA graphs.")] = False,
) -> None:
    """Compare this model in vLLM with full attention: with all pages selected, then with the rule. Proves that sparse attention runs."""
    from kvskim.engines.vllm.support import version_refusal

    refusal = version_refusal(_vllm_version())
    if refusal is not None:
        raise KvskimError(refusal)
    given = None if config is None else read_settings(config, name="--config")[0]
    settings = json.loads(load_config(given).config.model_dump_json())
    if not Path(model, "config.json").is_file():
        raise KvskimError(f"there is no model folder at {model}: give a folder with config.json, weights and tokenizer")
    if not _check(model, settings, context=_context(model, context, tokens), count=prompts, tokens=tokens, eager=eager):
        raise typer.Exit(1)


def _context(model: str, asked: int | None, tokens: int) -> int:
    """Prompt tokens of the longest prompt, so that all that is decoded after it has a position in the model."""
    from kvskim.engines.vllm.check import tokens_beside

    settings = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    positions = settings.get("text_config", settings).get("max_position_embeddings")
    if positions is None:
        return asked or 8192
    room = positions - tokens_beside(tokens)
    if room < 64:
        raise KvskimError(f"--tokens is {tokens}, and the model has {positions} positions: leave 64 of them to the prompt and {positions - room} to the rest")
    if asked is not None and asked > room:
        raise KvskimError(f"--context is {asked}, and the model has {positions} positions, of which decode takes {positions - room}: set it to at most {room}")
    return asked or min(8192, room)


def _check(model: str, settings: dict[str, Any], *, context: int, count: int, tokens: int, eager: bool) -> bool:
    from transformers import AutoTokenizer

    from kvskim.demo.text import reference_text, tokenize
    from kvskim.engines.vllm.check import ALL_PAGES, compare, run_engine, tokens_beside

    ids = tokenize(AutoTokenizer.from_pretrained(model, local_files_only=True), reference_text())
    if len(ids) < context:
        ids = ids * (context // len(ids) + 1)
    lengths = [max(32, context * (i + 1) // count) for i in range(count)]
    batch = [ids[7 * i : 7 * i + length] for i, length in enumerate(lengths)]
    llm = dict(model=model, max_model_len=context + tokens_beside(tokens), enforce_eager=eager, gpu_memory_utilization=0.85, disable_log_stats=True)
    selector: dict[str, Any] = {name: settings[name] for name in ("selector", "selector_options", "calibration", "kernels", "dense_layers") if name in settings}
    warm = ids[: min(len(ids), context)]
    console = Console()
    engines: dict[str, dict[str, Any]] = {
        "full attention": dict(settings=None),
        "all pages selected": dict(settings={**selector, **ALL_PAGES}, warm_prompt=warm, activity=True),
        # Short prompts too shall show what the rule does, unless the user has set a length up to which all is attended.
        "the rule": dict(settings={"full_pages": 0, **settings}, warm_prompt=warm, activity=True),
    }
    runs: list[dict[str, Any]] = []
    for name, options in engines.items():
        # An engine takes one to two minutes to start where vLLM has compiled nothing yet.
        console.print(f"Engine {len(runs) + 1} of 3: {name}", style="dim")
        runs.append(run_engine(llm, batch, max_tokens=tokens, **options))
        console.print(f"  started in {runs[-1]['start_seconds']:.0f} s, answered in {runs[-1]['seconds']:.1f} s", style="dim")
    dense, everything, ruled = runs

    table = Table("run", "equal prompts", "equal tokens", "logprob difference", "pages attended", "mass covered", "seconds")
    table.add_row("FLASH_ATTN", "", "", "", "", "", f"{dense['seconds']:.1f}")
    for name, result in (("all pages", everything), ("the rule", ruled)):
        agreement = compare(dense, result)
        seen = result["activity"]
        share = seen["attended"] / max(1, seen["total"])
        table.add_row(
            name, f"{agreement.equal} of {agreement.prompts}", f"{agreement.tokens:.1%}", f"{agreement.logprob:.3f}", f"{share:.1%}",
            f"{seen['covered'] / max(1, seen['count']):.1%}", f"{result['seconds']:.1f}",
        )
    for line in ruled["log"]:
        console.print(line, highlight=False, markup=False)
    console.print(table)
    seen = ruled["activity"]
    active = bool(ruled["ready"]) and 0 < seen["attended"] < seen["total"]
    everything_equal = compare(dense, everything).tokens
    seen = everything["activity"]
    whole = bool(everything["ready"]) and 0 < seen["attended"] == seen["total"]
    if not whole:
        console.print("[red]the run with all pages did not select all pages, so its agreement proves nothing[/red]")
    if not active:
        console.print("[red]sparse attention was NOT active with the rule: not calibrated, or every request was short[/red]")
    if everything_equal < 0.9:
        console.print("[red]with all pages selected the tokens should be those of FLASH_ATTN, up to rounding[/red]")
    return active and whole and everything_equal >= 0.9
