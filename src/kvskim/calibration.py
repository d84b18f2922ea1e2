"""The shared basis of a (layer, kv head): fit it on keys and queries, save it, load it.

What is fitted (docs/how-it-works.md, section "Calibration"): the mean key ``m``; the query metric ``C = E[w q q^T / |q|^2]`` (queries of the
group, with the weights ``w`` of `kvskim.calibration_heads`, shrunk 2% to a multiple of I); per token mode the principal axes ``U`` of
``C^(1/2) Y_mode``, shrunk to the axes common to all modes; quantiser steps; the table that says which (coefficient, digit) each slot of a
record holds; and for latent rows a gain per mode.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvskim.calibration_gains import stretch_modes
from kvskim.calibration_heads import head_weights
from kvskim.layout import PAGE_TOKENS, dct_matrix, sketch_layout
from kvskim.rotary import Rotary
from kvskim.selectors.sketch import UNUSED_DIGIT, SketchTables

FORMAT_VERSION = 1
QUERY_METRIC_SHRINK = 0.02
MODE_BASIS_SHRINK = 0.5
"""Least share of the common covariance in each mode's own: a fit serves other text than it was made on."""
WIDE_ROW = 256
"""Keys of more channels are latent rows: a record leaves a good part of them out, and a text has few pages for the covariances of so many channels. So
their modes share more of a covariance, and are stretched (`kvskim.calibration_gains`)."""
RANGE_MARGIN = {2: 0.7, 4: 0.5, 6: 0.7, 8: 1.0}
"""By bits of a coefficient, the least range of its quantiser, in multiples of the largest calibration coefficient. The pages that matter have large
coefficients, and on other text they are larger still; what the wider steps cost for all others is little, and least where bits are many."""
SPREAD_COPIES = 2
"""How often each calibration page and query is seen, every time at another position."""
FIT_PAGES = 1024
"""Pages on which the steps are searched (all pages are used for the moments)."""

# Optimal step of a uniform mid-rise quantiser with b bits for a unit Gaussian (Max 1960), the start of the search for each step.
_GAUSSIAN_STEP = {2: 0.9957, 4: 0.3352, 6: 0.1041, 8: 0.0308}
_STEP_FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.8, 2.2, 2.8, 3.6, 4.8, 6.5)
_WIDTHS = (2, 4, 6, 8)
GOLDEN_RATIO = (5**0.5 - 1) / 2


class CalibrationError(ValueError):
    """A calibration can't be fitted, read or used; the message says why and what to do."""


@dataclass(frozen=True)
class LayerCalibration:
    """Calibration of one layer: ``mean`` float32 ``[H, D]`` and the sketch tables fitted with it."""

    mean: Tensor
    sketch: SketchTables
    page_frame: bool = False

    def sketch_tables(self, record_bytes: int, page_frame: bool) -> SketchTables:
        if self.sketch.record_bytes != record_bytes or self.page_frame != page_frame:
            raise CalibrationError(
                f"the calibration was made for record_bytes {self.sketch.record_bytes}, page_frame {self.page_frame}; selector_options ask for "
                f"record_bytes {record_bytes}, page_frame {page_frame}: make another with `kvskim calibrate`, or change selector_options"
            )
        return self.sketch


def _square_roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(metric)
    values = values.clamp_min(values.amax(-1, keepdim=True) * 1e-9).clamp_min(1e-30)
    root = values.sqrt()[..., None, :]
    return (vectors * root) @ vectors.transpose(-1, -2), (vectors / root) @ vectors.transpose(-1, -2)


def _mode_bases(pages: Tensor, root: Tensor, shrink: float) -> Tensor:
    """Principal axes per mode, ``[H, 16, D, D]`` (columns, largest variance first). ``pages``: centred keys ``[H, P, 16, D]``."""
    modes = torch.einsum("hptd,tj->hjpd", pages, dct_matrix(pages.dtype, pages.device)) @ root[:, None]
    covariance = modes.transpose(-1, -2) @ modes / max(1, modes.shape[2])
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    common = covariance.mean(1, keepdim=True)
    common_trace = common.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(1e-30)
    mixed = (1 - shrink) * covariance + shrink * common * (trace / common_trace)
    return torch.linalg.eigh(mixed).eigenvectors.flip(-1)


