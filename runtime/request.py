"""A request as the manager sees it: admission checks, and the state of a live one."""

import math
from dataclasses import dataclass
from typing import Literal

from loongserve.policies.base import Placement, RequestView
from loongserve.runtime.protocol import FinishReason, Refused, SamplingParams, Submit

# Unsigned integers of 64 bits are what the wire and the sampler's random numbers take.
NUM_UINT64 = 2**64


@dataclass(slots=True)
class LiveRequest:
    """An admitted request that has not ended yet."""

    request: int
    arrival_s: float
    prompt_tokens: int
    # Already clamped to the model's length.
    max_new_tokens: int
    # Prompt and output so far.
    tokens: list[int]
    sampling: SamplingParams
    stop_tokens: frozenset[int]
    return_logits: bool
    # Tokens with KV in the pools, those of the running iteration left out.
    computed: int = 0
    # The seq of its running iteration, and what was known at its launch.
    iteration: int | None = None
    known_at_launch: int = 0
    # The last plan keeps it from running although it could.
    paused: bool = False
    decode_since_s: float | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def max_kv_tokens(self) -> int:
        """The most KV tokens that it can ever come to: the last token is never computed."""
        return self.prompt_tokens + self.max_new_tokens - 1

    @property
    def known_tokens(self) -> int:
        """Tokens known when its running iteration was launched, or now when none runs."""
        return len(self.tokens) if self.iteration is None else self.known_at_launch

    @property
    def phase(self) -> Literal["prefill", "decode"]:
        """Its next work, or that of its running iteration."""
        return "decode" if self.computed > 0 and self.known_tokens - self.computed == 1 else "prefill"

    def start(self, iteration: int) -> None:
        """Enter an iteration."""
        self.known_at_launch = len(self.tokens)
        self.iteration = iteration
        self.paused = False

    def add_token(self, token: int, now: float) -> FinishReason | None:
        """Append a sampled token. Returns: why the request ends with it, or None when it goes on."""
        self.tokens.append(token)
        if self.decode_since_s is None:
            self.decode_since_s = now
        if token in self.stop_tokens:
            return "stop"
        return "length" if self.output_tokens >= self.max_new_tokens else None

    def evict(self) -> None:
        """Forget its KV; its tokens stay known and become one longer prefill."""
        self.computed = 0
        self.paused = False

    def view(self, placement: Placement, master: int | None) -> RequestView:
        """Show it to a policy."""
        return RequestView(
            request=self.request,
            arrival_s=self.arrival_s,
            prompt_tokens=self.prompt_tokens,
            computed_tokens=self.computed,
            known_tokens=self.known_tokens,
            max_kv_tokens=self.max_kv_tokens,
            placement=placement,
            master=master,
            running=self.iteration is not None,
            paused=self.paused,
            decode_since_s=self.decode_since_s,
        )


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What a request must keep to."""

    vocab_size: int
    max_model_len: int
    # Of all pools together, in tokens.
    total_slots: int

    def check(self, submit: Submit) -> Refused | None:
        """Name the first field of a request that is out of its limits; None when all are well.

        All faults are INVALID_ARGUMENT, also a request that could never fit the pools: the same call can never
        succeed, so a client must not be invited to try again, as RESOURCE_EXHAUSTED would.
        """
        message = (
            self._tokens_fault(submit) or _counts_fault(submit) or _sampling_fault(submit.sampling)
        ) or self._pool_fault(submit)
        return Refused(submit.request, "INVALID_ARGUMENT", message) if message else None

    def clamp_new_tokens(self, submit: Submit) -> int:
        """Give ``max_new_tokens`` cut to what the model's length leaves after the prompt."""
        return min(submit.max_new_tokens, self.max_model_len - len(submit.tokens))

    def _tokens_fault(self, submit: Submit) -> str | None:
        if not submit.tokens:
            return "tokens: the prompt is empty, at least 1 token is needed"
        if len(submit.tokens) >= self.max_model_len:
            return (
                f"tokens: the prompt has {len(submit.tokens)} tokens, at most {self.max_model_len - 1} leave room for "
                f"a new one in max_model_len {self.max_model_len}"
            )
        # Prompts are long: look for the offender only where there is one.
        if set(map(type, submit.tokens)) == {int} and min(submit.tokens) >= 0 and max(submit.tokens) < self.vocab_size:
            return None
        index, token = next(
            (index, token)
            for index, token in enumerate(submit.tokens)
            if type(token) is not int or not 0 <= token < self.vocab_size
        )
        return f"tokens[{index}]: must be an integer in [0, {self.vocab_size}), the vocabulary, got {token!r}"

    def _pool_fault(self, submit: Submit) -> str | None:
        needed = len(submit.tokens) + self.clamp_new_tokens(submit) - 1
        if needed > self.total_slots:
            return (
                f"tokens: {len(submit.tokens)} prompt tokens and max_new_tokens {self.clamp_new_tokens(submit)} need "
                f"{needed} KV slots, the pools have {self.total_slots} in all"
            )
        return None


def _counts_fault(submit: Submit) -> str | None:
    if type(submit.max_new_tokens) is not int or submit.max_new_tokens < 1:
        return f"max_new_tokens: must be at least 1, got {submit.max_new_tokens!r}"
    for index, token in enumerate(submit.stop_tokens):
        if type(token) is not int:
            return f"stop_tokens[{index}]: must be a token id, got {token!r}"
    return None


def _sampling_fault(sampling: SamplingParams) -> str | None:
    if not _is_number(sampling.temperature) or not 0 <= sampling.temperature < math.inf:
        return f"temperature: must be finite and at least 0, got {sampling.temperature!r}"
    if not _is_number(sampling.top_p) or not 0 < sampling.top_p <= 1:
        return f"top_p: must be in (0, 1], got {sampling.top_p!r}"
    if type(sampling.top_k) is not int or not 0 <= sampling.top_k < NUM_UINT64:
        return f"top_k: must be at least 0 (0: no limit) and below 2**64, got {sampling.top_k!r}"
    if type(sampling.seed) is not int or not 0 <= sampling.seed < NUM_UINT64:
        return f"seed: must be an integer in [0, 2**64), got {sampling.seed!r}"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and -NUM_UINT64 < value < NUM_UINT64)
