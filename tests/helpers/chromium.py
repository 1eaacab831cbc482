"""A headless Chromium over its debugging pipe: what a page requests, logs and shows."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next((path for name in NAMES if (path := shutil.which(name))), None)
DEADLINE_S = 60.0
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Browser:
    def __init__(self, write: int, read: int):
        self._write, self._read, self._buffer = write, read, b""
        self._call_id = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **arguments: Any) -> dict[str, Any]:
        self._call_id += 1
        message = {"id": self._call_id, "method": method, "params": arguments}
        os.write(self._write, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._call_id:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]

    def wait_for(self, event: str) -> None:
        while not any(seen["method"] == event for seen in self.events):
            self._next()

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no message from Chromium for {DEADLINE_S:g} s"
            data = os.read(self._read, 1 << 16)
            assert data, "Chromium has exited"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message


class View:
    """A loaded page."""

    def __init__(self, browser: Browser, file: Path, *, width: int, scheme: Literal["light", "dark"]):
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.events.clear()
        self._call("Page.navigate", url=file.as_uri())
        browser.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        reply = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    @property
    def requested(self) -> list[str]:
        """The URLs of all requests."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    @property
    def console_messages(self) -> list[dict[str, Any]]:
        """Everything that a developer would see in the console."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [event["params"] for event in self._browser.events if event["method"] in kinds]

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        capture = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(capture["data"]))

    def point_at(self, x: float, y: float) -> None:
        self._call("Page.bringToFront")
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, x: float, y: float, right: float) -> None:
        """Press at a point, move `right` pixels, release."""
        self.point_at(x, y)
        press = {"button": "left", "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **press)
        for part in (0.5, 1.0):
            self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x + part * right, y=y, button="left", buttons=1)
        self._call("Input.dispatchMouseEvent", type="mouseReleased", x=x + right, y=y, **press)

    def double_click(self, x: float, y: float) -> None:
        self.point_at(x, y)
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)

    def wait_until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, condition
            time.sleep(0.02)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **arguments)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start Chromium, which reads commands from descriptor 3 and replies on 4."""
    assert PROGRAM is not None
    (child_in, our_out), (our_in, child_out) = os.pipe(), os.pipe()
    # The shell moves the two ends to the descriptors that Chromium expects.
    command = f'exec 3<&{child_in} 4>&{child_out}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", PROGRAM, *_OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(child_in, child_out),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(child_in)
    os.close(child_out)
    browser = Browser(our_out, our_in)
    try:
        yield browser
        browser.call("Browser.close")
    finally:
        os.close(our_out)
        os.close(our_in)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