def _shrink(channels: int, pages: int) -> float:
    """Share of the common covariance, which rests on all 16 modes, in that of one mode, which rests on ``pages`` pages."""
    if channels <= WIDE_ROW:
        return MODE_BASIS_SHRINK
    return min(1.0, max(MODE_BASIS_SHRINK, 2 * channels / (3 * pages)))


def quantise(values: Tensor, bits: int, step: Tensor) -> Tensor:
    """Uniform mid-rise quantiser with ``2^bits`` levels."""
    half = 2.0 ** (bits - 1)
    return (torch.floor(values / step).clamp(-half, half - 1) + 0.5) * step


def _fit_steps(coefficients: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Steps ``[H, 16, D]`` and mean squared errors of every width, from coefficients ``[H, P, 16, D]``."""
    deviation = coefficients.std(1, correction=0).clamp_min(1e-9)
    stride = max(1, coefficients.shape[1] // FIT_PAGES)
    sample = coefficients[:, ::stride]
    peak = coefficients.abs().amax(1)
    steps: dict[int, Tensor] = {}
    errors: dict[int, Tensor] = {0: sample.square().mean(1)}
    for bits in _WIDTHS:
        best = deviation * _GAUSSIAN_STEP[bits]
        error = torch.full_like(best, torch.inf)
        for factor in _STEP_FACTORS:
            step = deviation * (_GAUSSIAN_STEP[bits] * factor)
            e = (quantise(sample, bits, step[:, None]) - sample).square().mean(1)
            better = e < error
            best, error = torch.where(better, step, best), torch.where(better, e, error)
        best = torch.maximum(best, peak * (RANGE_MARGIN[bits] / 2 ** (bits - 1)))
        steps[bits], errors[bits] = best, (quantise(sample, bits, best[:, None]) - sample).square().mean(1)
    return steps, errors


def _coefficient_widths(errors: dict[int, Tensor], digits: int, mode: int) -> Tensor:
    """Bits of every channel's coefficient of one mode, int64 ``[H, D]``: the ``digits`` two-bit digits of largest gain."""
    gains: list[Tensor] = []
    previous = 0
    for bits in _WIDTHS:
        gain = (errors[previous][:, mode] - errors[bits][:, mode]).clamp_min(0)
        # A digit is only worth something after those above it, so gains must not rise with the digit.
        gains.append(torch.minimum(gain, gains[-1]) if gains else gain)
        previous = bits
    table = torch.cat(gains, -1)
    chosen = torch.zeros_like(table)
    order = table.argsort(dim=-1, descending=True, stable=True)[:, :digits]
    chosen.scatter_(-1, order, 1.0)
    return (chosen.unflatten(-1, (len(_WIDTHS), -1)).sum(1) * 2).long()


def _spread(x: Tensor, positions: Tensor, rotary: Rotary, length: int) -> Tensor:
    """Runs of ``x [H, n, r, D]`` turned by RoPE from their positions ``[n]`` to others, spread evenly over ``0 .. length - 1``: ``[H, copies n, r, D]``.

    Run ``i`` goes to the fractional part of ``(i + 1) golden ratio + copy / copies`` of the length, so that neighbours in the text lie far apart and any
    part of the text covers all positions (Kronecker sequence: Niederreiter 1992, chapter 3).
    """
    copies = []
    for copy in range(SPREAD_COPIES):
        share = ((torch.arange(1, len(positions) + 1, dtype=torch.float64) * GOLDEN_RATIO + copy / SPREAD_COPIES) % 1).to(positions.device)
        target = (share * max(1, length - x.shape[2] + 1)).long()
        copies.append(rotary.rotate(x, (target - positions)[:, None]))
    return torch.cat(copies, 1)


def fit_layer(
    keys: Tensor,
    queries: Tensor,
    *,
    record_bytes: int = 256,
    mode_shrink: float | None = None,
    rotary: Rotary | None = None,
    served_positions: int = 0,
    key_positions: Tensor | None = None,
    query_positions: Tensor | None = None,
    page_frame: bool = False,
) -> LayerCalibration:
    """Fit the sketch of one layer. Deterministic for given data.

    Keys with a rotary embedding change with their position, and a fit is good where it has seen keys. So with ``served_positions`` every page and every
    query is moved to positions of its own, spread evenly over all that requests can have: an exact rotation, no forward pass.

    Args:
        keys: ``[H, T, D]`` as cached (after RoPE), from a page boundary on; an incomplete last page is left out. Texts may follow one another.
        queries: ``[Hq, n, D]`` (after RoPE), already multiplied by the softmax scale; query head ``i`` belongs to kv head ``i // (Hq / H)``.
        record_bytes: size of the records, 128, 192, 256 or 384.
        mode_shrink: share of the common covariance in the basis of each token mode; None: 0.5, in latent rows more where pages are few for their channels.
        rotary: needed for served_positions and page_frame.
        served_positions: tokens of the longest request; 0: keys and queries are taken where they are.
        key_positions: int64 ``[T]``, position of each key; None: 0 to T - 1. The tokens of a page follow one another.
        query_positions: int64 ``[n]``, needed for served_positions.
        page_frame: fit for records in the frame of their page, which are the same at all positions.

    Returns:
        the calibration of the layer, on the CPU.

    Raises:
        CalibrationError: too few keys or queries, values that are not finite, shapes or positions that do not fit together.
    """
    heads, tokens, dim = keys.shape
    pages = tokens // PAGE_TOKENS
    if pages < 2 or queries.shape[1] < 1:
        raise CalibrationError(f"calibration has {tokens} keys and {queries.shape[1]} queries per head; it needs at least 32 keys and one query")
    if queries.shape[0] % heads:
        raise CalibrationError(f"{queries.shape[0]} query heads are not a multiple of {heads} kv heads")
    if not bool(torch.isfinite(keys).all()) or not bool(torch.isfinite(queries).all()):
        raise CalibrationError("calibration keys or queries are not finite; check the model's dtype (float16 overflows above 65504)")
    x = keys[:, : pages * PAGE_TOKENS].float()
    q = queries.float()
    if (served_positions or page_frame) and rotary is None:
        raise CalibrationError("served_positions and page_frame need the model's rotary embedding")
    if key_positions is None:
        key_positions = torch.arange(tokens, device=x.device)
    if len(key_positions) != tokens or (query_positions is not None and len(query_positions) != q.shape[1]):
        raise CalibrationError(f"calibration has {tokens} keys and {q.shape[1]} queries per head; it needs one position for each of them")
    first = key_positions[: pages * PAGE_TOKENS : PAGE_TOKENS].to(x.device)
    weights = head_weights(x.unflatten(1, (pages, PAGE_TOKENS)), q, first, query_positions)
    if page_frame:
        assert rotary is not None
        x = rotary.rotate(x, -(first + PAGE_TOKENS // 2).repeat_interleave(PAGE_TOKENS))
        spread = torch.linspace(0, tokens, 6).long().tolist()
        q = torch.cat([rotary.rotate(q, -int(o)) for o in spread], 1)
    elif served_positions:
        assert rotary is not None
        if query_positions is None:
            raise CalibrationError("served_positions needs the positions of the queries, query_positions")
        x = _spread(x.unflatten(1, (pages, PAGE_TOKENS)), first, rotary, served_positions).flatten(1, 2)
        q = _spread(q[:, :, None], query_positions.to(q.device), rotary, served_positions).flatten(1, 2)
    # Pages are ranked for each query by itself: all of a head count alike, or the few tokens with long queries get most of the record.
    q = q / q.norm(dim=-1, keepdim=True).clamp_min(1e-30) * weights.sqrt()[:, None, None]
    q = q.unflatten(0, (heads, -1)).flatten(1, 2)

    mean = x.mean(1)
    metric = q.transpose(1, 2) @ q / q.shape[1]
    trace = metric.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    metric = (1 - QUERY_METRIC_SHRINK) * metric + QUERY_METRIC_SHRINK * trace * torch.eye(dim, device=x.device)
    root, inverse_root = (r.float() for r in _square_roots(metric.double()))
    centred = (x - mean[:, None]).unflatten(1, (-1, PAGE_TOKENS))
    axes = _mode_bases(centred, root, _shrink(dim, pages) if mode_shrink is None else mode_shrink)
    key_basis, query_basis = root[:, None] @ axes, inverse_root[:, None] @ axes
    modes = torch.einsum("hptd,tj->hjpd", centred, dct_matrix(device=x.device))
    coefficients = (modes @ key_basis).transpose(1, 2)
    steps, errors = _fit_steps(coefficients)
    sketch = _slot_tables(record_bytes, mean, key_basis, query_basis, steps, errors)
    if page_frame:
        sketch = SketchTables(**{**sketch.__dict__, "rotary": rotary})
    elif dim > WIDE_ROW:
        own = keys[:, : pages * PAGE_TOKENS].float().unflatten(1, (pages, PAGE_TOKENS))
        sketch = stretch_modes(sketch, own, queries.float(), first, query_positions)
    return LayerCalibration(mean.cpu(), sketch.to("cpu"), page_frame)


def _slot_tables(
    record_bytes: int, mean: Tensor, key_basis: Tensor, query_basis: Tensor, steps: dict[int, Tensor], errors: dict[int, Tensor]
) -> SketchTables:
    layout = sketch_layout(record_bytes)
    heads, dim = mean.shape
    slots = layout.slots
    encode_matrix, query_matrix = (torch.zeros(heads, slots, dim) for _ in range(2))
    bits = torch.zeros(heads, slots, dtype=torch.uint8)
    count = torch.zeros(heads, PAGE_TOKENS, dtype=torch.int32)
    slot_coefficient = torch.zeros(heads, slots, dtype=torch.int16)
    slot_digit = torch.full((heads, slots), UNUSED_DIGIT, dtype=torch.uint8)
    key_basis, query_basis = key_basis.cpu(), query_basis.cpu()
    steps = {b: s.cpu() for b, s in steps.items()}
    for mode, (start, stop) in enumerate(zip(layout.mode_start, layout.mode_start[1:])):
        if stop == start:
            continue
        widths = _coefficient_widths(errors, min(stop - start, 4 * dim), mode).cpu()
        for head in range(heads):
            channels = widths[head].nonzero()[:, 0]
            width = widths[head][channels]
            n = len(channels)
            step = torch.stack([steps[b][head, mode] for b in _WIDTHS])[width // 2 - 1, channels]
            encode_matrix[head, start : start + n] = (key_basis[head, mode][:, channels] / step).T
            query_matrix[head, start : start + n] = (query_basis[head, mode][:, channels] * step).T
            bits[head, start : start + n] = width.to(torch.uint8)
            count[head, mode] = n
            digits = width // 2
            used = int(digits.sum())
            slot_coefficient[head, start : start + used] = (start + torch.arange(n)).repeat_interleave(digits).to(torch.int16)
            first = (digits.cumsum(0) - digits).repeat_interleave(digits)
            slot_digit[head, start : start + used] = (torch.arange(used) - first).to(torch.uint8)
    return SketchTables(
        record_bytes, mean.cpu().float(), encode_matrix.bfloat16(), query_matrix.bfloat16(), bits, count, slot_coefficient, slot_digit
    )


SKETCH_TENSORS = ("encode_matrix", "query_matrix", "coefficient_bits", "coefficient_count", "slot_coefficient", "slot_digit")


def model_fingerprint(config: dict[str, Any]) -> str:
    """Hash of what makes a calibration fit a model: its shapes and its rotary embedding, from the model's ``config.json`` as a dict."""
    keys = (
        "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta",
        "rope_scaling", "rope_parameters", "partial_rotary_factor", "vocab_size",
    )
    text = json.dumps({k: config.get(k) for k in keys}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Calibration:
    """Calibrations of the sparse layers of one model.

    ``model``: its name, for messages. ``fingerprint``: see `model_fingerprint`; checked when it is used, so that a file of
    another model is refused. ``first_head``: 0, or in a share of the kv heads (`kvskim.calibration_shares`) the first one that it holds.
    """

    model: str
    fingerprint: str
    layers: dict[int, LayerCalibration] = field(default_factory=dict)
    first_head: int = 0

    def layer(self, index: int) -> LayerCalibration:
        if index not in self.layers:
            raise CalibrationError(
                f"the calibration of {self.model} has no layer {index} (it has {len(self.layers)} layers); make it again with `kvskim calibrate`"
            )
        return self.layers[index]

    def check(self, model: str, fingerprint: str, num_kv_heads: int, head_dim: int) -> None:
        """Refuse a calibration of another model or shape."""
        if self.fingerprint != fingerprint:
            raise CalibrationError(
                f"the calibration was made for the model {self.model} ({self.fingerprint}), not for {model} ({fingerprint}): "
                f"make one with `kvskim calibrate {model} -o FILE`, or set `calibration: auto`"
            )
        for index, layer in self.layers.items():
            if tuple(layer.mean.shape) != (num_kv_heads, head_dim):
                raise CalibrationError(
                    f"the calibration of {self.model} has shape {tuple(layer.mean.shape)} [kv heads, head dim] in layer {index}; "
                    f"the model has {(num_kv_heads, head_dim)}"
                )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with model name, fingerprint and a hash of the contents in its metadata."""
        if not self.layers:
            raise CalibrationError("the calibration holds no layer; there is nothing to save")
        tensors: dict[str, Tensor] = {}
        for index, layer in sorted(self.layers.items()):
            tensors[f"layer.{index}.mean"] = layer.mean.contiguous().clone()
            for name in SKETCH_TENSORS:
                tensors[f"layer.{index}.{name}"] = getattr(layer.sketch, name).contiguous().clone()
            if layer.sketch.rotary is not None:
                tensors[f"layer.{index}.inverse_frequency"] = layer.sketch.rotary.inverse_frequency.contiguous().clone()
        first = next(iter(self.layers.values()))
        rotary = first.sketch.rotary
        metadata = {
            "format": f"kvskim-calibration-{FORMAT_VERSION}", "model": self.model, "fingerprint": self.fingerprint,
            "record_bytes": str(first.sketch.record_bytes), "page_frame": str(int(first.page_frame)),
            "interleaved": str(int(bool(rotary and rotary.interleaved))), "first_head": str(self.first_head), "hash": _hash(tensors),
        }
        path = Path(path)
        if not path.parent.is_dir():
            raise CalibrationError(f"the folder {path.parent} of the calibration file {path.name} does not exist; create it first")
        try:
            save_file(tensors, str(path), metadata=metadata)
        except (SafetensorError, OSError) as error:
            raise CalibrationError(f"the calibration can't be written to {str(path)!r} ({error}); give a file in a folder that can be written") from error


def _hash(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_calibration(path: str | Path) -> Calibration:
    """Read a file written by `Calibration.save`; a missing, foreign or damaged file is refused in one sentence."""
    path = Path(path)
    if not path.is_file():
        raise CalibrationError(f"calibration is {str(path)!r}; no such file: make one with `kvskim calibrate MODEL -o {path.name}`, or use `auto`")
    try:
        with safe_open(str(path), framework="pt") as f:
            metadata = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (safe_open is no mapping)
    except (SafetensorError, OSError) as error:
        raise CalibrationError(f"calibration is {str(path)!r}; it is not a readable safetensors file ({error})") from error
    if metadata.get("format") != f"kvskim-calibration-{FORMAT_VERSION}":
        raise CalibrationError(
            f"calibration is {str(path)!r}; its format is {metadata.get('format')!r}, this version reads "
            f"'kvskim-calibration-{FORMAT_VERSION}': make it again with `kvskim calibrate`"
        )
    if metadata.get("hash") != _hash(tensors):
        raise CalibrationError(f"calibration is {str(path)!r}; its contents do not match the hash it carries (damaged file): make it again")
    try:
        return _from_tensors(metadata, tensors)
    except (KeyError, ValueError, IndexError) as error:
        raise CalibrationError(
            f"calibration is {str(path)!r}; its contents do not fit together ({type(error).__name__}: {error}): make it again with `kvskim calibrate`"
        ) from error


def _from_tensors(metadata: dict[str, str], tensors: dict[str, Tensor]) -> Calibration:
    page_frame = metadata["page_frame"] == "1"
    layers: dict[int, LayerCalibration] = {}
    for index in sorted({int(name.split(".")[1]) for name in tensors}):
        mean = tensors[f"layer.{index}.mean"]
        rotary = None
        if page_frame:
            rotary = Rotary(tensors[f"layer.{index}.inverse_frequency"], metadata["interleaved"] == "1")
        sketch = SketchTables(
            int(metadata["record_bytes"]), mean, rotary=rotary, **{name: tensors[f"layer.{index}.{name}"] for name in SKETCH_TENSORS}
        )
        layers[index] = LayerCalibration(mean, sketch, page_frame)
    return Calibration(metadata["model"], metadata["fingerprint"], layers, int(metadata.get("first_head", "0")))
