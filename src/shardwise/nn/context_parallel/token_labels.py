"""What each token has of its neighbours, worked out before the sequence is cut: positions, documents, next labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.errors import PropertyError
from shardwise.ops.attention import Documents

IGNORED = -100  # a label that no loss counts
INPUTS = ("input_ids", "inputs_embeds")  # of models of transformers


def with_token_values(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of a model of transformers with what its tokens have of their neighbours; any other batch as it is.

    - ``position_ids``: the position of each token in its document, if there are none.
    - ``documents``: where documents begin in packed sequences: where positions begin anew, or padding ends or begins.
    - ``shift_labels``: the label of the next token, which a causal language model predicts, if there are labels.
    """
    made = dict(batch)
    tokens = next((made[name] for name in INPUTS if isinstance(made.get(name), torch.Tensor)), None)
    if tokens is None:
        return made
    samples, length = tokens.shape[:2]
    mask, positions = made.pop("attention_mask", None), made.get("position_ids")
    if mask is not None and mask.ndim != 2:
        raise PropertyError(
            f"a mask of {mask.ndim} dims was given with sequences in pieces: give the mask of tokens, [sample, token], "
            "or position_ids that begin anew with each document"
        )
    if positions is None:
        positions = torch.arange(length, device=tokens.device)
    if positions.ndim > 2 or positions.shape[-1] != length:
        raise PropertyError(
            f"position_ids of size {list(positions.shape)} were given with {samples} samples of {length} tokens: give "
            "[sample, token], or none"
        )
    positions = positions.expand(samples, length)
    documents = Documents.from_positions(positions)
    if mask is not None and not bool(mask.bool().all()):
        if mask.shape != (samples, length):
            raise PropertyError(
                f"an attention_mask of size {list(mask.shape)} was given with {samples} samples of {length} tokens: "
                "give [sample, token], or none"
            )
        _require_padding_at_ends(mask.bool().cpu(), positions.cpu())
        documents = _without_padding(documents, mask.bool(), samples)
    made["position_ids"] = positions
    if documents is not None:
        made["documents"] = documents
    labels = made.get("labels")
    if isinstance(labels, torch.Tensor) and labels.shape == (samples, length) and "shift_labels" not in made:
        made["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return made


def _require_padding_at_ends(mask: torch.Tensor, positions: torch.Tensor) -> None:
    """Raise where padding lies between two tokens of one document: where the position behind is a later one."""
    for sample, (row, where) in enumerate(zip(mask, positions, strict=True)):
        tokens = row.nonzero().flatten()
        holes = ((tokens.diff() > 1) & (where[tokens].diff() > 0)).nonzero().flatten().tolist()
        if holes:
            before, behind = tokens[holes[0] : holes[0] + 2].tolist()
            raise PropertyError(
                f"a sequence is padded on either side, but the attention_mask of sample {sample} has zeros at tokens "
                f"{before + 1} to {behind - 1}, between ones: leave these tokens out; or, if another document begins "
                f"at token {behind}, give position_ids that begin anew there"
            )


def _without_padding(documents: Documents | None, mask: torch.Tensor, samples: int) -> Documents:
    """Padding as documents of its own, which no token of another one sees."""
    begins = (mask[:, 1:] != mask[:, :-1]).cpu()
    known = ((0,),) if documents is None else documents.by_sample(samples)
    rows = [
        {*(known[k] if len(known) > 1 else known[0]), *(row.nonzero().flatten() + 1).tolist()}
        for k, row in enumerate(begins)
    ]
    return Documents.of([sorted(row) for row in rows])
