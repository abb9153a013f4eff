"""The chat page and `/ready` on the real thing."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

pytestmark = pytest.mark.real


def test_the_page_shows_the_phases_of_a_real_room(server: Any) -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "this test drives a browser; install one: apt-get install -y chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(server.url)
        page.get_by_label("Your message").fill("What is the capital of France?")
        page.get_by_role("button", name="Send").click()
        room = page.get_by_label("How this answer was served")
        expect(room).to_be_visible(timeout=60_000)
        expect(page.get_by_role("log")).to_contain_text("Paris")
        states = ("bootstrapping", "waiting for input", "transferring", "success")
        expect(room.get_by_role("row")).to_have_text([re.compile(state) for state in states])
        expect(room).to_contain_text("prefill-0 → decode-0")
        expect(room).to_contain_text(re.compile(r"37 prompt tokens, \d+\.\d MB of KV cache over local"))
        browser.close()


def test_ready_makes_a_handoff_when_no_client_did(server: Any) -> None:
    """A proof older than 5 s is not believed: the next one is the service's own, and leaves the baseline."""
    server.chat("Hi", max_tokens=1)
    server.wait_baseline()  # the client's own handoff is over, too
    ages: list[float] = []

    def renewed() -> bool:
        answer = server.http.get("/ready")
        assert answer.status_code == 200 and answer.json()["missing"] == []
        ages.append(answer.json()["handoff_age_s"])
        return len(ages) > 1 and ages[-1] < ages[-2]

    server.wait(renewed, 30, "a handoff of the service's own")
    assert max(ages) <= 5.0
    server.wait_baseline()
