"""The page at ``/`` in a headless Chromium: a chat by keyboard that streams, the memory beside it, narrow screens."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from served_process import WAIT, ServedProcess, served_process

from specmemo_kernels.cli.common import demo_model_folder, load_model, load_tokenizer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="drives the browser; pip install playwright")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

PROMPT = "def main("


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with served_process("--memory-budget", "32MiB", "--api-key", "sesame") as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=[(1280, 800), (360, 640)], ids=["wide", "narrow"])
def page(browser: Any, server: ServedProcess, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page without errors in its console, and without requests to other places."""
    width, height = request.param
    page = browser.new_page(viewport={"width": width, "height": height})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request", lambda sent: None if sent.url.startswith((server.address, "data:")) else problems.append(sent.url)
    )
    page.goto(server.address)
    yield page
    page.close()
    assert not problems


def wait_until(page: Any, condition: str) -> None:
    """Poll a JavaScript expression; the page's own policy forbids Playwright's waiting, which evaluates strings."""
    deadline = time.monotonic() + WAIT
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


def texts(page: Any, kind: str) -> list[str]:
    return page.locator(f"#messages .{kind}").all_inner_texts()


def begin_a_long_answer(page: Any) -> None:
    """Returns when some of its text is on the page."""
    page.evaluate("document.querySelector('#key-label').hidden = false")
    page.fill("#key", "sesame")
    page.fill("#tokens", "900")
    page.fill("#text", "import os\n")
    page.focus("#text")
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelector('.assistant')?.textContent.length > 20")


def test_a_conversation(page: Any) -> None:
    """Typed and sent by keyboard: a wrong key gives the message back, the right one the unpatched model's answer."""
    assert page.evaluate("document.activeElement.id") == "text"
    page.fill("#tokens", "24")
    page.focus("#text")
    page.keyboard.type(PROMPT)
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Backspace")
    page.keyboard.press("Enter")
    page.wait_for_selector("#messages .error")
    assert page.input_value("#text") == PROMPT
    page.fill("#key", "sesame")
    page.focus("#text")
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelector('#send').textContent == 'Send' && document.querySelector('.assistant')")
    assert texts(page, "user")[-1] == PROMPT
    folder = demo_model_folder()
    model, tokenizer = load_model(folder, torch.float32, torch.device("cpu")), load_tokenizer(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    expected = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert page.evaluate("document.querySelector('.assistant').textContent") == expected
    assert page.evaluate("document.activeElement.id") == "text"
    page.click("#clear")
    assert not texts(page, "user")


def test_a_long_answer_is_stopped(page: Any, server: ServedProcess) -> None:
    """It grows on the page while it is generated; the memory and the requests are those of the server."""
    begin_a_long_answer(page)
    first = page.evaluate("document.querySelector('.assistant').textContent.length")
    wait_until(page, f"document.querySelector('.assistant').textContent.length > {first}")
    wait_until(page, "document.querySelector('#requests').textContent.startsWith('1 running')")
    page.click("#send")  # it says Stop
    wait_until(page, "document.querySelector('#send').textContent == 'Send'")
    server.wait_until_idle()
    wait_until(page, "document.querySelector('#requests').textContent.startsWith('0 running, 0 waiting')")
    assert "32.0 MiB" in page.inner_text("#memory-text")
    assert {"kv pages", "heads"} <= {
        text.strip() for text in page.locator("#parts tbody td:first-child").all_inner_texts()
    }
    assert float(page.inner_text("#speculation").split()[0]) > 1


def test_a_conversation_cleared_during_an_answer(page: Any) -> None:
    """The next conversation has its own message alone."""
    begin_a_long_answer(page)
    page.click("#clear")
    wait_until(page, "document.querySelector('#send').textContent == 'Send'")
    assert page.input_value("#text") == ""
    page.fill("#tokens", "2")
    page.fill("#text", PROMPT)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": PROMPT}]
    wait_until(page, "document.querySelector('#send').textContent == 'Send'")


def test_it_fits_the_screen(page: Any) -> None:
    """Nothing is wider than the window, the field and its button are in it, and every control can be tabbed to."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for name in ("#text", "#send"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= page.viewport_size["width"]
        assert box["y"] + box["height"] <= page.viewport_size["height"]
    page.focus("#text")
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"tokens", "temperature", "clear", "send"} <= reached
