"""fsspec's file systems by URL scheme: the packages that they need, and one instance for all threads of a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from shardwise.errors import CheckpointError

# The packages of schemes; for other schemes fsspec's own error names what is missing.
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

_filesystems: dict[str, Any] = {}
_inherited: list[Any] = []
_lock = threading.Lock()


def filesystem(scheme: str, url: str, options: Mapping[str, Any]) -> Any:
    """The file system of a URL, without listing caches; one instance for the same options in a process."""
    kind = _kind(scheme, url)
    settings = {**kind._get_kwargs_from_urls(url), **options, "use_listings_cache": False, "skip_instance_cache": True}
    if PACKAGES.get(scheme) == "s3fs":
        settings["config_kwargs"] = _without_retries(settings.get("config_kwargs"))
    key = f"{kind.__module__}.{kind.__name__} {sorted(settings.items(), key=lambda item: item[0])!r}"
    with _lock:
        if key not in _filesystems:
            # fsspec's own cache is per thread, and each save in the background has a new thread.
            _filesystems[key] = kind(**settings)
            if PACKAGES.get(scheme) == "s3fs":
                _filesystems[key].retries = 1  # `retries` does this, and retries must not multiply
        return _filesystems[key]


def root_path(scheme: str, url: str) -> str:
    """The path of a URL in its file system."""
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


def _without_retries(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The configuration of botocore: no retries of its own, and timeouts for slow connections."""
    return {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60, **(given or {})}


def _reset_after_fork() -> None:
    """Drop the parent's file systems in a forked process: they need threads that do not exist here, even to close."""
    global _lock
    _lock = threading.Lock()
    _inherited.extend(_filesystems.values())
    _filesystems.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
