"""From a valid request to prompt ids and sampling rules, within what the instances can hold."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import Executor

from kvferry.actors.ports import Random
from kvferry.protocol.errors import InvalidRequest, ModelNotFound
from kvferry.protocol.request import Sampling
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


async def encode_text(field: str, text: str, encoder: PromptEncoder, executor: Executor) -> tuple[int, ...]:
    """The ids of plain text at `field`, with the special tokens that the tokenizer adds; on `executor`, as
    `encode_chat`. Raises InvalidRequest."""
    try:
        return tuple(await asyncio.get_running_loop().run_in_executor(executor, encoder.encode, text))
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error}", field) from None


def check_token_ids(request: GenerationRequest, vocab_size: int) -> None:
    """Ids outside the prompt. Raises InvalidRequest, naming the first that the model does not have."""
    check_vocabulary("stop_token_ids", request.stop_token_ids or (), vocab_size)
    for token_id, _ in request.biases():
        if token_id >= vocab_size:
            raise _no_token(f"logit_bias.{token_id}", token_id, vocab_size)


def check_vocabulary(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest, naming the first id that the model does not have."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    at, value = next((i, value) for i, value in enumerate(token_ids) if not 0 <= value < vocab_size)
    raise _no_token(f"{field}[{at}]", value, vocab_size)


def _no_token(name: str, value: int, vocab_size: int) -> InvalidRequest:
    return InvalidRequest(
        f"{name}: {value} is not a token id of this model; allowed: 0 up to and without {vocab_size}", name
    )


def fit_tokens(
    request: GenerationRequest, field: str, prompt_tokens: int, limits: Limits, default_max_tokens: int
) -> int:
    """The max_tokens to use: the client's, or else `default_max_tokens` cut to what fits behind the prompt, which
    stands in the body at `field`.

    Raises ContextTooLong, naming the numbers, when the prompt or prompt + max_tokens can't be held, and
    InvalidRequest when min_tokens can't be reached.
    """
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
        return _default_tokens(request, min(default_max_tokens, room_tokens))
    if asked > room_tokens:
        raise ContextTooLong(
            f"{name} is {asked} and the prompt has {prompt_tokens} tokens: together {asked + prompt_tokens}; the limit "
            f"is {limits.total_tokens}, so {name} may be at most {room_tokens}", name,
        )  # fmt: skip
    return asked


def _default_tokens(request: GenerationRequest, max_tokens: int) -> int:
    if request.min_tokens is not None and request.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens ({request.min_tokens}) is over max_tokens, which is {max_tokens} here when it is not given",
            "min_tokens",
        )
    return max_tokens


def sampling_of(request: GenerationRequest, max_tokens: int, random: Random, sample: int = 0) -> Sampling:
    """The rules of one of the request's `n` samples. Without a seed of the client's, each draws its own."""
    top_logprobs = request.top_logprobs_count()
    return Sampling(
        max_tokens=max_tokens,
        temperature=_given(request.temperature, DEFAULT_TEMPERATURE),
        top_p=_given(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        seed=random.bits(63) if request.seed is None else sample_seed(request.seed, sample),
        stop=request.stops(),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        min_p=_given(request.min_p, 0.0),
        logit_bias=request.biases(),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        logprobs=-1 if top_logprobs is None else top_logprobs,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one of several samples: the first draws as if it were alone, the others from seeds that are as good
    as independent of it (seed + sample would make sample 1 of seed 7 equal to sample 0 of seed 8)."""
    if sample == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
