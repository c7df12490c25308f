"""File systems of fsspec by the scheme of an address: which package has them, and one for all threads of a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from shardwise.errors import CheckpointError

# Packages that have the driver of a scheme; of others fsspec itself says what is missing.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
}
IN_EXTRA = ("s3fs", "aiohttp")  # what `shardwise[storage]` installs

_made: dict[str, Any] = {}
_inherited: list[Any] = []
_making = threading.Lock()


def filesystem(scheme: str, url: str, options: Mapping[str, Any]) -> Any:
    """The file system of an address, without caches of listings; the same for the same options in one process."""
    kind = _kind(scheme, url)
    told = {**kind._get_kwargs_from_urls(url), **options, "use_listings_cache": False, "skip_instance_cache": True}
    if PACKAGES.get(scheme) == "s3fs":
        told["config_kwargs"] = _in_one_try(told.get("config_kwargs"))
    key = f"{kind.__module__}.{kind.__name__} {sorted(told.items(), key=lambda item: item[0])!r}"
    with _making:
        if key not in _made:
            # fsspec's own cache has one for each thread, and a save in the background has a new thread each time.
            _made[key] = kind(**told)
            if PACKAGES.get(scheme) == "s3fs":
                _made[key].retries = 1  # ours are more, and are not multiplied by those of others
        return _made[key]


def root_of(scheme: str, url: str) -> str:
    """The path that an address has in its file system."""
    return str(_kind(scheme, url)._strip_protocol(url)).rstrip("/")


def _kind(scheme: str, url: str) -> Any:
    package = PACKAGES.get(scheme)
    try:
        from fsspec import get_filesystem_class
    except ImportError as error:
        raise _missing(url, *(["fsspec", package] if package else ["fsspec"])) from error
    try:
        return get_filesystem_class(scheme)
    except ImportError as error:
        if package:
            raise _missing(url, package) from error
        raise CheckpointError(f"'{url}' needs a package that is not here: {' '.join(str(error).split())}") from error
    except ValueError as error:  # fsspec does not know it
        raise CheckpointError(f"'{url}' lies nowhere: no storage is known by '{scheme}://'") from error


def _missing(url: str, *packages: str) -> CheckpointError:
    extra = all(package in (*IN_EXTRA, "fsspec") for package in packages)
    return CheckpointError(
        f"'{url}' needs {' and '.join(packages)}: pip install {'shardwise[storage]' if extra else ' '.join(packages)}"
    )


def _in_one_try(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What botocore is told: to leave it to us to try again, and to give a slow line time for a part."""
    return {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60, **(given or {})}


def _begin_anew() -> None:
    """In a forked process: what its parent made needs threads that are not here, even to be closed."""
    global _making
    _making = threading.Lock()
    _inherited.extend(_made.values())
    _made.clear()


os.register_at_fork(after_in_child=_begin_anew)
