"""Where the pages and tokens of a request lie in a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

from kvskim.layout import PAGE_TOKENS


def page_ends(block_ids: Sequence[int], block_size: int, tokens: int) -> list[int]:
    """Slots of the last token of every complete page among the first ``tokens`` tokens of a request.

    Args:
        block_ids: blocks of the request, in order.
        block_size: tokens in a block; the slot of a token is ``block * block_size + place in the block``.
        tokens: tokens that are in the cache.
    """
    return [block_ids[end // block_size] * block_size + end % block_size for end in range(PAGE_TOKENS - 1, tokens, PAGE_TOKENS)]


def token_slots(block_ids: Sequence[int], block_size: int, tokens: int) -> list[int]:
    """Slots of the first ``tokens`` tokens of a request; arguments as for `page_ends`."""
    return [block_ids[token // block_size] * block_size + token % block_size for token in range(tokens)]
