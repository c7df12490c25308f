"""`S3Objects`: what S3 can do beyond fsspec's files: parts that are sent side by side, answers that tell a version."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from threading import Event
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.storage.objects import CHANGED, NO_RANGES, About, Objects
from shardwise.storage.parts import Target, side_by_side
from shardwise.storage.retries import Attempt, ShortAnswerError

UPLOADS = 4  # parts on their way at a time, each of which is in memory
CHUNK = 2**20  # bytes that are taken from an answer at a time
REMOVED_AT_ONCE = 1000  # as many as S3 takes


class S3Objects(Objects):
    """Objects of S3, or of a store that speaks as it does."""

    tells_versions = True

    def fetch(self, path: str, begin: int, buffers: Sequence[memoryview], about: About) -> None:
        """Fill buffers from this byte of an object on, in one request, as the answer comes in."""
        from fsspec.asyn import sync

        sync(self.filesystem.loop, self._fetch, path, begin, Target(buffers), about)

    async def _fetch(self, path: str, begin: int, target: Target, about: About) -> None:
        end = begin + target.missing
        answer = await self.filesystem._call_s3("get_object", **self._place(path), Range=f"bytes={begin}-{end - 1}")
        body = answer["Body"]
        try:
            if answer.get("ETag") != about.etag:
                raise OSError(errno.ESTALE, CHANGED)
            if answer["ContentLength"] > target.missing:
                raise OSError(errno.EOPNOTSUPP, NO_RANGES)
            while data := await body.read(CHUNK):
                target.put(data)
        finally:
            body.close()
        if target.missing:
            raise ShortAnswerError(f"{target.missing:,} bytes did not come")

    def put(self, path: str, content: bytes) -> None:
        """Write an object by one request."""
        self._call("put_object", path, Body=content)

    def upload(self, path: str, parts: Iterator[bytes], attempt: Attempt) -> None:
        """Write an object in parts, several at a time; if it fails, nothing is left of them."""
        first = list(islice(parts, 2))
        if len(first) < 2:
            attempt(lambda: self.put(path, b"".join(first)))
            return
        upload = attempt(lambda: self._call("create_multipart_upload", path))["UploadId"]
        size = 0

        def send(number: int, part: bytes, given_up: Event) -> dict[str, Any]:
            def call() -> Any:
                return self._call("upload_part", path, UploadId=upload, PartNumber=number, Body=part)

            answer = attempt(call, given_up=given_up)
            sums = {key: value for key, value in answer.items() if key.startswith("Checksum")}
            return {"PartNumber": number, "ETag": answer["ETag"], **sums}

        def jobs() -> Iterator[Any]:
            nonlocal size
            for number, part in enumerate(chain(_popped(first), parts), 1):
                size += len(part)
                yield lambda given_up, number=number, part=part: send(number, part, given_up)

        try:
            sent = side_by_side(jobs(), UPLOADS)
            attempt(lambda: self._complete(path, upload, sent, size))
        except BaseException:
            with suppress(CheckpointError):
                attempt(lambda: self._call("abort_multipart_upload", path, UploadId=upload))
            raise

    def _complete(self, path: str, upload: str, sent: list[dict[str, Any]], size: int) -> None:
        try:
            self._call("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": sent})
        except FileNotFoundError:
            # Done by a request before, whose answer was lost?
            if self.about(path).size != size:
                raise

    def remove(self, paths: Sequence[str], attempt: Attempt) -> None:
        """Remove objects, as far as they are there, many by one request."""
        for begin in range(0, len(paths), REMOVED_AT_ONCE):
            some = paths[begin : begin + REMOVED_AT_ONCE]
            attempt(lambda some=some: self._remove(some))  # type: ignore[misc] # a lambda's default

    def _remove(self, paths: Sequence[str]) -> None:
        places = [self._place(path) for path in paths]
        wanted = {"Objects": [{"Key": place["Key"]} for place in places], "Quiet": True}
        answer = self.filesystem.call_s3("delete_objects", Bucket=places[0]["Bucket"], Delete=wanted)
        for error in answer.get("Errors", ()):
            if error.get("Code") != "NoSuchKey":
                raise OSError(f"{error.get('Key')}: {error.get('Code')}: {error.get('Message')}")

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        return self.filesystem.call_s3(method, **self._place(path), **arguments)

    def _place(self, path: str) -> dict[str, str]:
        bucket, key, _ = self.filesystem.split_path(path)
        return {"Bucket": bucket, "Key": key}


def _popped(parts: list[bytes]) -> Iterator[bytes]:
    """These parts, without keeping them."""
    while parts:
        yield parts.pop(0)
