"""The page at /, in a real headless Chromium."""

from __future__ import annotations

import os
import re
import shutil

import httpx
import pytest
from serving_tools import MAX_TOKENS

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


def test_the_page_loads_nothing_from_elsewhere(server):
    reply = httpx.get(server.url + "/")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe-inline" not in policy
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", reply.text) and "innerHTML" not in reply.text


@pytest.fixture(scope="module")
def browser():
    if BROWSER is None or DRIVER is None:
        pytest.skip("no chromium with chromedriver on this machine (apt-get install chromium chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1100,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def settled(browser, *ends):
    """The status line once it begins with one of these words."""
    from selenium.webdriver.support.ui import WebDriverWait

    status = browser.find_element("id", "status")
    WebDriverWait(browser, 30).until(lambda _: any(end in status.text for end in ends))
    return status.text


def fill(browser, **fields):
    for name, value in fields.items():
        element = browser.find_element("id", name)
        element.clear()
        element.send_keys(value)


def test_the_page_streams_stops_and_shows_probabilities(server, browser):
    from selenium.webdriver.common.action_chains import ActionChains

    browser.get(server.url + "/")
    fill(browser, prompt="def <b>x</b> ", max_tokens="30", temperature="1", top_p="1", seed="7", top_k="")
    browser.find_element("id", "go").click()
    assert "30 tokens in" in settled(browser, "tokens in", "error") or "ended by itself" in browser.page_source
    expected = httpx.post(
        server.url + "/v1/completions",
        json={"prompt": "def <b>x</b> ", "max_tokens": 30, "temperature": 1, "top_p": 1, "seed": 7, "logprobs": 5},
    ).json()["choices"][0]
    shown = browser.execute_script("return document.getElementById('output').textContent")
    assert shown == "def <b>x</b> " + expected["text"], "as text, whatever it holds"
    tokens = browser.find_elements("css selector", "#output .token")
    assert len(tokens) > 3
    ActionChains(browser).move_to_element(tokens[1]).perform()
    tip = browser.find_element("id", "tip")
    assert tip.is_displayed() and tip.text.count("%") in (5, 6), tip.text
    assert tokens[1].get_attribute("data-probability") in tip.text
    keep = os.environ.get("KEEP_SCREENSHOT")
    if keep:
        browser.save_screenshot(keep)

    fill(browser, max_tokens=str(MAX_TOKENS), seed="8")
    browser.execute_script("document.getElementById('go').click(); document.getElementById('stop').click()")
    assert settled(browser, "stopped") == "stopped"
    fill(browser, max_tokens=str(MAX_TOKENS + 1))
    browser.find_element("id", "go").click()
    assert "max_tokens" in settled(browser, "limit of")
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not [entry for entry in severe if "400" not in entry["message"]], severe
