"""Layouts against loops over samples and tokens."""

import pytest
import torch
from batches import IMG

from llava.constants import IGNORE_INDEX
from llava.layout import lay_out, pad_layout

SAMPLES = [[5, IMG, 6], [7], [IMG, 8, IMG, IMG, 9]]
WIDTHS = [2, 3, 1, 2]  # visual tokens of the four images


def laid_out(max_length=None, widths=WIDTHS):
    longest = max(map(len, SAMPLES))
    ids = torch.tensor([s + [0] * (longest - len(s)) for s in SAMPLES])
    mask = torch.tensor([[True] * len(s) + [False] * (longest - len(s)) for s in SAMPLES])
    return lay_out(ids, mask, ids.where(ids != IMG, IGNORE_INDEX), widths, max_length)


def by_hand(max_length):
    """For every sample a list of (input, target) per position; visual tokens are numbered over all samples."""
    widths, row, samples = iter(WIDTHS), 0, []
    for sample in SAMPLES:
        rows = []
        for token in sample:
            if token == IMG:
                width = next(widths)
                rows += [(f"visual {row + i}", IGNORE_INDEX) for i in range(width)]
                row += width
            else:
                rows.append((token, token))
        samples.append(rows[:max_length])
    return samples


@pytest.mark.parametrize("max_length", [None, 1, 2, 3, 4, 5])
def test_images_may_have_different_numbers_of_tokens_and_be_cut_anywhere(max_length):
    layout, expected = laid_out(max_length), by_hand(max_length)
    table = ["zeros", *layout.text_ids.tolist(), *(f"visual {i}" for i in range(sum(WIDTHS)))]
    assert [table[i] for i in layout.source[0].tolist()] == [token for rows in expected for token, _ in rows]
    assert layout.labels[0].tolist() == [label for rows in expected for _, label in rows]
    assert layout.position_ids[0].tolist() == [i for rows in expected for i in range(len(rows))]
    assert layout.lengths == [len(rows) for rows in expected] == layout.cu_seqlens.diff().tolist()
    assert layout.attention_mask is None


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("max_length", [None, 2])
def test_targets_are_predicted_by_the_row_before_in_the_same_sample(side, max_length):
    layout, expected = laid_out(max_length), by_hand(max_length)
    layout = layout if side is None else pad_layout(layout, side)
    longest, pairs = max(layout.lengths), []
    for number, rows in enumerate(expected):
        first = sum(layout.lengths[:number]) if side is None else number * longest
        first += longest - len(rows) if side == "left" else 0
        pairs += [(first + i - 1, label) for i, (_, label) in enumerate(rows) if i and label != IGNORE_INDEX]
    assert list(zip(layout.predicting.tolist(), layout.targets.tolist(), strict=True)) == pairs
    if side is not None:
        assert layout.source.bool().equal(layout.attention_mask)


def test_visual_tokens_of_too_few_images_are_an_error():
    with pytest.raises(ValueError, match=r"4 image placeholders \(\[1, 0, 3\] per sample\).*of 3 images"):
        laid_out(widths=WIDTHS[:3])
