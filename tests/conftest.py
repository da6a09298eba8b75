"""What all tests share: Ctrl-C, hypothesis without deadlines, since machines are shared, and one real browser."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from playwright.sync_api import Browser, Playwright

# Where the tests are started in the background, Ctrl-C is ignored, also by every program that they start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("gpipe", deadline=None)
settings.load_profile("gpipe")

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="session")
def chromium(playwright: Playwright) -> Iterator[Browser]:
    """Debian's Chromium, without anything that would leave this machine."""
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed (on Debian: apt-get install chromium), and pages need a real browser")
    arguments = ["--disable-gpu", "--disable-background-networking", "--enable-unsafe-swiftshader"]  # WebGL on the CPU
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
    yield browser
    browser.close()
