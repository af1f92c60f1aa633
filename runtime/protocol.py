"""Every message between front end, manager and ranks: frozen dataclasses of plain values.

``wire.py`` turns them into msgpack and back. Positions, counts and lengths are in tokens, times in seconds of
``time.monotonic`` of the sender. Placements are as in ``loongserve.policies.base``.
"""

from dataclasses import dataclass, field
from typing import Literal

Placement = tuple[tuple[int, int, int], ...]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 do not restrict."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    # Randomness is a function of (seed, position of the new token) alone.
    seed: int = 0


# front end -> manager


@dataclass(frozen=True, slots=True)
class Submit:
    """A validated request. ``request`` is a number that the front end never uses twice."""

    request: int
    tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    # Any of these ends the request; the token itself is published.
    stop_tokens: tuple[int, ...] = ()
    # Publish the float32 logits that each token was chosen from (for tests and evaluation).
    return_logits: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request; unknown or finished requests are ignored."""

    request: int


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Ask for a ``Status``."""

    query: int


# manager -> front end


@dataclass(frozen=True, slots=True)
class Token:
    """Output token number ``index`` of a request. ``logits``: float32 bytes [vocab], or empty."""

    request: int
    index: int
    token: int
    logits: bytes = b""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last message of a request. ``message`` says why where ``reason`` is "error"."""

    request: int
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The only message of a request that is not admitted. ``code`` is a gRPC status code's name."""

    request: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """One instance in a ``Status``. ``state``: idle, prefill, decode, drained or lost."""

    instance: int
    num_slots: int
    free_slots: int
    state: str
    # The group of its running iteration, in ring order.
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of what the manager did. ``kind``: prefill, decode, scale_down, scale_up, drain, pause, ..., finish.

    ``group``: the instances of it: those that run, for scale_down those that keep the KV, for scale_up those that join.
    """

    time_s: float
    kind: str
    group: tuple[int, ...]
    requests: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Status:
    """The cluster now, and the last decisions, oldest first."""

    query: int
    instances: tuple[InstanceStatus, ...]
    waiting: int
    running: int
    counters: dict[str, int]
    decisions: tuple[Decision, ...]


# manager -> ranks


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens ``tokens`` of a request at positions begin, begin + 1, ...

    Token t goes to member ``(t + rotation) % DoP``. ``resident`` places positions [0, begin); ``save`` places the new
    ones (for several steps: those of all steps). ``sampling`` None: nothing is sampled (not the prompt's last chunk).
    """

    request: int
    begin: int
    tokens: tuple[int, ...]
    resident: Placement
    save: Placement
    rotation: int
    sampling: SamplingParams | None
    return_logits: bool = False

    @property
    def count(self) -> int:
        """New tokens in the first step."""
        return len(self.tokens)

    def sampler_member(self, dop: int) -> int:
        """The index in the group of the member that has the last new token, and so samples."""
        return (len(self.tokens) - 1 + self.rotation) % dop


@dataclass(frozen=True, slots=True)
class Iteration:
    """One forward pass of ``group`` over ``segments``, or ``steps`` decode steps (then every segment has one token).

    Goes to every rank of the group, in the order of ``seq`` among all commands.
    """

    seq: int
    epoch: int
    group: tuple[int, ...]
    segments: tuple[Segment, ...]
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Free:
    """Give back all slots of ``request`` on ``instance``; a request without slots there is ignored."""

    seq: int
    epoch: int
    instance: int
    request: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the process after what is queued before."""


# ranks -> manager


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has its weights and its pool and is connected to its peers."""

    instance: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token at ``position`` of a request, sampled. ``logits``: float32 bytes, or empty."""

    request: int
    position: int
    token: int
    logits: bytes = b""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What one member sampled in step ``step`` of an iteration."""

    seq: int
    epoch: int
    instance: int
    step: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class IterationDone:
    """One member has ended an iteration. ``elapsed_s``: its time in it."""

    seq: int
    epoch: int
    instance: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class IterationFailed:
    """An iteration raised on one member; the instance is of no use until the world is built anew."""

    seq: int
    epoch: int
    instance: int
    message: str


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """An instance's process has ended or cannot be reached."""

    instance: int
    message: str


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a started cluster is: the manager's first message to the front end."""

    model: str
    vocab_size: int
    # Prompt plus output of one request.
    max_model_len: int
    # Summed over the instances.
    total_slots: int
    num_instances: int
    policy: str
    dtype: str
    device: str
    eos_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartupFailed:
    """The manager's or a rank's only message when it could not start."""

    message: str


ClientMessage = Submit | Abort | GetStatus
ClientEvent = Token | Finished | Refused | Status
RankCommand = Iteration | Free | Shutdown
RankEvent = Ready | StepTokens | IterationDone | IterationFailed | InstanceLost
# What Manager.handle takes and returns.
Event = ClientMessage | RankEvent
Command = RankCommand | ClientEvent
