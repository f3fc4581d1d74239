"""A headless Chromium, driven over its debugging pipe: what a page logs, asks the network for, and looks like."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
VARIABLE = "RINGATTN_CHROMIUM"
PATIENCE = 60.0  # seconds for one answer
LETS_PAGES_SETTLE = 0.2


def found() -> str | None:
    """The executable that the environment names, or the first of its usual names on the PATH."""
    named = os.environ.get(VARIABLE)
    return named or next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One tab, and everything that it said since it was opened."""

    def __init__(self, to: int, come: int) -> None:
        self._to, self._from = to, come
        self._numbers = 0
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command of the DevTools protocol."""
        self._numbers += 1
        message: dict[str, Any] = {"id": self._numbers, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            told = self._read()
            if told.get("id") == self._numbers:
                assert "error" not in told, (method, told["error"])
                result: dict[str, Any] = told["result"]
                return result
            self.events.append(told)
        raise TimeoutError(f"no answer to {method}")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], PATIENCE)[0]:
                raise TimeoutError(f"the browser said nothing for {PATIENCE:g} s")
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has gone"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def open(self, path: Path, width: int, *, scheme: str = "light") -> None:
        """Load a file in a window of a width, light or dark."""
        self.events.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=path.as_uri())
        until = time.monotonic() + PATIENCE
        while self.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < until, "the page does not load"
            time.sleep(LETS_PAGES_SETTLE)

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        told = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def press(self, key: str) -> None:
        """A key, as somebody at the keyboard presses it."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def emulate(self, media: str) -> None:
        """What the page is shown on: ``print``, or ``screen``."""
        self.ask("Emulation.setEmulatedMedia", media=media)

    def complaints(self) -> list[str]:
        """What the console and the log said, and what was thrown."""
        wanted = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in wanted]

    def requests(self) -> list[str]:
        """What was asked of a network or a disk: all but data within the page."""
        sent = [event["params"]["request"]["url"] for event in self.events if event.get("method") == _SENT]
        return [url for url in sent if not url.startswith("data:")]


_SENT = "Network.requestWillBeSent"


@contextmanager
def browser(executable: str, profile: Path) -> Iterator[Page]:
    """A Chromium of its own for a while."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()

    def arrange() -> None:  # the protocol's pipe is at descriptors 3 and 4
        kept_in, kept_out = os.dup(theirs_in), os.dup(theirs_out)
        os.dup2(kept_in, 3)
        os.dup2(kept_out, 4)

    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    process = subprocess.Popen(
        [executable, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe"],
        preexec_fn=arrange,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (theirs_in, theirs_out):
        os.close(end)
    try:
        yield Page(ours_out, ours_in)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for end in (ours_in, ours_out):
            os.close(end)
