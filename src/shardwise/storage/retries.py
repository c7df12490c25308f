"""Trying again: which failures of a remote store pass by themselves, and what is said when they do not."""

from __future__ import annotations

import errno
import http.client
import random
import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Protocol, TypeVar

from shardwise.errors import CheckpointError, FileGoneError

T = TypeVar("T")

FIRST_WAIT, LONGEST_WAIT = 0.2, 10.0  # seconds
PASSING_STATUSES = (408, 425, 429, 500, 502, 503, 504, 509)  # of HTTP
PASSING_CODES = {
    "BadDigest",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
}
PASSING_ERRNOS = (errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH)
# By name, for the packages they come from need not be here: botocore, aiohttp, urllib3, requests and Azure.
PASSING_ERRORS = {
    "ClientConnectionError",
    "ClientPayloadError",
    "HTTPClientError",
    "IncompleteRead",
    "IncompleteReadError",
    "ProtocolError",
    "ResponseParserError",
    "ServiceRequestError",
    "ServiceResponseError",
}
_chance = random.Random()  # of its own: nobody's seed is touched


class ShortAnswerError(ConnectionError):
    """A store gave fewer bytes than were asked for."""


class Attempt(Protocol):
    """Do something that may have to be tried again; where it fails, a `CheckpointError`."""

    def __call__(self, action: Callable[[], T], *, given_up: Event | None = None, once: bool = False) -> T:
        """Stop trying when others have given up; or try it once, where a second time would not be the same."""


def attempts(what: str, address: str, tries: int, *, reads: bool) -> Attempt:
    """Tries of one kind of action on one file; for one that reads, a file that is not there is a `FileGoneError`."""

    def attempt(action: Callable[[], T], *, given_up: Event | None = None, once: bool = False) -> T:
        count = 1
        while True:
            try:
                return action()
            except CheckpointError:
                raise
            except Exception as error:  # whatever the drivers and the packages below them raise
                over = once or count >= tries or (given_up is not None and given_up.is_set())
                if over or not passes_by(error):
                    kind = FileGoneError if reads and isinstance(error, FileNotFoundError) else CheckpointError
                    times = f" after {count} tries" if count > 1 else ""
                    raise kind(f"could not {what} '{address}'{times}: {in_one_line(error)}") from error
            wait = min(FIRST_WAIT * 2 ** (count - 1), LONGEST_WAIT) * (0.5 + _chance.random())
            if given_up is None:
                time.sleep(wait)
            else:
                given_up.wait(wait)
            count += 1

    return attempt


def passes_by(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
        return False
    for cause in _chain(error):
        if _is_of_the_line(cause) or (code := _code(cause)) in PASSING_CODES:
            return True
        if (status := _status(cause)) is not None or code is not None:
            return status in PASSING_STATUSES
    return False


def _is_of_the_line(error: BaseException) -> bool:
    return (
        isinstance(error, TimeoutError | ConnectionError | http.client.IncompleteRead)
        or (isinstance(error, OSError) and error.errno in PASSING_ERRNOS)
        or any(kind.__name__ in PASSING_ERRORS for kind in type(error).__mro__)
    )


def in_one_line(error: BaseException) -> str:
    """What went wrong, in one line: the store's own word for it, where it has one."""
    named = next((code for cause in _chain(error) if (code := _code(cause))), None)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    else:
        text, named = str(error), named or type(error).__name__
    told = text if named is None or named in text else f"{named}: {text}"
    return " ".join(told.split())[:500]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and all(error is not other for other in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _code(error: BaseException) -> str | None:
    """The code in an answer of S3."""
    answer = getattr(error, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) or None if isinstance(answer, dict) else None


def _status(error: BaseException) -> int | None:
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):
        found = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    values = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((value for value in values if isinstance(value, int) and 100 <= value < 600), None)
