"""The chat page: one HTML file with its script and its style in it, served as it is. No build step, and nothing is
fetched from anywhere but the server that sent it.

What the model says is text to it: the page puts it into text nodes, and its policy lets nothing run but its own script.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files


@functools.cache
def chat_page() -> tuple[bytes, int, dict[str, str]]:
    """Body, status and headers of the answer; read once."""
    html = files(__name__).joinpath("chat.html").read_bytes()
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy(html.decode()),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return html, 200, headers


def policy(html: str) -> str:
    """A Content-Security-Policy under which only the script and the style that stand in `html` count, by their hashes,
    and connections go to the own server only."""
    scripts, styles = (_hashes(html, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(html: str, tag: str) -> str:
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
