"""The chat page in a real headless browser, against the real API on fakes."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from kvferry.protocol.errors import Cause
from kvferry.protocol.outcome import Outcome
from kvferry.serve.page import policy

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip

JOURNAL: dict[str, Any] = {
    "room": "9000000000000000001", "request": "5", "attempt": 0, "prefill": "prefill-0", "decode": "decode-0",
    "backend": "ucx/host", "prompt_tokens": 571, "kv_bytes": 26_542_080, "metadata_bytes": 256,
    "kvpoll": [
        {"state": "BOOTSTRAPPING", "at_s": 0.0, "duration_s": 0.0028},
        {"state": "WAITING_FOR_INPUT", "at_s": 0.0028, "duration_s": 0.9972},
        {"state": "TRANSFERRING", "at_s": 1.0, "duration_s": 1.0},
        {"state": "SUCCESS", "at_s": 2.0, "duration_s": 0.0},
    ],
    "events": [], "events_dropped": 0, "outcome": {"ok": True, "cause": None},
}  # fmt: skip

FAILED = JOURNAL | {
    "kvpoll": [
        {"state": "BOOTSTRAPPING", "at_s": 0.0, "duration_s": 0.5},
        {"state": "FAILED", "at_s": 0.5, "duration_s": 0.0},
    ],
    "outcome": {"ok": False, "cause": "decode said no"},
}


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "this test drives a browser; install one: apt-get install -y chromium"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        await browser.close()


class Chat:
    """The page and what it has asked for and complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requested: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requested.append(request.url))
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    async def ask(self, question: str) -> None:
        await self.page.get_by_label("Your message").fill(question)
        await self.page.keyboard.press("Enter")

    @property
    def log(self) -> Any:
        return self.page.get_by_role("log")


@pytest.fixture
def open_chat(browser: Browser) -> Any:
    async def open_chat(url: str, **options: Any) -> Chat:
        chat = Chat(await browser.new_page(**options))
        await chat.page.goto(f"{url}/")
        return chat

    return open_chat


async def test_an_answer_streams_and_its_phases_are_shown(served: Any, open_chat: Any) -> None:
    """Token by token as they come; then the room's KVPoll with durations, the pair and the bytes. Nothing but our own
    server is asked for anything, and the second question takes the conversation along."""
    served.backend.journals[served.room] = JOURNAL
    chat = await open_chat(served.url)
    await expect(chat.page.locator("#model")).to_have_text("m")
    await chat.ask("What is the capital of France?")
    await served.until(lambda: bool(served.backend.specs))
    (spec,) = served.backend.specs
    served.from_prefill(served.token(spec, 0, "Par"))
    await expect(chat.log).to_contain_text("Par")
    await expect(chat.log).not_to_contain_text("Paris")
    served.settle(spec)
    served.from_decode(served.token(spec, 1, "is"), served.token(spec, 2, ".", finish="stop"))
    await expect(chat.log).to_contain_text("Paris.")
    rows = chat.page.get_by_label("How this answer was served").get_by_role("row")
    await expect(rows).to_have_text(
        [re.compile(r"bootstrapping\s*2\.8 ms"), re.compile(r"waiting for input\s*997 ms"),
         re.compile(r"transferring\s*1\.00 s"), re.compile(r"success\s*at 2\.00 s")]
    )  # fmt: skip
    widths = await chat.page.locator(".bar").evaluate_all("bars => bars.map(bar => bar.style.width)")
    assert [round(float(width.rstrip("%")), 2) for width in widths] == [0.14, 49.86, 50.0, 0.0]
    for text in ("prefill-0 → decode-0", "571 prompt tokens", "26.5 MB", "ucx/host", "First token after"):
        await expect(chat.log).to_contain_text(text)
    served.answer_with(["It", " is."])
    await chat.ask("Why is that?")
    await expect(chat.log).to_contain_text("It is.")
    assert len(served.backend.specs[1].prompt_ids) == 10  # words: both questions and the answer
    await expect(chat.page.get_by_label("How this answer was served")).to_have_count(1)
    assert chat.requested and all(url.startswith((served.url, "data:")) for url in chat.requested)
    assert chat.complaints == []


async def test_stop_ends_the_request(served: Any, open_chat: Any) -> None:
    chat = await open_chat(served.url)
    await chat.ask("Tell me a long story")
    await served.until(lambda: bool(served.backend.specs))
    served.from_prefill(served.token(served.backend.specs[0], 0, "Once upon"))
    await expect(chat.log).to_contain_text("Once upon")
    await chat.page.get_by_role("button", name="Stop").click()
    await expect(chat.log).to_contain_text("You stopped this answer.")
    await served.until(lambda: served.backend.cancelled == 1)  # the front has aborted the room
    await expect(chat.page.get_by_role("button", name="Send")).to_be_visible()
    served.answer_with(["again"])
    await chat.ask("Go on")
    await expect(chat.log).to_contain_text("again")
    assert len(served.backend.specs[1].prompt_ids) == 9  # words: what was said of the answer, too
    await chat.page.get_by_role("button", name="New chat").click()
    await expect(chat.log).to_be_empty()
    await chat.ask("Hello")
    await expect(chat.log).to_contain_text("again")
    assert len(served.backend.specs[2].prompt_ids) == 1


