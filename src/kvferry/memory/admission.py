"""Admission arithmetic: what a request needs, and whether it can ever be served (design §5, simplest form).

Decode reserves prompt + max_tokens, so what is admitted always finishes; prefill reserves the whole prompt.
"""

from __future__ import annotations

import msgspec

from kvferry.protocol.errors import Cause


class Capacity(msgspec.Struct, frozen=True):
    """What one rank can hold: pages of `page_size` tokens, and the model's longest sequence."""

    pages: int
    page_size: int
    context_tokens: int

    @property
    def tokens(self) -> int:
        """The longest sequence that fits, by pool and by model."""
        return min(self.pages * self.page_size, self.context_tokens)


def pages_needed(tokens: int, page_size: int) -> int:
    """ceil(tokens / page_size)."""
    return -(-tokens // page_size)


def refusal(prompt_tokens: int, max_tokens: int, prefill_tokens: int, decode_tokens: int) -> Cause | None:
    """Why a request can never be served, or None. A later attempt must be able to prefill everything but the last
    token, hence the limit on prompt + max_tokens - 1.
    """
    total = prompt_tokens + max_tokens
    if prompt_tokens < 1:
        return Cause("invalid_request", "the prompt has no tokens; at least 1 is needed", param="messages")
    if max_tokens < 1:
        return Cause("invalid_request", f"max_tokens is {max_tokens}; at least 1 is needed", param="max_tokens")
    if prompt_tokens > prefill_tokens:
        text = f"the prompt has {prompt_tokens} tokens; prefill takes at most {prefill_tokens}"
        return Cause("invalid_request", text, param="messages")
    if total > decode_tokens or total - 1 > prefill_tokens:
        limit = min(decode_tokens, prefill_tokens + 1)
        text = f"{prompt_tokens} prompt tokens + max_tokens {max_tokens} = {total} tokens; at most {limit} fit"
        return Cause("invalid_request", text, param="max_tokens")
    return None
