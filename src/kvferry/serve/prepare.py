"""From a valid request to prompt ids and sampling rules, within what the instances can hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

from kvferry.actors.ports import Random
from kvferry.protocol.errors import InvalidRequest, ModelNotFound
from kvferry.protocol.messages import Sampling
from kvferry.serve.errors import ContextTooLong
from kvferry.serve.gateway import FrontInfo, Limits, PromptEncoder
from kvferry.serve.schemas import ChatRequest, GenerationRequest

#: OpenAI's default; greedy must be asked for.
DEFAULT_TEMPERATURE = 1.0


def check_model(request: GenerationRequest, info: FrontInfo) -> None:
    """Raises ModelNotFound."""
    if request.model != info.model:
        raise ModelNotFound(f"model {request.model[:100]!r} is not served here; served: {info.model!r}", "model")


async def encode_chat(chat: ChatRequest, encoder: PromptEncoder, executor: Executor) -> tuple[int, ...]:
    """The conversation's ids. Runs on `executor`, which must have one thread: a long prompt takes the tokenizer tens of
    milliseconds, during which other streams go on. Raises InvalidRequest when the chat template refuses."""
    messages = [{"role": message.role, "content": message.text()} for message in chat.messages]
    loop = asyncio.get_running_loop()
    try:
        return tuple(await loop.run_in_executor(executor, encoder.render, messages))
    except ValueError as error:
        raise InvalidRequest(f"messages: the chat template refuses them: {error}", "messages") from None


async def encode_text(text: str, encoder: PromptEncoder, executor: Executor) -> tuple[int, ...]:
    """The ids of plain text, with the special tokens that the tokenizer adds; on `executor`, as `encode_chat`."""
    return tuple(await asyncio.get_running_loop().run_in_executor(executor, encoder.encode, text))


def check_vocabulary(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest, naming the first id that the model does not have."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    at, value = next((i, value) for i, value in enumerate(token_ids) if not 0 <= value < vocab_size)
    name = f"{field}[{at}]"
    raise InvalidRequest(
        f"{name}: {value} is not a token id of this model; allowed: 0 up to and without {vocab_size}", name
    )


def fit_tokens(request: GenerationRequest, prompt_tokens: int, limits: Limits, default_max_tokens: int) -> int:
    """The max_tokens to use: the client's, or else `default_max_tokens` cut to what fits behind the prompt.

    Raises ContextTooLong, naming the numbers, when the prompt or prompt + max_tokens can't be held.
    """
    field = request.prompt_field
    if prompt_tokens == 0:
        raise InvalidRequest(f"{field}: the prompt has no tokens", field)
    if prompt_tokens > limits.prompt_tokens:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens; the limit for a prompt is {limits.prompt_tokens}", field
        )
    room_tokens = limits.total_tokens - prompt_tokens
    name, asked = request.asked_tokens()
    if room_tokens < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and leaves no room for an answer; the limit for prompt and "
            f"answer together is {limits.total_tokens}", field,
        )  # fmt: skip
    if asked is None:
        return min(default_max_tokens, room_tokens)
    if asked > room_tokens:
        raise ContextTooLong(
            f"{name} is {asked} and the prompt has {prompt_tokens} tokens: together {asked + prompt_tokens}; the limit "
            f"is {limits.total_tokens}, so {name} may be at most {room_tokens}", name,
        )  # fmt: skip
    return asked


def sampling_of(request: GenerationRequest, max_tokens: int, random: Random) -> Sampling:
    """Without a seed of the client's, each request draws its own."""
    return Sampling(
        max_tokens=max_tokens,
        temperature=DEFAULT_TEMPERATURE if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        seed=random.bits(63) if request.seed is None else request.seed,
        stop=request.stops(),
        stop_token_ids=tuple(request.stop_token_ids or ()),
    )
