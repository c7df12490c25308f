"""`Documents`: where documents begin in sequences that several of them are packed into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from shardwise.errors import PropertyError


class Documents(str):
    """The positions at which documents begin, for all samples alike or for each: as a text, for it is a value that
    calls are cached by. ``Documents.of([0, 7])`` is two documents, of which the second one begins at position 7."""

    __slots__ = ()

    @staticmethod
    def of(begins: Documents | Sequence[int] | Sequence[Sequence[int]] | torch.Tensor) -> Documents:
        """Of one list of positions for all samples, or of one for each; position 0 may be left out."""
        if isinstance(begins, Documents):
            return begins
        if isinstance(begins, torch.Tensor):
            begins = begins.tolist()
        rows = [list(one) if isinstance(one, Iterable) else one for one in begins]
        each = rows if rows and isinstance(rows[0], list) else [rows]
        texts = []
        for row in each:
            found = sorted({0, *map(_position, row if isinstance(row, list) else [row])})
            texts.append(",".join(map(str, found)))
        return Documents(texts[0] if len(set(texts)) == 1 else ";".join(texts))

    @staticmethod
    def from_positions(positions: torch.Tensor) -> Documents | None:
        """Of the position of each token in its own document, as ``[sample, token]``; None if there is one a sample.

        A document begins wherever a position does not follow the one before.
        """
        begins = (positions[:, 1:] != positions[:, :-1] + 1).cpu()
        if not bool(begins.any()):
            return None
        return Documents.of([(row.nonzero().flatten() + 1).tolist() for row in begins])

    def by_sample(self, samples: int) -> tuple[tuple[int, ...], ...]:
        """The positions: one tuple for all samples, or one for each."""
        found = _parsed(self)
        if len(found) not in (1, samples):
            raise PropertyError(f"documents of {len(found)} samples were given with a batch of {samples}")
        return found


@lru_cache(maxsize=256)
def _parsed(text: Documents) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row.split(","))) for row in text.split(";"))


def _position(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PropertyError(f"documents are the positions at which they begin, found {value!r:.80} among them")
    return value
