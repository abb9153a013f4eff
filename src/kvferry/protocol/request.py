"""What a client asked for, as it travels from the front to the legs: sampling and stop rules, prompt, attempt."""

from __future__ import annotations

import msgspec

from kvferry.protocol.address import Address


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling and stop rules. temperature 0 is greedy; top_k 0 and top_p 1 are off.

    The draw for a token is a function of (seed, position) alone, so every attempt, and PD and unified alike,
    give the same tokens. What changes the logits before the draw is applied in this order: `logit_bias` (token id,
    added value), repetition, frequency and presence penalty, then `min_tokens` (end tokens can't be drawn before so
    many). `ignore_eos`: the model's own end tokens end nothing; `stop_token_ids` still do. `logprobs` -1 is off, k asks
    for the chosen token's log-probability and those of the k most likely, of the model's own distribution.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int = -1


class RequestSpec(msgspec.Struct, frozen=True):
    """One attempt of a request as the front hands it to a router. `request` is the front's own id for it (63 random
    bits). `frozen_ids` are the tokens that the client has from earlier attempts: they are fed after the prompt, and
    count towards max_tokens and the stop rules as if this attempt had made them.

    Requests with one `group` (0: none) are `samples` answers to one prompt: the router sends them to one prefill, which
    computes the prompt once. `prefer` is the incarnation of the decode that the router should choose if it can (0:
    any): the one that has retracted the request. `avoid` are the incarnations of the instances at which attempts have
    failed since the client's last token: others are chosen while there are any.
    """

    request: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    front: Address
    frozen_ids: tuple[int, ...] = ()
    group: int = 0
    samples: int = 1
    prefer: int = 0
    avoid: tuple[int, ...] = ()

    @property
    def was_admitted(self) -> bool:
        """Decode has let the request in before, and retracted it. It waits for older ones however long they take: the
        limit of waiting for admission is for those that could still be refused, and *no progress* runs all the same.
        """
        return self.prefer != 0

    @property
    def fed_ids(self) -> tuple[int, ...]:
        """What prefill computes."""
        return self.prompt_ids + self.frozen_ids