async def test_what_the_model_says_stays_text(served: Any, open_chat: Any) -> None:
    """No element is made of it and nothing runs; were it parsed, the policy would stop it still."""
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script><b>bold</b> & &lt;'
    served.answer_with([evil[:20], evil[20:]])
    chat = await open_chat(served.url)
    await chat.ask("<i>hello</i>")
    await expect(chat.log).to_contain_text(evil)
    await expect(chat.log).to_contain_text("<i>hello</i>")
    assert await chat.page.locator("#log :is(img, script, b, i)").count() == 0
    await chat.page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=3\">')"
    )
    await served.until(lambda: bool(chat.complaints))
    assert "Content Security Policy" in chat.complaints[0]
    assert await chat.page.title() == "KVFerry"


async def test_errors_are_shown_as_the_api_words_them(served: Any, open_chat: Any) -> None:
    """Refused before the answer, failed before it with a room to look at, and broken off in its middle."""
    chat = await open_chat(served.url)
    alerts = chat.page.get_by_role("alert")
    await chat.page.get_by_label("Max tokens").fill("5000")
    await chat.ask("too much")
    await expect(alerts).to_contain_text("max_tokens is 5000 and the prompt has 2 tokens: together 5002")
    await expect(chat.page.get_by_label("Your message")).to_have_value("too much")
    await chat.page.get_by_label("Max tokens").fill("")
    served.backend.journals[77] = FAILED
    failure = Outcome(77, False, Cause("handoff_failed", "decode said no", leg="decode"))
    served.backend.on_submit = lambda spec: served.settle(spec, failure)
    await chat.ask("again")
    await expect(alerts.last).to_have_text("decode said no (leg decode)")
    rows = chat.page.get_by_label("How this answer was served").get_by_role("row")
    await expect(rows).to_have_text([re.compile("bootstrapping"), re.compile("failed")])

    def break_off(spec: Any) -> None:
        served.from_prefill(served.token(spec, 0, "Half an"))
        asyncio.get_running_loop().call_later(0.05, served.settle, spec, failure)

    served.backend.on_submit = break_off
    await chat.ask("and now")
    await expect(alerts.last).to_have_text("decode said no (leg decode)")
    await expect(chat.log).to_contain_text("Half an")


async def test_a_server_that_wants_a_key_is_given_one(guarded: Any, open_chat: Any) -> None:
    guarded.answer_with(["yes"])
    guarded.backend.journals[guarded.room] = JOURNAL
    chat = await open_chat(guarded.url)
    field = chat.page.get_by_label("API key")
    await expect(field).to_be_visible()
    await expect(chat.page.get_by_role("status")).to_contain_text("no API key was given")
    await field.fill("wrong")
    await chat.page.get_by_role("button", name="Use this key").click()
    await expect(chat.page.get_by_role("status")).to_contain_text("is not known here")
    await field.fill("s3cret")
    await field.press("Enter")
    await expect(field).to_be_hidden()
    await chat.ask("may I?")
    await expect(chat.log).to_contain_text("yes")
    await expect(chat.page.get_by_label("How this answer was served")).to_be_visible()
    assert "s3cret" not in chat.page.url and chat.complaints == []


async def test_it_fits_a_phone_and_the_dark(served: Any, open_chat: Any) -> None:
    served.answer_with(["word " * 60 + "x" * 300])
    chat = await open_chat(served.url, viewport={"width": 360, "height": 640}, color_scheme="dark")
    await chat.ask("y" * 200)
    await expect(chat.log).to_contain_text("word")
    width = await chat.page.evaluate("document.documentElement.scrollWidth")
    assert width == 360  # nothing has to be scrolled sideways
    background = await chat.page.evaluate("getComputedStyle(document.body).backgroundColor")
    red, green, blue = (int(part) for part in re.findall(r"\d+", background)[:3])
    assert max(red, green, blue) < 60


async def test_the_headers_of_the_page(http: httpx.AsyncClient) -> None:
    response = await http.get("/")
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    rules = response.headers["content-security-policy"]
    assert rules == policy(response.text)
    assert "default-src 'none'" in rules and "unsafe" not in rules and "http" not in rules
    assert "innerHTML" not in response.text and "://" not in response.text.replace("http://www.w3.org/2000/svg", "")
