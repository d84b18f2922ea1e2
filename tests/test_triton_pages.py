"""The Triton kernels of the page selectors against their torch twins, under the CPU interpreter or on a GPU. Inputs are random, outputs poisoned."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from kvskim.layout import ceil_div, padded_group  # noqa: E402
from kvskim.ops.torch_score import score_torch  # noqa: E402
from kvskim.ops.triton import record_fields as rf  # noqa: E402
from kvskim.ops.triton.encode_pages import encode_pages  # noqa: E402
from kvskim.ops.triton.forced import forced_mass  # noqa: E402
from kvskim.ops.triton.jacobi import symmetric_eigen  # noqa: E402
from kvskim.ops.triton.score_pages import score_pages  # noqa: E402
from kvskim.selectors import PageTables, get_selector  # noqa: E402
from kvskim.selectors.minmax import ceil_bfloat16, floor_bfloat16  # noqa: E402
from selector_data import pages, queries  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("rki4", {}), ("r8", {"rank": 6}), ("quad", {}), ("quad", {"bits": 8, "rank": 3}), ("clse", {}), ("mean", {}), ("minmax", {}),
    ("minmax", {"bits": 4}), ("oracle", {}),
]
every_format = pytest.mark.parametrize(
    ("name", "options"), FORMATS, ids=lambda v: v if isinstance(v, str) else "-".join(f"{k}{x}" for k, x in v.items())
)


def paged(pages_in_order: Tensor, order: Tensor, blocks: int, block_size: int, layout: str, dtype: torch.dtype) -> Tensor:
    """A cache view ``[blocks, block_size, H, D]`` that holds page i at physical page ``order[i]`` and NaN elsewhere."""
    heads, dim = pages_in_order.shape[1], pages_in_order.shape[3]
    cache = torch.full((blocks * (block_size // 16), 16, heads, dim), math.nan)
    cache[order] = pages_in_order.transpose(1, 2).float()
    cache = cache.view(blocks, block_size, heads, dim).to(dtype)
    poison = torch.full_like(cache.float(), math.nan).to(dtype)
    if layout == "tokens":  # K and V in two halves of one tensor
        return torch.stack([poison, cache]).to(DEVICE)[1]
    if layout == "heads":  # memory order block, head, token
        return cache.transpose(1, 2).contiguous().to(DEVICE).transpose(1, 2)
    assert layout == "interleaved"  # K and V of a block side by side
    return torch.stack([cache, poison], 1).to(DEVICE)[:, 0]


# ---------------------------------------------------------------------------------------------------------------- building blocks


@triton.jit
def _fields_kernel(x: Any, nearest: Any, low: Any, high: Any, rounded: Any, unaligned: Any, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    value = tl.load(x + i)
    rf.store_bfloat16(nearest + 2 * i, rf.bfloat16_bits(value), i < N)
    tl.store(low + i, rf.bfloat16_value(rf.floor_bfloat16_bits(value)))
    tl.store(high + i, rf.bfloat16_value(rf.ceil_bfloat16_bits(value)))
    tl.store(rounded + i, rf.round_half_even(tl.clamp(value, -1000.0, 1000.0)))
    rf.store_float32(unaligned + 1 + 5 * i, rf.load_float32(unaligned + 1 + 5 * i, i < N) * 0 + value, i < N)


def test_record_fields_round_as_torch_does() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(240, generator=g) * torch.logspace(-20, 20, 240), torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5])])
    x = torch.cat([x, torch.tensor([0.0, 3.39e38, -3.39e38, math.inf, -math.inf, math.nan, 1.00390625, 1.01171875, -1.00390625, 1e-30])])
    x = x.to(DEVICE)
    nearest = torch.full((512,), 0xAA, dtype=torch.uint8, device=DEVICE)
    low, high, rounded = (torch.full((256,), math.nan, device=DEVICE) for _ in range(3))
    unaligned = torch.zeros(5 * 256 + 1, dtype=torch.uint8, device=DEVICE)
    _fields_kernel[(1,)](x, nearest, low, high, rounded, unaligned, N=256)
    assert torch.equal(nearest.view(torch.bfloat16).nan_to_num(7), x.bfloat16().nan_to_num(7))
    assert torch.equal(low.nan_to_num(7), floor_bfloat16(x).float().nan_to_num(7))
    assert torch.equal(high.nan_to_num(7), ceil_bfloat16(x).float().nan_to_num(7))
    ordinary = ~x.isnan()
    assert torch.equal(rounded[ordinary], x.clamp(-1000, 1000).round()[ordinary])
    stored = unaligned[1:].view(256, 5)[:, :4].contiguous().view(torch.float32)[:, 0]
    assert torch.equal(stored.nan_to_num(7), x.nan_to_num(7))


@triton.jit
def _eigen_kernel(matrix: Any, diagonal: Any, vectors: Any) -> None:
    at = tl.program_id(0) * 256 + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a, u = symmetric_eigen(tl.load(matrix + at))
    tl.store(diagonal + at, a)
    tl.store(vectors + at, u)


def test_jacobi_agrees_with_lapack() -> None:
    g = torch.Generator().manual_seed(0)
    random = torch.randn(16, 48, generator=g)
    steep = random * torch.logspace(0, -4, 48)
    low_rank = torch.randn(16, 3, generator=g) @ torch.randn(3, 48, generator=g)
    x = torch.stack([random, steep, low_rank, torch.zeros(16, 48), torch.eye(16, 48) * torch.arange(16)[:, None]])
    matrix = (x @ x.transpose(1, 2)).to(DEVICE)
    diagonal, vectors = torch.full_like(matrix, math.nan), torch.full_like(matrix, math.nan)
    _eigen_kernel[(len(x),)](matrix, diagonal, vectors)
    values = diagonal.diagonal(dim1=1, dim2=2)
    largest = matrix.diagonal(dim1=1, dim2=2).sum(1).clamp_min(1e-30)[:, None]
    torch.testing.assert_close(values.sort(1).values / largest, torch.linalg.eigvalsh(matrix) / largest, rtol=0, atol=2e-6)
    torch.testing.assert_close(vectors.transpose(1, 2) @ vectors, torch.eye(16, device=DEVICE).expand(len(x), 16, 16), rtol=0, atol=5e-6)
    again = vectors @ torch.diag_embed(values) @ vectors.transpose(1, 2)
    torch.testing.assert_close(again / largest[..., None], matrix / largest[..., None], rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------------------- encode


@dataclass
class EncodeCase:
    """Three pages in a poisoned cache; the step's slots complete the first two and touch the third."""

    dim: int = 64
    heads: int = 1
    block_size: int = 16
    layout: str = "tokens"
    dtype: torch.dtype = torch.bfloat16
    k_scale: float = 1.0

    def __str__(self) -> str:
        return f"{self.dim}-{self.heads}-{self.block_size}-{self.layout}-{str(self.dtype)[6:]}"


