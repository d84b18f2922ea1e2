"""A query in parts is read early where the kernels read its parts, and not where a kernel of the step itself joins them first."""

from __future__ import annotations

import inspect

import pytest
import torch

from kvskim.ops import score as score_module
from kvskim.ops.cuda import score_sketch as cuda
from kvskim.ops.latent_query import LatentQuery
from mla_data import LATENT, ROTARY, make_latent_batch


@pytest.mark.parametrize("aligned", [True, False])
def test_a_query_that_is_joined_in_the_step_is_not_read_early(aligned, monkeypatch):
    named = inspect.signature(getattr(cuda.prepare_sketch, "_init_fn", cuda.prepare_sketch)).bind
    batch, seen = make_latent_batch("sketch", [40, 70], group=16, dtype=torch.bfloat16), []
    monkeypatch.setattr(cuda, "prepare_sketch", lambda *arguments: seen.append(named(*arguments).arguments["flags"]))
    monkeypatch.setattr(cuda, "score_sketch", lambda *arguments: None)
    monkeypatch.setattr(score_module, "joined", lambda query, kernels: torch.cat([query.latent, query.rotary], -1))
    heads, columns = batch.query.shape[1], 16
    wide = torch.zeros(2, heads, 1 + ROTARY, dtype=torch.bfloat16)
    rotary = wide[:, :, 1:] if not aligned else torch.zeros(2, heads, ROTARY, dtype=torch.bfloat16)
    query = LatentQuery(torch.zeros(2, heads, LATENT, dtype=torch.bfloat16), rotary)
    floats = torch.zeros(2, 1, columns)

    class Scratch:
        sketch_weights = torch.zeros(1)

    score_module.score(
        batch.selector, batch.tables, query, batch.key_cache, batch.records, batch.block_table, batch.seq_lens, scale=1.0, sink_pages=1, window_pages=2,
        scores=torch.zeros(2, 1, 8, columns, dtype=torch.float16), base=floats, forced=floats, partials=floats[:, :, None], scratch=Scratch(),
        kernels="cuda", overlap=True, settled=True, queries_settled=True,
    )
    assert [bool(flags & cuda.QUERIES_SETTLED) for flags in seen] == [aligned]
    assert seen[0] & cuda.OVERLAP_PREVIOUS
