"""A browser for all tests, which `CHROMIUM` names."""

import os
import shutil

import pytest


CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make test-browser")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium, or CHROMIUM=PATH")
    with playwright.sync_playwright() as client:
        browser = client.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
