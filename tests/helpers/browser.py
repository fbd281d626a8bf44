"""A headless Chromium, spoken to over its debugging pipe: no driver, no package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    """The path in SPECDEC_CHROMIUM, or the first known name on the path."""
    named = os.environ.get("SPECDEC_CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One open page. requests: addresses that it asked for; errors: uncaught exceptions and refusals by its policy."""

    def __init__(self, send: int, receive: int):
        self.send, self.receive, self.rest, self.count = send, receive, b"", 0
        self.session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.loaded = False
        [target] = [t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self.session = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.send, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.count:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            part = os.read(self.receive, 1 << 16)
            if not part:
                raise RuntimeError("the browser has closed its pipe")
            self.rest += part
        raw, self.rest = self.rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(raw)
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])
        elif message.get("method") == "Page.loadEventFired":
            self.loaded = True
        return message

    def open(self, path: Path) -> None:
        self.loaded = False
        self.ask("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + 30
        while not self.loaded and time.monotonic() < end:
            self._next()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, evaluated as the page's own policy does not forbid it."""
        return self.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")


@contextmanager
def browser(program: str, folder: Path) -> Iterator[Page]:
    """Start Chromium with a profile in `folder`, and end it afterwards."""
    to_browser, of_browser = os.pipe(), os.pipe()
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
        "--window-size=1200,800", f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    shell = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{of_browser[1]}'
    process = subprocess.Popen(
        ["bash", "-c", shell, program, *options], pass_fds=(to_browser[0], of_browser[1]), stderr=subprocess.DEVNULL
    )
    try:
        os.close(to_browser[0])
        os.close(of_browser[1])
        yield Page(to_browser[1], of_browser[0])
    finally:
        process.kill()
        process.wait()
        os.close(to_browser[1])
        os.close(of_browser[0])
