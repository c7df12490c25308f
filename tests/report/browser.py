"""A headless Chromium, driven through the DevTools protocol over two pipes; needs the standard library alone."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
]
# Chromium reads from descriptor 3 and writes to 4.
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Home": 36,
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
}


def found() -> str | None:
    """The path of an installed Chromium or Chrome."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser. `problems` has console errors, exceptions, and requests to the network."""

    def __init__(self) -> None:
        path = found()
        assert path is not None
        self._profile = tempfile.TemporaryDirectory(prefix="report-browser-", ignore_cleanup_errors=True)
        to_browser, from_browser = os.pipe(), os.pipe()
        # Above 9, so that putting them on 3 and 4 overwrites neither.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser[0], from_browser[1])]
        command = [sys.executable, "-c", START, *map(str, theirs), path, *FLAGS]
        command += [f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (*theirs, to_browser[0], from_browser[1]):
            os.close(end)
        self._write, self._read = to_browser[1], from_browser[0]
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)  # with it, the browser ends
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and waits for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        left = json.dumps(message).encode() + b"\0"
        while left:
            left = left[os.write(self._write, left) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Opens a file in a window of this size, and waits until it is drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call(
            "Emulation.setEmulatedMedia", features=[scheme, {"name": "prefers-reduced-motion", "value": "reduce"}]
        )
        self.resize(width, height)
        self._events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._next()
        self.drawn()

    def resize(self, width: int, height: int = 900) -> None:
        """Gives the window this size in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def drawn(self) -> None:
        """Waits for two frames: observers have run and what they changed is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element, scrolled into the window."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.drawn()
        box = self.run(
            f"(() => {{ const b = {found}.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; }})()"
        )
        return box[0], box[1], box[2], box[3]

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: Moved, Pressed, Released or Wheel."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def click(self, selector: str) -> None:
        """Presses and releases the mouse in the middle of an element."""
        left, top, width, height = self.place(selector)
        for kind in ("Moved", "Pressed", "Released"):
            button = "none" if kind == "Moved" else "left"
            self.mouse(kind, left + width / 2, top + height / 2, button=button, clickCount=int(kind != "Moved"))

    def key(self, key: str) -> None:
        """Presses and releases a key."""
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, selector: str, text: str) -> None:
        """Puts this text into a field in place of what it holds, as typing would."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.focus(), {found}.select()")
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Saves a picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._read, 1 << 16)
            if not more:
                raise RuntimeError("the browser ended")
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message.get("params", {}))
        return message

    def _note(self, method: str, found: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console: {found['args']}")
        elif method == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.problems.append(f"log: {found['entry']['text']}")
        elif method == "Network.requestWillBeSent" and not found["request"]["url"].startswith(
            ("file:", "data:", "about:")
        ):
            self.problems.append(f"network: {found['request']['url']}")