ENCODE_CASES = [EncodeCase(), EncodeCase(dim=96, block_size=64, layout="heads", dtype=torch.float16)]
WIDE_CASES = [
    *ENCODE_CASES, EncodeCase(dim=576, layout="interleaved", dtype=torch.float32, heads=2),
    EncodeCase(dim=128, heads=3, block_size=32, layout="interleaved", dtype=torch.float8_e4m3fn, k_scale=0.37),
]


def check_encode(name: str, options: dict[str, Any], case: EncodeCase, keys: Tensor | None = None) -> None:
    selector = get_selector(name, **options)
    keys = pages(3, case.heads, case.dim, seed=11) if keys is None else keys
    per_block = case.block_size // 16
    blocks = ceil_div(7, per_block) + 1
    order = torch.tensor([5, 1, 3])
    cache = paged(keys, order, blocks, case.block_size, case.layout, case.dtype)
    tables = PageTables((torch.randn(case.heads, case.dim, generator=torch.Generator().manual_seed(2)) * 0.3).to(DEVICE))
    slots = torch.tensor([-1, 5 * 16 + 14, 5 * 16 + 15, -1, 0, 1 * 16 + 15, 3 * 16 + 14, -1], device=DEVICE)
    width = selector.record_bytes(case.dim)
    records = torch.full((blocks * per_block, case.heads, width), 0xAA, dtype=torch.uint8, device=DEVICE)
    encode_pages(selector, tables, cache, slots, records, k_scale=case.k_scale)
    stored = keys.to(case.dtype).float() * case.k_scale
    expected = selector.encode(stored[:2].to(DEVICE), tables)
    untouched = torch.ones(len(records), dtype=torch.bool)
    untouched[order[:2]] = False
    assert (records[untouched.to(DEVICE)] == 0xAA).all(), "a page that the step did not complete was written"
    made = records[order[:2].to(DEVICE)]
    if name in ("mean", "minmax", "oracle"):
        wrong = made != expected
        assert float(wrong.float().mean()) <= (0.01 if DEVICE == "cuda" else 0.0)
    q = queries(stored, 4, 3).to(DEVICE)
    # Rounding may turn a code by one step; a wrong layout or direction is off by far more.
    torch.testing.assert_close(selector.score(q, made, tables), selector.score(q, expected, tables), rtol=0, atol=0.02, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "options", "case"),
    [
        ("rki4", {}, ENCODE_CASES[0]), ("r8", {"rank": 6}, ENCODE_CASES[1]), ("quad", {}, ENCODE_CASES[1]),
        ("quad", {"bits": 8, "rank": 3}, ENCODE_CASES[0]), ("clse", {}, ENCODE_CASES[0]), ("clse", {"rank": 4}, ENCODE_CASES[1]),
    ],
    ids=str,
)
def test_encode_of_the_eigen_selectors(name: str, options: dict[str, Any], case: EncodeCase) -> None:
    check_encode(name, options, case)


