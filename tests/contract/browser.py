"""A headless Chromium for tests of the status page."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

sync_api = pytest.importorskip(
    "playwright.sync_api",
    reason="playwright is not installed: pip install 'paramserver[dev]', or pip install playwright",
)
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
PHONE = {"width": 375, "height": 812}

MARKS = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium, or CHROMIUM=/path/to/it"),
]


class Browser:
    """One page, with the errors that it logged and the URLs that it requested."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on(
            "console", lambda m: self.errors.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda e: self.errors.append(str(e)))
        page.on("requestfailed", self._failed)
        self.asked: set[str] = set()
        page.on("request", lambda r: self.asked.add(r.url))

    def _failed(self, request: Any) -> None:
        if "ERR_ABORTED" not in request.failure:  # pending requests are aborted by leaving the page
            self.errors.append(f"{request.url}: {request.failure}")

    def text(self, selector: str) -> str:
        """The text of the first element that matches."""
        return str(self.page.locator(selector).first.inner_text())

    def drawn(self) -> list[str]:
        """The current picture of each chart, as a data URL."""
        return [str(c.evaluate("canvas => canvas.toDataURL()")) for c in self.page.locator("canvas").all()]


Pages = Callable[..., AbstractContextManager[Browser]]
"""Opens a page with those options of a context, which is closed with the block."""


@contextmanager
def chromium() -> Iterator[Pages]:
    """Run Chromium for the block; each of its pages has cookies and a storage of its own."""
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)

        @contextmanager
        def browser(**options: Any) -> Iterator[Browser]:
            page = launched.new_page(**options)
            try:
                yield Browser(page)
            finally:
                page.close()

        try:
            yield browser
        finally:
            launched.close()


def fits(seen: Browser) -> None:
    """Assert that no part of the page is wider than the window."""
    wide, window = seen.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= window
