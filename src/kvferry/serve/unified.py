"""`kvferry ask --unified`: both roles in this process, no Ray, the answer in the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvferry.actors.unified.unified import Unified
from kvferry.cluster.clock import SystemRandom
from kvferry.cluster.config import Config
from kvferry.cluster.roles import load_engine
from kvferry.engine.text import TokenizerTexts
from kvferry.engine.tokenizer import ChatTokenizer
from kvferry.protocol.address import Address
from kvferry.protocol.request import RequestSpec
from kvferry.serve.errors import UnsupportedParameter
from kvferry.serve.gateway import Limits
from kvferry.serve.prepare import check_token_ids, fit_tokens, sampling_of
from kvferry.serve.schemas import ChatRequest

NOBODY = Address("here", "", 0, "", 0)


def ask(config: Config, chat: ChatRequest, show: Callable[[str], None]) -> dict[str, Any]:
    """Answer one chat request; `show` gets the text as it comes. Raises RequestError, ConfigError."""
    return asyncio.run(_ask(config, chat, show))


async def _ask(config: Config, chat: ChatRequest, show: Callable[[str], None]) -> dict[str, Any]:
    threads = config.prefill.threads + config.decode.threads
    tokens = config.decode.pool_pages * config.page_size("decode")
    # Of prefill's size, since it computes prefill's chunks.
    pages = max(1, tokens // config.page_size("prefill"))
    loaded, engine = load_engine(config, "prefill", pages, 1, threads)
    texts = TokenizerTexts(loaded.tokenizer, loaded.eos_token_ids)
    unified = Unified(engine, texts, config.prefill.chunk_tokens, config.prefill.batch_tokens)
    running = asyncio.get_running_loop().create_task(unified.run())
    try:
        return await _answer(config, chat, show, unified, ChatTokenizer(loaded.tokenizer))
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def check_one_text(chat: ChatRequest) -> None:
    """The answer here is one text. Raises UnsupportedParameter for what asks for more."""
    asked = {"n": chat.samples() > 1, "logprobs": chat.logprobs, "return_token_ids": chat.return_token_ids}
    for name in (name for name, wanted in asked.items() if wanted):
        raise UnsupportedParameter(f"{name} is not supported without a server", name)


async def _answer(
    config: Config, chat: ChatRequest, show: Callable[[str], None], unified: Unified, tokenizer: ChatTokenizer
) -> dict[str, Any]:
    check_one_text(chat)
    check_token_ids(chat, unified.engine.limits.vocab_size)
    prompt = tokenizer.render([{"role": message.role, "content": message.text()} for message in chat.messages])
    tokens = unified.engine.limits.tokens
    max_tokens = fit_tokens(chat, chat.prompt_field, len(prompt), Limits(tokens, tokens), config.api.default_max_tokens)
    spec = RequestSpec(1, prompt, sampling_of(chat, max_tokens, SystemRandom()), NOBODY)
    parts, finish_reason, count = [], "", 0
    async for token in unified.generate(spec):
        show(token.text)
        parts.append(token.text)
        finish_reason, count = token.finish_reason, count + 1
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    return {"model": config.served_name(), "text": "".join(parts), "finish_reason": finish_reason, "usage": usage}
