"""The site in a browser at the width of a phone: opened, searched, clicked. `make site-test` installs the browser."""

import importlib.util
import itertools
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.patience import LIMIT_S

SITE = Path(__file__).resolve().parents[2] / "build/site"

pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif(
        importlib.util.find_spec("selenium") is None, reason="selenium is not installed: make site-test"
    ),
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="there is no chromedriver: make site-test"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site has not been built: make site"),
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a local server with the site."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium with its narrowest window, 500 pixels."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for option in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=500,900",
    ):
        options.add_argument(option)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_page_load_timeout(LIMIT_S)
    driver.command_executor.client_config.timeout = LIMIT_S  # of a request to chromedriver; 120 s otherwise
    yield driver
    driver.quit()


def test_search_leads_to_a_page(browser: Any, address: str) -> None:
    """A word typed into the search has results, and a click on one that shows it opens a page with the word."""
    from selenium.common.exceptions import ElementNotInteractableException, StaleElementReferenceException
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(f"{address}/index.html")
    assert "triton_ep" in browser.title
    browser.find_element(By.CSS_SELECTOR, "label.md-header__button[for='__search']").click()
    field = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    # The next page may load, or the search close, between two commands.
    gone = ElementNotInteractableException, StaleElementReferenceException
    wait = WebDriverWait(browser, LIMIT_S, ignored_exceptions=gone)
    wait.until(lambda _: field.is_displayed())
    word = "WaitTimeout"
    field.send_keys(word)
    # Only a result that shows the whole word: results of its first letters lead to other pages. In one script, because
    # results are redrawn while the index loads and with each letter.
    click = """
    const links = [...document.querySelectorAll('a.md-search-result__link')];
    const link = links.find(link => link.textContent.includes(arguments[0]));
    link?.click();
    return link !== undefined;
    """
    polls = itertools.count(1)

    def opened(_: Any) -> bool:
        if not browser.current_url.endswith("/index.html"):
            return True
        # A word typed before the index is loaded, and a click on results about to be redrawn, may be lost: repeat them,
        # at ever longer intervals (after 1, 2, 4, .. polls), so that a slow machine finishes one before the next.
        if next(polls).bit_count() == 1 and not browser.execute_script(click, word):
            field.clear()
            field.send_keys(word)
        return False

    wait.until(opened)
    read = "return document.querySelector('article')?.textContent.includes(arguments[0]) ?? false"
    wait.until(lambda _: browser.execute_script(read, word))


@pytest.mark.parametrize(
    "page", ["concepts/architecture-in-a-page", "concepts/layout", "concepts/protocol", "performance"]
)
def test_pictures_fit_a_phone(browser: Any, address: str, page: str) -> None:
    """Pictures are loaded, no wider than the window, and not shrunk below half their size."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(f"{address}/{page}.html")
    pictures = browser.find_elements(By.CSS_SELECTOR, "article img")
    assert pictures
    for picture in pictures:
        loaded = partial(
            browser.execute_script, "return arguments[0].complete && arguments[0].naturalWidth > 0", picture
        )
        WebDriverWait(browser, LIMIT_S).until(lambda _, loaded=loaded: loaded())
        assert 360 <= picture.size["width"] <= 500
