"""What DTensor is told when it is about to take a sharded tensor for the local tensor of a rank.

`DTensor.from_local` looks at nothing but the size of what it is given.
"""

from __future__ import annotations

from typing import Any

from shardwise.dispatch import Distributed
from shardwise.errors import MixedOperandsError
from shardwise.interop.loading import Function, replace_when_loaded

WRAPPING = "torch.distributed.tensor._api"


def _refusing(theirs: Function) -> Function:
    """The function behind `DTensor.from_local`, which also refuses tensors that are spread over ranks already."""

    def forward(ctx: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input, Distributed):
            raise MixedOperandsError(
                f"DTensor.from_local takes this rank's own plain tensor, found {input!r}: "
                "shardwise.to_dtensor(tensor, mesh, placements) makes a DTensor of it"
            )
        return theirs(ctx, input, *args, **kwargs)

    return forward


replace_when_loaded(WRAPPING, "_FromTorchTensor.forward", _refusing)
