"""The manager's books: instances, live requests, iterations in flight, the ledger. Rank commands get their seq here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loongserve.kvpool.ledger import PlacementLedger
from loongserve.policies.base import ClusterView, InstanceView, Placement, RequestView
from loongserve.runtime.iteration import IterationKind, RunningIteration
from loongserve.runtime.protocol import Free, InstanceStatus, Iteration, Segment
from loongserve.runtime.request import LiveRequest


@dataclass(frozen=True, slots=True)
class Row:
    """A segment to be: the next ``count`` tokens of a request."""

    request: LiveRequest
    count: int
    save: Placement
    rotation: int


class Cluster:
    """What runs where, what waits and who holds what. Changed by the manager alone; makes no decisions.

    Attributes:
        requests: The live requests, by arrival.
        drains: Instance -> the request that it is kept idle for.
        ledger: Who holds what. Slots are taken for all steps at launch and come back when a ``Free`` is made.
    """

    def __init__(self, num_slots: Mapping[int, int]) -> None:
        """Open the books of idle instances with empty pools.

        Args:
            num_slots: Instance -> slots of its pool, in tokens.
        """
        self.num_slots = dict(sorted(num_slots.items()))
        self.ledger = PlacementLedger(self.num_slots)
        self.requests: dict[int, LiveRequest] = {}
        self.drains: dict[int, int] = {}
        self._running: dict[int, RunningIteration] = {}
        self._running_on: dict[int, RunningIteration] = {}
        # Views of requests that wait without KV: of thousands, all look the same at each planning.
        self._waiting_views: dict[int, RequestView] = {}
        self._epoch = 0
        self._last_seq = 0
        self._decode_s_sum = 0.0
        self._num_decoded = 0

    @property
    def is_running(self) -> bool:
        """Whether any iteration is in flight."""
        return bool(self._running)

    def is_live(self, request: int) -> bool:
        """Whether a request's id is taken: it lives, or its KV still waits for the end of an iteration."""
        return request in self.requests or bool(self.ledger.holders(request))

    def running(self, seq: int, epoch: int) -> RunningIteration | None:
        """Look up an iteration in flight; None when it has ended or belongs to another epoch."""
        return self._running.get(seq) if epoch == self._epoch else None

    def start(self, group: tuple[int, ...], rows: Iterable[Row], steps: int, kind: IterationKind) -> Iteration:
        """Take the slots of all steps and put the iteration in flight.

        Raises:
            LedgerError: The rows do not fit; a checked plan never gets here.
        """
        seq = self._next_seq()
        segments = []
        for row in rows:
            request = row.request
            end = request.computed + row.count
            samples = end == len(request.tokens)
            save = _normal(row.save)
            segments.append(
                Segment(
                    request=request.request,
                    begin=request.computed,
                    tokens=tuple(request.tokens[request.computed : end]),
                    resident=self.ledger.resident(request.request, request.computed),
                    save=save,
                    rotation=row.rotation,
                    sampling=request.sampling if samples else None,
                    return_logits=request.return_logits and samples,
                )
            )
            self.ledger.place(request.request, save)
            self._waiting_views.pop(request.request, None)
            request.start(seq)
        iteration = Iteration(seq, self._epoch, group, tuple(segments), steps)
        running = RunningIteration(iteration, kind)
        self._running[seq] = running
        self._running_on.update(dict.fromkeys(group, running))
        return iteration

    def end(self, running: RunningIteration) -> None:
        """Take an iteration out of flight."""
        del self._running[running.iteration.seq]
        for instance in running.iteration.group:
            del self._running_on[instance]

    def free(self, request: int) -> list[Free]:
        """Take back all slots of a request. Returns: the commands that make it so."""
        return [
            Free(self._next_seq(), self._epoch, instance, request) for instance in sorted(self.ledger.free(request))
        ]

    def remove(self, request: LiveRequest) -> list[Free]:
        """Forget a request that ended. Returns: the commands that free its slots; later, where it still runs."""
        del self.requests[request.request]
        self._waiting_views.pop(request.request, None)
        return [] if request.iteration is not None else self.free(request.request)

    def clear(self) -> None:
        """Forget everything: the instances are gone, and their pools with them."""
        for request in self.ledger.requests():
            self.ledger.free(request)
        self.requests.clear()
        self._waiting_views.clear()
        self.drains.clear()
        self._running.clear()
        self._running_on.clear()

    def observe_decode(self, duration_s: float) -> None:
        """Take in how long a finished request was in its decode phase."""
        self._decode_s_sum += duration_s
        self._num_decoded += 1

    def view(self, now: float) -> ClusterView:
        """Show everything to a policy."""
        prefills: list[RequestView] = []
        decodes: list[RequestView] = []
        for request in self.requests.values():
            waiting = self._waiting_views.get(request.request)
            if waiting is not None:
                prefills.append(waiting)
                continue
            placement = self.ledger.resident(request.request, request.computed)
            # Whoever stored the last token goes on to store the next: masters are sticky.
            master = placement[-1][0] if placement else None
            view = request.view(placement, master)
            (prefills if request.phase == "prefill" else decodes).append(view)
            if request.computed == 0 and request.iteration is None:
                self._waiting_views[request.request] = view
        return ClusterView(
            now_s=now,
            instances=tuple(self._instance_view(instance) for instance in self.num_slots),
            prefills=tuple(prefills),
            decodes=tuple(decodes),
            mean_decode_s=self._decode_s_sum / self._num_decoded if self._num_decoded else 0.0,
        )

    def instance_status(self, instance: int) -> InstanceStatus:
        """Show one instance to people."""
        view = self._instance_view(instance)
        running = self._running_on.get(instance)
        return InstanceStatus(
            instance=instance,
            num_slots=view.num_slots,
            free_slots=view.free_slots,
            state=view.running or ("idle" if view.drained_for is None else "drained"),
            group=running.iteration.group if running else (),
        )

    def _instance_view(self, instance: int) -> InstanceView:
        running = self._running_on.get(instance)
        drained_for = self.drains.get(instance)
        return InstanceView(
            instance=instance,
            num_slots=self.num_slots[instance],
            free_slots=self.ledger.free_slots(instance),
            running=running.kind if running else None,
            drained_for=drained_for if drained_for in self.requests else None,
        )

    def _next_seq(self) -> int:
        self._last_seq += 1
        return self._last_seq


def _normal(placement: Placement) -> Placement:
    """Sort a placement by position, without empty ranges, touching ranges of one instance made one."""
    pieces: list[tuple[int, int, int]] = []
    for instance, begin, end in sorted(placement, key=lambda piece: piece[1:]):
        if begin == end:
            continue
        if pieces and pieces[-1][0] == instance:
            begin = pieces.pop()[1]
        pieces.append((instance, begin, end))
    return tuple(pieces)
