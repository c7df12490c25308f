"""`MergedResult`: results of blocks over different keys, merged into the result over all of them."""

from __future__ import annotations

import math

import torch

from shardwise.comm.transfer.sums import accumulation_dtype

Where = tuple[slice, slice, slice]  # samples, heads and queries in a local tensor


class MergedResult:
    """The result of one local tensor of queries so far, and the log-sum-exp of all scores that went into it."""

    def __init__(self, query: torch.Tensor, width: int) -> None:
        self._size, self._dtype, self._device = (*query.shape[:-1], width), query.dtype, query.device
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, where: Where, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take in the result of some of the queries over more keys."""
        wide = accumulation_dtype(self._dtype)
        if self._out is None and out.shape == self._size:
            self._out, self._lse = out.to(wide), lse.to(wide)
            return
        outs, sums = self._begun()
        before, total = outs[where], sums[where]
        more = (lse - total).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)  # -inf - -inf: both see nothing
        before.lerp_(out.to(wide), more.sigmoid().unsqueeze(-1))
        total.copy_(torch.logaddexp(total, lse.to(wide)))

    def _begun(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._out is None or self._lse is None:
            wide = accumulation_dtype(self._dtype)
            self._out = torch.zeros(self._size, dtype=wide, device=self._device)
            self._lse = torch.full(self._size[:-1], -math.inf, dtype=wide, device=self._device)
        return self._out, self._lse

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, 0 for a query that sees no key; and the log-sum-exp, then 0 too, as the backward needs it."""
        out, lse = self._begun()
        return out.to(self._dtype), lse.masked_fill(lse == -math.inf, 0.0)
