"""Retries: which failures of a remote store are transient, and the error of those that are not."""

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
TRANSIENT_STATUSES = (408, 425, 429, 500, 502, 503, 504, 509)  # of HTTP
TRANSIENT_CODES = {
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
TRANSIENT_ERRNOS = (errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH)
# By name, for the packages need not be installed: botocore, aiohttp, urllib3, requests and Azure.
TRANSIENT_ERRORS = {
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
_jitter = random.Random()  # not the global generator, so that users' seeds hold


class ShortAnswerError(ConnectionError):
    """A store sent fewer bytes than requested."""


class Attempt(Protocol):
    """Run an action with retries; raises a `CheckpointError` where it fails."""

    def __call__(self, action: Callable[[], T], *, given_up: Event | None = None, once: bool = False) -> T:
        """Stop when ``given_up`` is set; with ``once``, do not retry an action that is not idempotent."""


def retrying(what: str, address: str, tries: int, *, reads: bool) -> Attempt:
    """Retries of one kind of action on one file. With ``reads``, a missing file is a `FileGoneError`."""

    def attempt(action: Callable[[], T], *, given_up: Event | None = None, once: bool = False) -> T:
        count = 1
        while True:
            try:
                return action()
            except CheckpointError:
                raise
            except Exception as error:  # of any driver
                over = once or count >= tries or (given_up is not None and given_up.is_set())
                if over or not is_transient(error):
                    kind = FileGoneError if reads and isinstance(error, FileNotFoundError) else CheckpointError
                    times = f" after {count} tries" if count > 1 else ""
                    raise kind(f"could not {what} '{address}'{times}: {one_line(error)}") from error
            wait = min(FIRST_WAIT * 2 ** (count - 1), LONGEST_WAIT) * (0.5 + _jitter.random())
            if given_up is None:
                time.sleep(wait)
            else:
                given_up.wait(wait)
            count += 1

    return attempt


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
        return False
    for cause in _chain(error):
        if _is_connection_error(cause) or (code := _code(cause)) in TRANSIENT_CODES:
            return True
        if (status := _status(cause)) is not None or code is not None:
            return status in TRANSIENT_STATUSES
    return False


def _is_connection_error(error: BaseException) -> bool:
    return (
        isinstance(error, TimeoutError | ConnectionError | http.client.IncompleteRead)
        or (isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS)
        or any(kind.__name__ in TRANSIENT_ERRORS for kind in type(error).__mro__)
    )


def one_line(error: BaseException) -> str:
    """The error in one line, with the store's own error code if it has one."""
    named = next((code for cause in _chain(error) if (code := _code(cause))), None)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    else:
        text, named = str(error), named or type(error).__name__
    message = text if named is None or named in text else f"{named}: {text}"
    return " ".join(message.split())[:500]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and all(error is not other for other in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _code(error: BaseException) -> str | None:
    """The error code in a response of S3."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) or None if isinstance(response, dict) else None


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    values = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((value for value in values if isinstance(value, int) and 100 <= value < 600), None)
