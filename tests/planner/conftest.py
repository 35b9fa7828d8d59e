"""One browser, and the pages of all plans that are tested."""

from pathlib import Path
from typing import Any

import pytest

from diptych.planner.page import page_html
from tests.planner.browser import Browser, find_browser
from tests.planner.page_cases import REQUESTS, described
from tests.planner.page_in_browser import WIDE


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(find_browser() or "", tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name in REQUESTS:
        found[name] = folder / f"{name}.html"
        found[name].write_text(page_html(described(name)), "utf-8")
    return found


@pytest.fixture
def show(browser, pages):
    """Opens a page in a window of a size, and sees afterwards that nothing went wrong in it."""

    def opened(name: str, size: tuple[int, int] = WIDE, dark: bool = False) -> dict[str, Any]:
        browser.resize(*size, dark)
        browser.open(pages[name])
        browser.settle()
        return described(name)

    yield opened
    browser.settle()
    assert browser.errors == []
