"""What tokens have of their neighbours, of masks that do not belong to the tokens."""

from __future__ import annotations

import pytest
import torch

from shardwise.errors import PropertyError
from shardwise.nn.context_parallel.token_labels import with_token_values


@pytest.mark.parametrize("size", [(1, 7), (3, 7), (2, 6)])
def test_a_mask_of_another_size(size: tuple[int, int]) -> None:
    """Raises in words, where the plain model raises, too."""
    mask = torch.ones(size, dtype=torch.int64)
    mask[:, -1] = 0
    with pytest.raises(PropertyError, match=r"size \[\d, \d\] was given with 2 samples of 7 tokens"):
        with_token_values({"input_ids": torch.zeros(2, 7, dtype=torch.int64), "attention_mask": mask})
