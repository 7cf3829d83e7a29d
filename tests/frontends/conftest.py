"""One browser and one server for all tests here. What is missing is said; ``make frontends`` fails
for it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.frontends.lab import Notebook, Server, chromium
from tests.frontends.looks import Pictures

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

REQUIRED = "IPYGPUMEM_FRONTENDS"
PICTURES = "IPYGPUMEM_PICTURES"
_CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def needs(*modules: str) -> None:
    """Skip a test, or fail it where all is required, if something is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if _CHROMIUM is None:
        missing.append("chromium")
    if missing:
        text = (
            f"not here: {', '.join(missing)}; `make frontends` installs the Python packages, "
            f"apt-get chromium"
        )
        pytest.fail(text) if os.environ.get(REQUIRED) else pytest.skip(text)


@pytest.fixture(scope="package")
def browser() -> Iterator[BrowserContext]:
    """The system's chromium, without a window."""
    needs("playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        assert _CHROMIUM is not None
        browser = chromium(playwright, _CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def server(browser: BrowserContext, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    needs("jupyterlab")
    server = Server(tmp_path_factory.mktemp("lab"))
    yield server
    server.close()


@pytest.fixture(scope="package")
def lab_page(server: Server, browser: BrowserContext) -> Iterator[Notebook]:
    """A page of JupyterLab, for one notebook after the other."""
    page = Notebook(server, browser)
    yield page
    page.close()


@pytest.fixture
def lab(lab_page: Notebook) -> Iterator[Notebook]:
    """A JupyterLab page, in which a test opens its notebook; at the end it has complained of
    nothing.
    """
    lab_page.complaints.clear()
    yield lab_page
    lab_page.leave()
    assert lab_page.complaints == []


@pytest.fixture(scope="package")
def pictures() -> Pictures:
    """Takes the pictures of docs/ where it is asked to: IPYGPUMEM_PICTURES names the folder."""
    folder = os.environ.get(PICTURES)
    return Pictures(Path(folder) if folder else None)
