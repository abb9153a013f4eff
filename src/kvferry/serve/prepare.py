"""From a valid `ChatRequest` to prompt ids and sampling rules, within what the instances can hold."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from kvferry.actors.ports import Random
from kvferry.protocol.errors import InvalidRequest, ModelNotFound
from kvferry.protocol.messages import Sampling
from kvferry.serve.errors import ContextTooLong
from kvferry.serve.gateway import ChatEncoder, FrontInfo, Limits
from kvferry.serve.schemas import ChatRequest

#: OpenAI's default; greedy must be asked for.
DEFAULT_TEMPERATURE = 1.0


def check_model(chat: ChatRequest, info: FrontInfo) -> None:
    """Raises ModelNotFound."""
    if chat.model != info.model:
        raise ModelNotFound(f"model {chat.model[:100]!r} is not served here; served: {info.model!r}", "model")


async def encode_prompt(chat: ChatRequest, encoder: ChatEncoder, executor: Executor) -> tuple[int, ...]:
    """The prompt's ids. Runs on `executor`, which must have one thread: a long prompt takes the tokenizer tens of
    milliseconds, during which other streams go on. Raises InvalidRequest when the chat template refuses."""
    messages = [{"role": message.role, "content": message.text()} for message in chat.messages]
    loop = asyncio.get_running_loop()
    try:
        return tuple(await loop.run_in_executor(executor, encoder, messages))
    except ValueError as error:
        raise InvalidRequest(f"messages: the chat template refuses them: {error}", "messages") from None


def fit_tokens(chat: ChatRequest, prompt_tokens: int, limits: Limits, default_max_tokens: int) -> int:
    """The max_tokens to use: the client's, or else `default_max_tokens` cut to what fits behind the prompt.

    Raises ContextTooLong, naming the numbers, when the prompt or prompt + max_tokens can't be held.
    """
    if prompt_tokens == 0:
        raise InvalidRequest("messages: the prompt has no tokens", "messages")
    if prompt_tokens > limits.prompt_tokens:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens; the limit for a prompt is {limits.prompt_tokens}", "messages"
        )
    room_tokens = limits.total_tokens - prompt_tokens
    asked = chat.max_tokens if chat.max_tokens is not None else chat.max_completion_tokens
    if room_tokens < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and leaves no room for an answer; the limit for prompt and "
            f"answer together is {limits.total_tokens}", "messages",
        )  # fmt: skip
    if asked is None:
        return min(default_max_tokens, room_tokens)
    if asked > room_tokens:
        name = "max_tokens" if chat.max_tokens is not None else "max_completion_tokens"
        raise ContextTooLong(
            f"{name} is {asked} and the prompt has {prompt_tokens} tokens: together {asked + prompt_tokens}; the limit "
            f"is {limits.total_tokens}, so {name} may be at most {room_tokens}", name,
        )  # fmt: skip
    return asked


def sampling_of(chat: ChatRequest, max_tokens: int, random: Random) -> Sampling:
    """Without a seed of the client's, each request draws its own."""
    return Sampling(
        max_tokens=max_tokens,
        temperature=DEFAULT_TEMPERATURE if chat.temperature is None else chat.temperature,
        top_p=1.0 if chat.top_p is None else chat.top_p,
        top_k=max(0, chat.top_k or 0),
        seed=random.bits(63) if chat.seed is None else chat.seed,
        stop=chat.stops(),
        stop_token_ids=tuple(chat.stop_token_ids or ()),
    )