@pytest.mark.parametrize("case", WIDE_CASES, ids=str)
@pytest.mark.parametrize(("name", "options"), [f for f in FORMATS if f[0] in ("mean", "minmax", "oracle")], ids=str)
def test_encode_of_the_other_selectors(name: str, options: dict[str, Any], case: EncodeCase) -> None:
    check_encode(name, options, case)


def test_encode_of_a_wide_latent_head() -> None:
    check_encode("rki4", {"rank": 4}, EncodeCase(dim=576, dtype=torch.float32))


@every_format
def test_encode_of_degenerate_pages(name: str, options: dict[str, Any]) -> None:
    """Equal keys, huge bias, one broken page: the same scores as the torch twin, NaN where that has NaN."""
    keys = pages(3, 1, 64, seed=4)
    keys[0] = keys[0, :, :1]
    keys[1, ..., 3] += 2.9e4
    check_encode(name, options, EncodeCase(), keys.bfloat16().float())
    if name == "oracle":
        return
    keys[1, 0, 7, 9] = math.inf
    selector = get_selector(name, **options)
    cache = paged(keys, torch.arange(3), 3, 16, "heads", torch.float32)
    tables = PageTables(torch.zeros(1, 64, device=DEVICE))
    records = torch.full((3, 1, selector.record_bytes(64)), 0xAA, dtype=torch.uint8, device=DEVICE)
    encode_pages(selector, tables, cache, torch.tensor([31], device=DEVICE), records)
    assert selector.score(queries(pages(3, 1)).to(DEVICE), records[1:2], tables).isnan().all()


def test_encode_without_tokens_or_with_another_selector() -> None:
    selector = get_selector("mean")
    records = torch.full((2, 1, selector.record_bytes(64)), 0xAA, dtype=torch.uint8, device=DEVICE)
    cache = torch.zeros(2, 16, 1, 64, device=DEVICE)
    tables = PageTables(torch.zeros(1, 64, device=DEVICE))
    encode_pages(selector, tables, cache, torch.empty(0, dtype=torch.int64, device=DEVICE), records)
    assert (records == 0xAA).all()
    with pytest.raises(ValueError, match="sketch has no page kernel"):
        encode_pages(get_selector("sketch"), tables, cache, torch.tensor([15], device=DEVICE), records)


# -------------------------------------------------------------------------------------------------------------------------- score


