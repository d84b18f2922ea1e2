"""The transformers host through the operations' kernels (Triton, in the interpreter here) against its plain torch path."""

import pytest
import torch

from kvskim.engines.decode import DecodeSettings, decode_attention
from kvskim.engines.decode_kernels import encode_pages, kernel_refusal, paged
from kvskim.rules import RuleParameters
from kvskim.selectors import get_selector
from step_data import make_batch

pytest.importorskip("triton")


@pytest.mark.parametrize("tokens", [176, 181])
@pytest.mark.parametrize("selector", ["sketch", "rki4"])
def test_kernels_choose_and_attend_what_torch_does(selector: str, tokens: int) -> None:
    batch = make_batch(selector, [tokens], heads=2, group=3, dim=64, dtype=torch.bfloat16)
    pages = -(-tokens // 16)
    physical = batch.block_table[0, :pages].long()
    key, value = (cache[physical].flatten(0, 1)[:tokens].transpose(0, 1).contiguous() for cache in (batch.key_cache, batch.value_cache))
    records = batch.records[physical][: tokens // 16]
    rule = RuleParameters(rule="budget", budget_pages=5, min_pages=0)
    common = (batch.selector, batch.tables, rule, 1, 1, batch.scale)
    expected = decode_attention(DecodeSettings(*common), batch.query[0], key, value, records, exact=True)
    settings = DecodeSettings(*common, kernels="triton")
    for _ in range(2):  # the second time with the workspace of the first
        result = decode_attention(settings, batch.query[0], key, value, records, exact=True)
        assert torch.equal(result.pages, expected.pages)
        torch.testing.assert_close(result.out.float(), expected.out.float(), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(result.covered, expected.covered, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(result.exact, expected.exact)
    assert len(settings.workspaces) == 1


def test_encode_pages_gives_the_selectors_records() -> None:
    selector = get_selector("minmax")
    batch = make_batch("minmax", [64], heads=2, dim=64, dtype=torch.bfloat16)
    pages = torch.randn(3, 2, 16, 64).bfloat16()
    assert torch.equal(encode_pages(selector, batch.tables, pages, "triton"), selector.encode(pages, batch.tables))


def test_paged_view_has_the_tokens_and_zeros_after_them() -> None:
    row = torch.randn(2, 37, 8)
    view = paged(row)
    assert view.shape == (3, 16, 2, 8)
    torch.testing.assert_close(view.flatten(0, 1)[:37].transpose(0, 1), row)
    assert (view.flatten(0, 1)[37:] == 0).all()


def test_refusals_name_the_reason() -> None:
    sketch = get_selector("sketch")
    assert kernel_refusal(sketch, 8, 2, 64, 64, torch.bfloat16) is None
    assert "float32" in str(kernel_refusal(sketch, 8, 2, 64, 64, torch.float32))
    assert "head dims 80 and 80" in str(kernel_refusal(sketch, 8, 2, 80, 80, torch.float16))
    assert "32 query heads per kv head" in str(kernel_refusal(sketch, 64, 2, 64, 64, torch.float16))
    assert "page_frame" in str(kernel_refusal(get_selector("sketch", page_frame=True), 8, 2, 64, 64, torch.float16))
