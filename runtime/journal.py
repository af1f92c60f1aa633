"""What the manager did: counters, and the last decisions in words."""

from collections import deque
from collections.abc import Iterable

from loongserve.runtime.protocol import Decision

COUNTERS = (
    # requests
    "admitted",
    "refused",
    "finished",
    "aborted",
    "failed",
    # work
    "iterations",
    "renewals",
    "prefills",
    "prefill_tokens",
    "output_tokens",
    # elasticity
    "scale_downs",
    "scale_ups",
    "migrations",
    "evictions",
    "pauses",
    "drains",
    # what should not happen
    "plan_violations",
    "fallback_plans",
)
MAX_DECISIONS = 1000


class Journal:
    """Counts events by name and keeps the last ``max_decisions`` decisions.

    ``prefills`` counts prefill segments (chunks) launched and ``prefill_tokens`` their tokens. ``scale_downs`` counts
    prefills that end with KV on fewer instances than they ran on; ``scale_ups`` decode groups that take in an instance
    without KV of their rows to store new KV there. ``pauses`` and ``drains`` count only new ones.
    """

    def __init__(self, max_decisions: int = MAX_DECISIONS) -> None:
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._decisions: deque[Decision] = deque(maxlen=max_decisions)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The last decisions, oldest first."""
        return tuple(self._decisions)

    def count(self, name: str, by: int = 1) -> None:
        """Raise a counter. Raises: KeyError for a name that is not in ``COUNTERS``."""
        self.counters[name] += by

    def note(
        self, time_s: float, kind: str, text: str, group: tuple[int, ...] = (), requests: Iterable[int] = ()
    ) -> None:
        """Keep one decision."""
        self._decisions.append(Decision(time_s, kind, group, tuple(requests), text))
