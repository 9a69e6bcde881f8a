"""A real Chromium, driven through Playwright; and a server of the tiny model for it to look at."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server.running import Local, make_tiny

from penstock.config import Config, DiskConfig, HostConfig
from servers import is_skipped

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WHY_NOT = None if CHROMIUM else "there is no Chromium (Debian: chromium)"


# Closed with its module: while it is open, Playwright's loop runs in this thread, and no other can.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if is_skipped(WHY_NOT):
        pytest.skip(str(WHY_NOT))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def pages(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; none may have complained to its console by the end."""
    contexts = []
    complaints: list[str] = []

    def open_page(
        url: str, width: int = 1280, height: int = 900, theme: str = "light", **options: Any
    ) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: (
                complaints.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.complaints = complaints
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def model(cache: Path) -> Path:
    return make_tiny(cache)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("kv")
    tiers = Config(
        HostConfig(size_bytes=4 << 20), DiskConfig(path=str(folder), size_bytes=64 << 20)
    )
    made = Local(model, tiers, kv_offloading_size=None, device_kv_gib=0.003).start()
    yield made
    made.stop()
