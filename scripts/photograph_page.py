"""A picture of a running server's page: a prompt, what the model made of it, and what else one token could have been.

python scripts/photograph_page.py http://127.0.0.1:5000 [--prompt TEXT] [--output docs/images/page.png]

Drives a headless Chromium through its own driver (apt-get install chromium chromium-driver) with selenium, which the
extra `dev` installs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1100, 1000
SECONDS = 60.0  # for the whole text
FIRST = 30  # tokens, among which the one to point at is looked for


def found_browser() -> tuple[str, str] | None:
    """The paths of a browser and its driver; None where one of them is not installed."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def start_browser(browser: str, driver: str) -> Any:
    """A headless one, as a selenium driver; its console's messages are kept."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(driver))


def fill(page: Any, **fields: str) -> None:
    """Types into the page's fields, by their ids."""
    for name, value in fields.items():
        element = page.find_element("id", name)
        element.clear()
        element.send_keys(value)


def settled(page: Any, *words: str, seconds: float = 30) -> str:
    """The page's status line, once one of these is in it."""
    from selenium.webdriver.support.ui import WebDriverWait

    status = page.find_element("id", "status")
    WebDriverWait(page, seconds).until(lambda _: any(word in status.text for word in words))
    text: str = status.text
    return text


def point_at(page: Any, token: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(page).move_to_element(token).perform()


def photograph(
    page: Any, url: str, output: str, prompt: str, max_tokens: str, seed: str, number: int | None = None
) -> str:
    """Lets the page write, points at a token (the least probable of the first ones), and returns the text shown."""
    page.get(url)
    fill(page, prompt=prompt, max_tokens=max_tokens, seed=seed)
    page.find_element("id", "go").click()
    settled(page, "tokens in", seconds=SECONDS)
    tokens = page.find_elements("css selector", "#output .token")
    chances = [float(token.get_attribute("data-probability").split()[0]) for token in tokens[:FIRST]]
    point_at(page, tokens[chances.index(min(chances)) if number is None else number])
    page.save_screenshot(output)
    shown: str = page.find_element("id", "output").text
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server")
    parser.add_argument("--prompt", default="def __init__(self")
    parser.add_argument("--max-tokens", default="60")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--token", type=int, help=f"which to point at (default: the least probable of {FIRST})")
    parser.add_argument("--output", default="docs/images/page.png")
    options = parser.parse_args(arguments)
    found = found_browser()
    if found is None:
        print(f"error: no browser ({', '.join(BROWSERS)}) with chromedriver is installed", file=sys.stderr)
        return 2
    page = start_browser(*found)
    try:
        asked = (options.url, options.output, options.prompt, options.max_tokens, options.seed, options.token)
        print(photograph(page, *asked))
    finally:
        page.quit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
