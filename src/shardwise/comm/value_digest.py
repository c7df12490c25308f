"""`digest`: by what ranks compare the values of a plain tensor."""

from __future__ import annotations

import hashlib

import torch

from shardwise import settings
from shardwise.comm.group import without_data
from shardwise.comm.transfer.views import resolved

MOST_HASHED = 2**16  # bytes of a plain operand whose values are compared where the ranks meet anyway


def digest(plain: torch.Tensor, most: int | None = MOST_HASHED) -> str:
    """A hash of the values. Empty where there are none to read: on meta, without data, in other layouts.

    With ``most``, also empty for a tensor of more bytes than that, for one on a GPU, which the host would have to wait
    for, and where checks are off.
    """
    if plain.layout == torch.sparse_coo and most is None:
        whole = plain.detach().coalesce()
        return digest(whole.indices(), None) + digest(whole.values(), None)
    if plain.is_meta or plain.layout != torch.strided or without_data():
        return ""
    if most is not None and (plain.device.type != "cpu" or plain.nbytes > most or not settings.current().validate):
        return ""
    data = resolved(plain.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=8).hexdigest()
