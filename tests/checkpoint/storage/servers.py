"""Servers for tests of remote storage: one that speaks S3, a proxy before it that fails when told, one of files."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import s3fs
from tests.patience import PATIENT

BUCKET = "bucket"
KEYS = {"key": "tests", "secret": "tests", "client_kwargs": {"region_name": "us-east-1"}}
# It ends with its standard input, so that it never outlives the tests, however these end.
MOTO = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """A process of its own with moto's server and an empty bucket; its endpoint."""
    command = [sys.executable, "-c", MOTO]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            host, port = process.stdout.readline().split()
            endpoint = f"http://{host}:{port}"
            s3fs.S3FileSystem(endpoint_url=endpoint, **KEYS).call_s3("create_bucket", Bucket=BUCKET)
            yield endpoint
        finally:
            process.kill()


@contextmanager
def served(handler: Any, **attributes: Any) -> Iterator[ThreadingHTTPServer]:
    """A server of this handler, in threads."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    vars(server).update(attributes)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def address_of(server: ThreadingHTTPServer) -> str:
    """Its URL."""
    return f"http://127.0.0.1:{server.server_address[1]}"


class QuietFiles(SimpleHTTPRequestHandler):
    """Files of a directory; whole ones only, for it does not know ranges."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """A web server of a directory; its URL."""
    with served(partial(QuietFiles, directory=str(folder))) as server:
        yield address_of(server)


class Proxy:
    """A server between a client and another one, which answers some requests wrongly when told to."""

    def __init__(self, behind: str) -> None:
        self.behind = urlsplit(behind)
        self.seen: list[str] = []  # requests, such as "PUT /bucket/name?partNumber=1"
        self._faults: list[str] = []
        self._of = ""
        self._lock = threading.Lock()
        self.over = threading.Event()

    def fail(self, faults: list[str], of: str = "") -> None:
        """Answer the next requests with this in them by a status, or "cut", "short", "lost" or "silent"."""
        with self._lock:
            self._faults, self._of = faults[::-1], of
            self.seen.clear()

    def fault(self, request: str) -> str | None:
        """What is to go wrong with this request."""
        with self._lock:
            self.seen.append(request)
            return self._faults.pop() if self._faults and self._of in request else None

    def asked(self, of: str = "") -> int:
        """How many requests came with this in them."""
        return sum(of in request for request in self.seen)


class ProxyHandler(BaseHTTPRequestHandler):
    """One connection through a proxy."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def handle_any(self) -> None:
        """Pass a request on, or fail as told."""
        proxy: Proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = proxy.fault(f"{self.command} {self.path}")
        if fault == "silent":
            proxy.over.wait(PATIENT)
        if fault in ("cut", "silent"):
            self.close_connection = True
            return
        if fault is not None and fault.isdigit():
            self.send_response(int(fault))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        connection = http.client.HTTPConnection(proxy.behind.netloc)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if fault == "lost":  # done, but the client does not get to know
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "server", "date", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", answer.getheader("Content-Length") or str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if fault == "short" else data)
        self.close_connection |= fault == "short"

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815 # names of http.server


@contextmanager
def proxy_to(endpoint: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy, and its endpoint."""
    proxy = Proxy(endpoint)
    with served(ProxyHandler, proxy=proxy) as server:
        try:
            yield proxy, address_of(server)
        finally:
            proxy.over.set()