@dataclass
class ScoreCase:
    """A decode step: requests of ``lengths`` tokens in a cache of random blocks, records made by the torch twin."""

    lengths: list[int] = field(default_factory=lambda: [0, 1, 15, 16, 17, 33, 150])
    heads: int = 2
    group: int = 3
    dim: int = 64
    block_size: int = 16
    layout: str = "tokens"
    dtype: torch.dtype = torch.bfloat16
    sink_pages: int = 1
    window_pages: int = 1
    softcap: float = 0.0
    k_scale: float = 1.0
    chunks: int = 3
    scores: torch.dtype = torch.float16
    seed: int = 0

    def build(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        per_block = self.block_size // 16
        need = [ceil_div(n, self.block_size) for n in self.lengths]
        blocks = sum(need) + 2
        order = torch.randperm(blocks, generator=g).int()
        self.block_table = torch.full((len(need), max(need) + 2), 1 << 30, dtype=torch.int32)  # beyond a request nothing may be read
        used, at = [], 0
        for r, n in enumerate(need):
            self.block_table[r, :n] = order[at : at + n]
            used += [int(b) * per_block + p for b in order[at : at + n] for p in range(per_block)]
            at += n
        keys = pages(len(used), self.heads, self.dim, self.seed)
        cache = paged(keys, torch.tensor(used), blocks, self.block_size, self.layout, self.dtype)
        for r, n in enumerate(self.lengths):  # tokens that are not written yet
            if n % self.block_size:
                cache[int(self.block_table[r, n // self.block_size]), n % self.block_size :] = math.nan
        self.key_cache = cache
        real = cache.float().nan_to_num().view(blocks, per_block, 16, self.heads, self.dim).flatten(0, 1) * self.k_scale
        self.page_keys = real.transpose(1, 2)
        q = queries(keys, len(self.lengths), self.group, self.seed + 1).flatten(1, 2)
        self.scale = 1 / math.sqrt(self.dim)
        query = torch.full((len(need), self.heads * self.group, self.dim + 8), math.nan, dtype=self.dtype if self.dtype.itemsize > 1 else torch.bfloat16)
        self.query = query.to(DEVICE)[..., : self.dim]
        self.query.copy_(q / self.scale)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        self.query[self.seq_lens == 0] = math.nan
        self.tables = PageTables((torch.randn(self.heads, self.dim, generator=g) * 0.3).to(DEVICE))
        self.capacity = max(need) * per_block + 2

    def outputs(self, dtype: torch.dtype) -> dict[str, Any]:
        rows, columns = (len(self.lengths), self.heads), padded_group(self.group)
        return {
            "scores": torch.full((*rows, self.capacity, columns), math.nan, dtype=dtype, device=DEVICE),
            **{k: torch.full((*rows, columns), math.nan, device=DEVICE) for k in ("base", "forced")},
            "partials": torch.full((*rows, self.chunks, columns), math.nan, device=DEVICE),
        }

    def inputs(self) -> dict[str, Any]:
        return {
            "query": self.query, "key_cache": self.key_cache, "block_table": self.block_table.to(DEVICE), "seq_lens": self.seq_lens,
            "scale": self.scale, "softcap": self.softcap, "sink_pages": self.sink_pages, "window_pages": self.window_pages, "k_scale": self.k_scale,
        }


def check_score(name: str, options: dict[str, Any], case: ScoreCase) -> None:
    case.build()
    selector = get_selector(name, **options)
    records = selector.encode(case.page_keys, case.tables)
    got, expected = case.outputs(case.scores), case.outputs(torch.float32)
    score_pages(selector, case.tables, records=records, **case.inputs(), **got)
    score_torch(selector, case.tables, records=records, **case.inputs(), **expected)
    coarse = case.scores == torch.float16
    for key, tolerance in (("scores", 2e-3 if coarse else 2e-4), ("base", 2e-4), ("forced", 2e-4)):
        # NaN in both: neither writes rows of 0 tokens, pages of the window, or padded columns.
        torch.testing.assert_close(got[key].float(), expected[key], rtol=1e-3 if coarse else 1e-5, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(got["partials"], expected["partials"], rtol=0.02 if coarse else 1e-3, atol=1e-6, equal_nan=True)
    assert torch.isfinite(expected["scores"]).any()


@every_format
def test_score_of_every_format(name: str, options: dict[str, Any]) -> None:
    check_score(name, options, ScoreCase(scores=torch.float32))


SCORE_CASES = [
    ScoreCase([310, 64], group=1, dim=96, block_size=64, layout="heads", dtype=torch.float16, sink_pages=0, chunks=1),
    ScoreCase([290], heads=1, group=6, dim=128, block_size=32, layout="interleaved", sink_pages=2, window_pages=3, softcap=2.0),
    ScoreCase([100, 0, 49], heads=1, group=16, dtype=torch.float32, scores=torch.float32, sink_pages=3, window_pages=2, chunks=5),
    ScoreCase([600], heads=1, group=9, window_pages=20, chunks=2),
    ScoreCase([120, 33], group=4, dim=128, dtype=torch.float8_e4m3fn, k_scale=0.7),
]


@pytest.mark.parametrize("case", SCORE_CASES, ids=lambda c: f"{c.lengths}-group{c.group}-dim{c.dim}-{c.layout}")
@pytest.mark.parametrize(("name", "options"), [("rki4", {}), ("clse", {}), ("minmax", {}), ("minmax", {"bits": 4})], ids=str)
def test_score_of_other_shapes(name: str, options: dict[str, Any], case: ScoreCase) -> None:
    check_score(name, options, case)


@pytest.mark.parametrize(("name", "options"), [("rki4", {"rank": 4}), ("quad", {}), ("oracle", {})], ids=str)
def test_score_of_a_wide_latent_head(name: str, options: dict[str, Any]) -> None:
    check_score(name, options, ScoreCase([70], heads=1, group=16, dim=576))


def test_a_broken_record_stays_visible_and_huge_scores_are_clamped() -> None:
    case = ScoreCase([200], heads=1)
    case.build()
    selector = get_selector("rki4")
    pages_of = case.block_table[0].long()
    keys = case.page_keys.clone()
    keys[pages_of[3], 0, 2, 5] = math.nan
    keys[pages_of[4]] *= 1e6
    records = selector.encode(keys, case.tables)
    got = case.outputs(torch.float16)
    score_pages(selector, case.tables, records=records, **case.inputs(), **got)
    scores = got["scores"][0, 0, :12, :3]
    assert scores[3].isnan().all()
    assert scores[4].abs().max() == 60000
    assert torch.isfinite(scores[[i for i in range(12) if i != 3]]).all()
    assert got["partials"][0, 0, 0, :3].isnan().all(), "the sums must show that a record is broken"


# ------------------------------------------------------------------------------------------------------------------------- forced


@pytest.mark.parametrize(
    ("sink_pages", "window_pages", "softcap"), [(1, 1, 0.0), (0, 1, 0.0), (3, 2, 1.5), (2, 30, 0.0), (30, 30, 0.7)],
)
def test_forced_mass_is_exact(sink_pages: int, window_pages: int, softcap: float) -> None:
    case = ScoreCase([0, 1, 16, 40, 170], block_size=32, layout="interleaved", dtype=torch.float32, softcap=softcap)
    case.build()
    out = case.outputs(torch.float32)
    forced_mass(
        case.query, case.key_cache, case.block_table.to(DEVICE), case.seq_lens, case.tables.offset, scale=case.scale, softcap=softcap,
        sink_pages=sink_pages, window_pages=window_pages, k_scale=1.0, forced=out["forced"], base=out["base"],
    )
    assert out["forced"][0].isnan().all()
    assert out["forced"][..., 3:].isnan().all()
    for r, length in enumerate(case.lengths):
        total = ceil_div(length, 16)
        tokens = torch.tensor([t for t in range(length) if t // 16 < sink_pages or t // 16 >= total - window_pages])
        for h in range(2):
            if not length:
                continue
            blocks = case.block_table[r].long()[tokens // 32]
            keys = case.key_cache[blocks.to(DEVICE), (tokens % 32).to(DEVICE), h].double()
            q = case.query[r, 3 * h : 3 * h + 3].double()
            logits = q @ keys.T * case.scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            base = q @ case.tables.offset[h].double() * case.scale
            torch.testing.assert_close(out["base"][r, h, :3].double(), base, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(out["forced"][r, h, :3].double(), logits.logsumexp(-1) - base, rtol=1e-5, atol=2e-5)


def test_no_requests() -> None:
    empty = torch.zeros(0, 6, 64, device=DEVICE)
    cache = torch.zeros(1, 16, 2, 64, device=DEVICE)
    selector = get_selector("mean")
    score_pages(
        selector, PageTables(torch.zeros(2, 64, device=DEVICE)), empty, cache, torch.zeros(1, 2, 66, dtype=torch.uint8, device=DEVICE),
        torch.zeros(0, 1, dtype=torch.int32, device=DEVICE), torch.zeros(0, dtype=torch.int32, device=DEVICE), scale=1.0, softcap=None,
        sink_pages=1, window_pages=1, scores=torch.zeros(0, 2, 1, 4, device=DEVICE), base=torch.zeros(0, 2, 4, device=DEVICE),
        forced=torch.zeros(0, 2, 4, device=DEVICE), partials=torch.zeros(0, 2, 1, 4, device=DEVICE),
    )
