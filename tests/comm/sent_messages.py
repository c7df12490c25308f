"""The messages that a rank sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwise.comm.group import tagged_messages


def sent(call: Callable[[], object]) -> list[int]:
    """The bytes of each message that this rank sends in a call."""
    found: list[int] = []
    send = tagged_messages.TaggedMessages.send

    def note(self: Any, tensor: Any, peer: int, tag: int) -> None:
        found.append(tensor.nbytes)
        send(self, tensor, peer, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tagged_messages.TaggedMessages, "send", note)
        call()
    return found
