"""Page and record layout: every bit of a record is used once, sizes add up."""

import pytest
import torch

from kvskim.layout import SKETCH_HALF_ROWS, PageLayout, dct_matrix, padded_group, sketch_layout


@pytest.mark.parametrize("record_bytes", SKETCH_HALF_ROWS)
def test_sketch_layout_uses_every_bit_once(record_bytes: int) -> None:
    layout = sketch_layout(record_bytes)
    assert sum(layout.half_rows) * 8 == record_bytes
    cells = set(zip(layout.slot_byte.tolist(), layout.slot_shift.tolist()))
    assert cells == {(byte, shift) for byte in range(record_bytes) for shift in (0, 2, 4, 6)}
    assert torch.equal(layout.byte_slots[layout.slot_byte, layout.slot_shift // 2], torch.arange(layout.slots))


@pytest.mark.parametrize("record_bytes", SKETCH_HALF_ROWS)
def test_a_mode_owns_consecutive_words_at_one_bit_position(record_bytes: int) -> None:
    layout = sketch_layout(record_bytes)
    for mode, (start, stop) in enumerate(zip(layout.mode_start, layout.mode_start[1:])):
        if stop == start:
            continue
        assert layout.slot_shift[start:stop].unique().tolist() == [2 * layout.position[mode]]
        byte = layout.slot_byte[start:stop]
        words = sorted((4 * (byte // 64) + byte % 16 // 4).unique().tolist())
        assert words == list(range(layout.word_start[mode], layout.word_start[mode] + 2 * layout.half_rows[mode]))


def test_c256_is_the_layout_that_the_score_kernel_reads() -> None:
    layout = sketch_layout(256)
    # mode: (bit position, first word), from the kernel's table
    expected = {0: (3, 0), 1: (3, 10), 2: (2, 0), 12: (2, 6), 3: (2, 8), 5: (2, 12), 4: (1, 0), 6: (1, 4), 7: (1, 8), 9: (1, 12),
                8: (0, 0), 10: (0, 4), 14: (0, 8), 11: (0, 10), 13: (0, 12), 15: (0, 14)}
    assert {m: (layout.position[m], layout.word_start[m]) for m in range(16)} == expected
    assert (int(layout.slot_byte[0]), int(layout.slot_shift[0])) == (0, 6)
    assert int(layout.slot_byte[17]) == 64 * 0 + 16 * 0 + 4 * 1 + 1  # second unit, lane 0, byte 1


def test_unknown_record_size_is_refused() -> None:
    with pytest.raises(ValueError, match="record_bytes is 100; the sketch selector has records of 128, 192, 256, 384 bytes"):
        sketch_layout(100)


def test_dct_is_orthonormal_and_mode_zero_is_the_mean() -> None:
    matrix = dct_matrix(torch.float64)
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(16, dtype=torch.float64))
    x = torch.randn(16, dtype=torch.float64)
    torch.testing.assert_close((matrix.T @ x)[0], x.mean() * 4)


@pytest.mark.parametrize("block_size", [0, 8, 24, 48])
def test_block_size_must_hold_whole_pages(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}; .*16, 32, 64 or 128"):
        PageLayout(block_size, 8, 128)


def test_bytes() -> None:
    layout = PageLayout(64, 8, 128)
    assert layout.pages_per_block == 4
    assert layout.kv_bytes_per_page() == 8192
    assert layout.record_bytes_per_block(256) == 4 * 8 * 256


def test_padded_group() -> None:
    assert [padded_group(g) for g in (1, 3, 4, 5, 8, 9, 16, 20, 128)] == [4, 4, 4, 8, 8, 16, 16, 32, 128]
    for bad in (0, 129):
        with pytest.raises(ValueError, match=f"{bad} query heads per kv head; 1 to 128"):
            padded_group(bad)
