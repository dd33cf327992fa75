"""The page at /, in a real headless Chromium."""

from __future__ import annotations

import re

import httpx
import pytest
from serving_tools import MAX_TOKENS

from scripts import photograph_page
from scripts.photograph_page import fill, point_at, settled


def test_the_page_loads_nothing_from_elsewhere(server):
    reply = httpx.get(server.url + "/")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe-inline" not in policy
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", reply.text) and "innerHTML" not in reply.text


@pytest.fixture(scope="module")
def browser():
    found = photograph_page.found_browser()
    if found is None:
        pytest.skip("no chromium with chromedriver on this machine (apt-get install chromium chromium-driver)")
    driver = photograph_page.start_browser(*found)
    yield driver
    driver.quit()


def test_the_page_streams_stops_and_shows_probabilities(server, browser):
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
    point_at(browser, tokens[1])
    tip = browser.find_element("id", "tip")
    assert tip.is_displayed() and tip.text.count("%") in (5, 6), tip.text
    assert tokens[1].get_attribute("data-probability") in tip.text

    fill(browser, max_tokens=str(MAX_TOKENS), seed="8")
    browser.execute_script("document.getElementById('go').click(); document.getElementById('stop').click()")
    assert settled(browser, "stopped") == "stopped"
    fill(browser, max_tokens=str(MAX_TOKENS + 1))
    browser.find_element("id", "go").click()
    assert "max_tokens" in settled(browser, "limit of")
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not [entry for entry in severe if "400" not in entry["message"]], severe


def test_a_picture_of_the_page(server, browser, tmp_path):
    shown = photograph_page.photograph(browser, server.url, str(tmp_path / "page.png"), "def ", "8", "1")
    assert shown.startswith("def") and (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert browser.find_element("id", "tip").is_displayed()


def test_without_a_browser_no_picture_is_taken(monkeypatch, capsys):
    monkeypatch.setattr(photograph_page, "BROWSERS", ("no-such-browser",))
    assert photograph_page.main(["http://127.0.0.1:1"]) == 2
    assert "no browser (no-such-browser) with chromedriver is installed" in capsys.readouterr().err
