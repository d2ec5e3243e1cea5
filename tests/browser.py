"""Headless Chromium for the tests that drive a page as a person would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium-driver)"
)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage"
)
PATIENCE_SECONDS = 600
"""How long tests wait for what must happen: much longer than it takes on a busy machine."""


def start_browser(folder: Path) -> Iterator[Any]:
    """Yield a browser that keeps its profile and its downloads in `folder`."""
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*QUIET.split(), f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(argument)
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    browser = webdriver.Chrome(options=options, service=service)
    browser.set_script_timeout(PATIENCE_SECONDS)
    # else an element may get the focus without an event, as in a window behind others
    browser.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    yield browser
    browser.quit()


def move_pointer_away(browser: Any) -> None:
    """Move the pointer, which stays where an earlier test left it, to the corner of the page."""
    event = {"type": "mouseMoved", "x": 0, "y": 0}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)


def requests_of(browser: Any) -> set[str]:
    """Return the addresses asked for since the last call."""
    urls = set()
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            if not url.startswith(("chrome:", "chrome-untrusted:", "data:")):
                urls.add(url)
    return urls


def complaints(browser: Any) -> list[str]:
    """Return the errors and warnings of the console since the last call."""
    entries = browser.get_log("browser")
    return [e["message"] for e in entries if e["level"] in ("SEVERE", "WARNING")]
