"""What all tests share: Ctrl-C, hypothesis without clocks, since machines are shared, and one real browser."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from playwright.sync_api import Browser, Playwright

# Where the tests are started in the background, Ctrl-C and Ctrl-\ are ignored, and under nohup a closed terminal, also
# by every program that they start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGQUIT, signal.SIGHUP):
    signal.signal(ignored, signal.SIG_DFL)

# The same examples in every run, so that a test fails for what was changed; `make fuzz` looks for new ones. How long it
# takes to make or to try them says how busy the machine is.
settings.register_profile(
    "gpipe",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("GPIPE_NEW_EXAMPLES"),
)
settings.load_profile("gpipe")

LONGEST_FIRST = (
    "test_dashboard_page",
    "test_execution",
    "test_faults",
    "test_runs",
    "test_search",
    "test_nccl",
    "test_rehearsal",
    "test_docs",
    "test_evaluate",
)
"""Files that take a minute or more: they come first, so that no core is left waiting for the other at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In that order, and the others as they were."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


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
