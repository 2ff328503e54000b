"""Headless Chromium, driven by Selenium, with no traffic of its own."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@contextlib.contextmanager
def open_browser(width: int = 1200, height: int = 1600) -> Iterator[Any]:
  """Opens a browser with a profile of its own, and ends it."""
  from selenium import webdriver
  from selenium.webdriver.chrome.service import Service

  options = webdriver.ChromeOptions()
  with tempfile.TemporaryDirectory(prefix="chromium_") as profile:
    for argument in (*_ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
      options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    options.binary_location = shutil.which("chromium") or ""
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
      yield driver
    finally:
      driver.quit()


def prefer(driver: Any, scheme: str) -> None:
  """Makes the browser prefer a colour scheme, `light` or `dark`."""
  features = [{"name": "prefers-color-scheme", "value": scheme}]
  driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
