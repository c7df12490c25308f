"""`S3Objects`: objects of S3, with concurrent uploads of parts, and responses that have a version."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from threading import Event
from typing import Any

from shardwise.checkpoint.storage.objects import CHANGED, NO_RANGES, ObjectInfo, Objects
from shardwise.checkpoint.storage.parts import BufferSequence, run_concurrently
from shardwise.checkpoint.storage.retries import Attempt, ShortAnswerError
from shardwise.errors import CheckpointError

UPLOADS = 4  # parts sent at a time, each of which is in memory
CHUNK = 2**20  # bytes taken from a response at a time
REMOVED_AT_ONCE = 1000  # S3's limit


class S3Objects(Objects):
    """Objects of S3, or of a store with the same interface."""

    tells_versions = True

    def fetch(self, path: str, begin: int, buffers: Sequence[memoryview], about: ObjectInfo) -> None:
        """Fill buffers from byte ``begin`` of an object, in one request, as the response arrives."""
        from fsspec.asyn import sync

        sync(self.filesystem.loop, self._fetch, path, begin, BufferSequence(buffers), about)

    async def _fetch(self, path: str, begin: int, target: BufferSequence, about: ObjectInfo) -> None:
        end = begin + target.missing
        response = await self.filesystem._call_s3(
            "get_object", **self._bucket_and_key(path), Range=f"bytes={begin}-{end - 1}"
        )
        body = response["Body"]
        try:
            if response.get("ETag") != about.etag:
                raise OSError(errno.ESTALE, CHANGED)
            if response["ContentLength"] > target.missing:
                raise OSError(errno.EOPNOTSUPP, NO_RANGES)
            while data := await body.read(CHUNK):
                target.put(data)
        finally:
            body.close()
        if target.missing:
            raise ShortAnswerError(f"{target.missing:,} bytes did not come")

    def put(self, path: str, content: bytes) -> None:
        """Write an object in one request."""
        self._call("put_object", path, Body=content)

    def upload(self, path: str, parts: Iterator[bytes], attempt: Attempt) -> None:
        """Write an object in parts, several at a time; if it fails, no parts are left."""
        first = list(islice(parts, 2))
        if len(first) < 2:
            attempt(lambda: self.put(path, b"".join(first)))
            return
        upload = attempt(lambda: self._call("create_multipart_upload", path))["UploadId"]
        size = 0

        def send(number: int, part: bytes, given_up: Event) -> dict[str, Any]:
            def call() -> Any:
                return self._call("upload_part", path, UploadId=upload, PartNumber=number, Body=part)

            response = attempt(call, given_up=given_up)
            sums = {key: value for key, value in response.items() if key.startswith("Checksum")}
            return {"PartNumber": number, "ETag": response["ETag"], **sums}

        def jobs() -> Iterator[Any]:
            nonlocal size
            for number, part in enumerate(chain(_popped(first), parts), 1):
                size += len(part)
                yield lambda given_up, number=number, part=part: send(number, part, given_up)

        try:
            sent = run_concurrently(jobs(), UPLOADS)
            attempt(lambda: self._complete(path, upload, sent, size))
        except BaseException:
            with suppress(CheckpointError):
                attempt(lambda: self._call("abort_multipart_upload", path, UploadId=upload))
            raise

    def _complete(self, path: str, upload: str, sent: list[dict[str, Any]], size: int) -> None:
        try:
            self._call("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": sent})
        except FileNotFoundError:
            # Completed by an earlier request whose response was lost?
            if self.about(path).size != size:
                raise

    def remove(self, paths: Sequence[str], attempt: Attempt) -> None:
        """Remove objects that exist, many in one request."""
        for begin in range(0, len(paths), REMOVED_AT_ONCE):
            some = paths[begin : begin + REMOVED_AT_ONCE]
            attempt(lambda some=some: self._remove(some))  # type: ignore[misc] # a lambda's default

    def _remove(self, paths: Sequence[str]) -> None:
        keys = [self._bucket_and_key(path) for path in paths]
        request = {"Objects": [{"Key": key["Key"]} for key in keys], "Quiet": True}
        response = self.filesystem.call_s3("delete_objects", Bucket=keys[0]["Bucket"], Delete=request)
        for error in response.get("Errors", ()):
            if error.get("Code") != "NoSuchKey":
                raise OSError(f"{error.get('Key')}: {error.get('Code')}: {error.get('Message')}")

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        return self.filesystem.call_s3(method, **self._bucket_and_key(path), **arguments)

    def _bucket_and_key(self, path: str) -> dict[str, str]:
        bucket, key, _ = self.filesystem.split_path(path)
        return {"Bucket": bucket, "Key": key}


def _popped(parts: list[bytes]) -> Iterator[bytes]:
    """The parts, removed from the list as they are used."""
    while parts:
        yield parts.pop(0)
