"""Chromium without a window, driven by selenium."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

try:
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait
except ImportError:  # chromium() says so
    By = Keys = WebDriverWait = Chrome = None

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
    "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip


@contextlib.contextmanager
def chromium(*flags: str) -> Iterator[Any]:
    """A browser with an empty profile, which is deleted with it. Skips where it is missing."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    missing += ["selenium"] if Chrome is None else []
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} here (scripts/setup.sh --slow installs it)")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in (*_FLAGS, f"--user-data-dir={profile}", *flags):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = Chrome(options, ChromeService(shutil.which("chromedriver")))
        driver.set_script_timeout(30)
        try:
            yield driver
        finally:
            driver.quit()


def resize(driver: Any, width: int, height: int) -> None:
    """The size of the page in CSS pixels, below the least of a window too."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def set_dark(driver: Any, is_dark: bool) -> None:
    """The colours that the user prefers."""
    feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
