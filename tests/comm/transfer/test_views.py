"""Views of pieces of local tensors: when they are copied in wide units."""

from __future__ import annotations

import itertools

import torch

from shardwise.comm.transfer.views import WIDE, _comes_in


def test_a_view_that_comes_in_units_can_be_seen_in_them() -> None:
    """Wherever it begins in its storage, however wide it is, and if it is empty: torch is asked, and agrees."""
    seen = 0
    for dtype, unit in itertools.product((torch.uint8, torch.bfloat16, torch.float32, torch.float64), WIDE):
        plain = torch.arange(6 * 40).to(dtype).reshape(6, 40)
        for begin, width in itertools.product(range(9), (0, 1, 2, 4, 8, 16, 31)):
            for view in (plain[1:5, begin : begin + width], plain.reshape(-1)[begin : begin + width], plain[:, begin]):
                if _comes_in(view, unit):
                    seen += 1
                    assert torch.equal(view.view(unit).view(dtype), view)
    assert seen > 100
