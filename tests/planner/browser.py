"""A headless Chromium for tests, driven over the DevTools protocol through a pipe: no port, no further package.

Messages are JSON with a zero byte after each, read from the browser's file 4 and written to its file 3. Every wait has
an end, and the browser's process group is killed when its test is over.

    python -m tests.planner.browser          (says which one is found)
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "DIPTYCH_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell", "chromium-headless-shell")
INSTALL = f"apt-get install chromium (or another Chromium; its path in {VARIABLE})"
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it opens files this test wrote, and nothing else
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--force-color-profile=srgb",
)
PATIENCE = 30.0
"""Seconds that an answer may take."""
START = "import os, sys; os.dup2({0}, 3); os.dup2({1}, 4); os.execv(sys.argv[1], sys.argv[1:])"
KEYS = {
    "Enter": 13,
    "Escape": 27,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}


def find_browser() -> str | None:
    """Path of a Chromium: that of the environment variable, or the first of NAMES that is installed.

    Raises:
        ValueError: the variable names no program.
    """
    if given := os.environ.get(VARIABLE):
        if shutil.which(given) is None:
            raise ValueError(f"{VARIABLE}: expected the path of a Chromium, got {given!r}")
        return shutil.which(given)
    return next(filter(None, map(shutil.which, NAMES)), None)


class BrowserError(RuntimeError):
    """The browser did not answer, or refused."""


class Browser:
    """One page in a headless Chromium.

    Args:
        path: of the browser.
        profile: an empty folder of its own.

    Attributes:
        process: the browser's, which leads a group of its own.
        errors: what the page threw or wrote to its console as an error, and what it tried to load.
    """

    def __init__(self, path: str, profile: Path) -> None:
        self.errors: list[str] = []
        self._number, self._buffer, self._events = 0, b"", []
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # Above 3 and 4, which they become in the browser.
        ends = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (to_read, to_write)]
        command = [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START.format(*ends), *command],
            pass_fds=ends,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for each in (to_read, to_write, *ends):
            os.close(each)
        self._session = None
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser, and wait for its answer.

        Raises:
            BrowserError: none came in time, or it is an error.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        try:
            os.write(self._write, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise BrowserError(f"{method}: expected an answer, but the browser has ended") from None
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._next(until, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def open(self, page: Path) -> None:
        """Load a file, and wait until it has been loaded."""
        self.errors.clear()
        self._events.clear()
        self.call("Page.navigate", url=page.as_uri())
        until = time.monotonic() + PATIENCE
        while "Page.loadEventFired" not in self._events:
            self._note(self._next(until, "loading"))

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        """Give the window a size, and its user a liking."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.settle()

    def evaluate(self, expression: str) -> Any:
        """A value that JavaScript gives, by JSON; promises are waited for.

        Raises:
            BrowserError: it throws.
        """
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until the page has been drawn twice, with what observes sizes."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def press(self, key: str) -> None:
        """Press a key, as somebody would."""
        more = {"windowsVirtualKeyCode": KEYS[key]} if key in KEYS else {"text": key}
        if key == "Enter":
            more["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **more)

    def point(self, x: float, y: float, click: bool = False) -> None:
        """Move the mouse to a place in the window; click there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, whole: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        return base64.b64decode(
            self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))["data"]
        )

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {**size, "scale": 1}}

    def close(self) -> None:
        """End the browser and all it has started."""
        for each in (self._read, self._write):
            os.close(each)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)

    def _next(self, until: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise BrowserError(f"{what}: expected an answer within {PATIENCE:g} s, got none")
            read = os.read(self._read, 1 << 20)
            if not read:
                raise BrowserError(f"{what}: expected an answer, but the browser has ended")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        """Keep what a page must not do."""
        method, parameters = event.get("method", ""), event.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith("file:"):
            self.errors.append(f"loads {parameters['request']['url']}")


def main() -> None:
    """Say which browser is used, or how to install one."""
    found = find_browser()
    if found is None:
        raise SystemExit(f"browser: expected one of {', '.join(NAMES)}, got none; {INSTALL}")
    print(f"browser: {found}")


if __name__ == "__main__":
    main()
