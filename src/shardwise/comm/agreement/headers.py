"""The first round of a meeting: whether all ranks say the same and none has failed, and a few bytes of each.

How digests travel depends on the size of the group alone, so that ranks meet whatever verb they are in. In a small
group each rank sends its header to each, and a few bytes that it brings with it. In a large one the largest and the
smallest digest are found in rounds; what the ranks bring is gathered afterwards, if it is not the same on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from torch.distributed import ProcessGroup

from shardwise.comm.agreement.gathered import Gathered
from shardwise.comm.agreement.small_messages import HEADER, Gathering, Reduction
from shardwise.comm.group import DIGEST, PeerCheck, is_large

# A header: digest of the history, whether this rank failed, length of what it brings, and that itself if there is room.
ROOM = HEADER - DIGEST - 1 - 8
MOST = 2**63 - 1  # of a number that is reduced
HEADERS, SIZES, REPORTS, LETTERS = range(4)  # kinds of messages in a meeting


def room(process_group: ProcessGroup) -> int:
    """How many bytes can be told along with the digest, and cost nothing more."""
    return 0 if is_large(process_group) else ROOM


class Headers:
    """Each rank's digest, sent to each rank, with what it brings if there is room."""

    def __init__(
        self, group: ProcessGroup, digest: bytes, failed: bool, brought: bytes, tag: Callable[[int], int]
    ) -> None:
        self._group, self._brought, self._tag = group, brought, tag(LETTERS)
        letter = brought if len(brought) <= ROOM else b""
        header = digest + bytes([failed]) + len(brought).to_bytes(8, "little") + letter
        self._gathering = Gathering(group, header, HEADER, tag(HEADERS))

    def agree(self, look: PeerCheck, patience: float | None) -> bool:
        """Whether all digests are the same, and no rank failed."""
        self._headers = self._gathering.wait(look, patience)
        first = self._headers[0]
        self._alike = self._headers.count(first) == len(self._headers)
        same = self._alike or all(other[: DIGEST + 1] == first[: DIGEST + 1] for other in self._headers)
        return same and not first[DIGEST]

    def told(self, look: PeerCheck) -> Gathered[bytes]:
        """What each rank brings."""
        if self._alike and len(self._brought) <= ROOM:
            return Gathered.alike(self._brought, len(self._headers))
        begin = HEADER - ROOM
        lengths = [int.from_bytes(header[DIGEST + 1 : begin], "little") for header in self._headers]
        longest = max(lengths)
        letters = [header[begin:] for header in self._headers]
        if longest > ROOM:
            letters = Gathering(self._group, self._brought, longest, self._tag).wait(look)
        return Gathered.by(letter[:length] for letter, length in zip(letters, lengths, strict=True))


class Compared:
    """The largest and the smallest digest of all ranks. A rank that failed gives what no digest can be."""

    def __init__(
        self, group: ProcessGroup, digest: bytes, failed: bool, brought: bytes, tag: Callable[[int], int]
    ) -> None:
        self._group, self._brought, self._tag = group, brought, tag(LETTERS)
        words = [_word(digest[:8]), _word(digest[8:]), _word(hashlib.blake2b(brought, digest_size=8).digest())]
        numbers = [*words, *(~word for word in words)]  # the largest complement is that of the smallest
        given = [MOST] * len(numbers) + [0] if failed else [*numbers, len(brought)]
        self._reduction = Reduction(group, given, tag(HEADERS))

    def agree(self, look: PeerCheck, patience: float | None) -> bool:
        """Whether all digests are the same, and no rank failed."""
        *largest, self._longest = self._reduction.wait(look, patience)
        one, two, brought = (high == ~low for high, low in zip(largest[:3], largest[3:], strict=True))
        self._alike = brought
        return one and two

    def told(self, look: PeerCheck) -> Gathered[bytes]:
        """What each rank brings; that is sent only if it is not the same on all of them."""
        if self._alike:
            return Gathered.alike(self._brought, self._group.size())
        entry = len(self._brought).to_bytes(8, "little") + self._brought
        entries = Gathering(self._group, entry, 8 + self._longest, self._tag).wait(look)
        return Gathered.by(entry[8 : 8 + int.from_bytes(entry[:8], "little")] for entry in entries)


def _word(digest: bytes) -> int:
    return int.from_bytes(digest, "little", signed=True)
