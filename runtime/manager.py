"""The manager: the one sequencer of the cluster. Sans-IO: events in, commands out; no clock, socket, thread or torch.

It admits requests, keeps the ledger of all pools, asks the policy what to run on a change, checks every plan, sequences
all commands and publishes each token once. The same code runs real ranks, an in-process cluster and a simulator.

When the policy is asked: on an arrival, the end of a prefill, the end of an iteration in which a row finished or was
aborted, an abort of a waiting request, a shortage of slots and when a drained instance comes to rest. Any other decode
group is renewed at once as it was, without asking: to get hold of a group that decodes, a policy drains it.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from loongserve.kvpool.ledger import PlacementLedger
from loongserve.policies.base import ClusterView, InstanceView, Launch, Placement, Plan, Policy, RequestView
from loongserve.runtime.iteration import RunningIteration, StepClock
from loongserve.runtime.journal import Journal
from loongserve.runtime.planner import Planner
from loongserve.runtime.protocol import (
    Abort,
    Command,
    Event,
    Finished,
    FinishReason,
    Free,
    GetStatus,
    InstanceLost,
    InstanceStatus,
    Iteration,
    IterationDone,
    IterationFailed,
    Ready,
    Refused,
    SampledToken,
    Segment,
    Status,
    StepTokens,
    Submit,
    Token,
)
from loongserve.runtime.request import AdmissionLimits, LiveRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Row:
    """One segment to be: ``count`` next tokens of a request."""

    request: LiveRequest
    count: int
    save: Placement
    rotation: int


class Manager:
    """Turns events into commands; ``handle`` is all of it.

    Requests that arrive before every instance is ready are held, and admitted or refused once the pools are known.
    """

    def __init__(
        self,
        policy: Policy,
        fallback: Policy,
        *,
        num_instances: int,
        vocab_size: int,
        max_model_len: int,
        control_interval_s: float = 0.05,
        max_steps: int = 8,
    ) -> None:
        """Set up a manager that waits for its instances.

        Args:
            policy: Asked first.
            fallback: Takes over for a turn in which the policy raises, breaks an invariant or would stall the cluster.
            num_instances: How many ``Ready`` events to wait for; instances are 0 .. num_instances - 1.
            vocab_size: Token ids are below it.
            max_model_len: Most tokens of prompt and output together.
            control_interval_s: An iteration of several decode steps is meant to last no longer.
            max_steps: Most decode steps of a renewed iteration.

        Raises:
            ValueError: A number is out of its range.
        """
        for name, value in (("num_instances", num_instances), ("vocab_size", vocab_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2 (a prompt and a new token), got {max_model_len}")
        self._num_instances = num_instances
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._clock = StepClock(control_interval_s, max_steps)
        self.journal = Journal()
        self._planner = Planner(policy, fallback, self.journal)

        self._num_slots: dict[int, int] = {}
        self._held: list[Submit] = []
        self._limits: AdmissionLimits | None = None
        self._ledger = PlacementLedger({})
        # By arrival.
        self._requests: dict[int, LiveRequest] = {}
        self._running: dict[int, RunningIteration] = {}
        self._running_on: dict[int, RunningIteration] = {}
        self._drains: dict[int, int] = {}
        self._lost: set[int] = set()
        # Why nothing is served any more; None while all is well.
        self._broken: str | None = None

        self._epoch = 0
        self._next_seq = 0
        self._decode_s_sum = 0.0
        self._num_decoded = 0
        self._last_reasons: tuple[str, ...] = ()

        self._commands: list[Command] = []
        self._changed = False

    @property
    def ledger(self) -> PlacementLedger:
        """Who holds what; empty until all instances are ready. To be read only."""
        return self._ledger

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event and answer what to do about it.

        Args:
            event: From the front end or a rank. The events of one rank come in the order in which it sent them.
            now: The time, in seconds of one monotonic clock.

        Returns:
            Commands for ranks and messages for the front end, to be delivered in this order; an ``Iteration`` goes to
            every rank of its group.
        """
        self._commands = []
        self._changed = False
        self._dispatch(event, now)
        if self._changed and self._limits is not None and self._broken is None:
            self._plan(now)
        return self._commands

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case Submit():
                self._on_submit(event, now)
            case Abort():
                self._on_abort(event, now)
            case GetStatus():
                self._commands.append(self._status(event.query))
            case Ready():
                self._on_ready(event, now)
            case StepTokens():
                self._on_tokens(event, now)
            case IterationDone():
                self._on_done(event, now)
            case IterationFailed():
                self._break(event.instance, f"instance {event.instance} failed: {event.message}", now)
            case InstanceLost():
                self._break(event.instance, f"instance {event.instance} was lost: {event.message}", now)

    # Requests: admission, abort, end

    def _on_submit(self, submit: Submit, now: float) -> None:
        limits = self._limits
        if self._broken is not None:
            self._refuse(Refused(submit.request, "UNAVAILABLE", self._broken), now)
            return
        if limits is None:
            self._held.append(submit)
            return
        if submit.request in self._requests or self._ledger.holders(submit.request):
            message = f"request: {submit.request} is the id of a live request"
            self._refuse(Refused(submit.request, "ALREADY_EXISTS", message), now)
            return
        refused = limits.check(submit)
        if refused is not None:
            self._refuse(refused, now)
            return
        self.journal.count("admitted")
        self._requests[submit.request] = LiveRequest(
            request=submit.request,
            arrival_s=now,
            prompt_tokens=len(submit.tokens),
            max_new_tokens=limits.clamp_new_tokens(submit),
            tokens=list(submit.tokens),
            sampling=submit.sampling,
            stop_tokens=frozenset(submit.stop_tokens),
            return_logits=submit.return_logits,
        )
        self._changed = True

    def _refuse(self, refused: Refused, now: float) -> None:
        self.journal.count("refused")
        self.journal.note(now, "refuse", f"{refused.code}: {refused.message}", requests=(refused.request,))
        self._commands.append(refused)

    def _on_abort(self, abort: Abort, now: float) -> None:
        for held in self._held:
            if held.request == abort.request:
                self._held.remove(held)
                self._commands.append(Finished(held.request, "abort", len(held.tokens), 0))
                return
        request = self._requests.get(abort.request)
        if request is not None:
            # A running one gives its slots back at the end of its iteration, and only then is there a change.
            self._changed = request.iteration is None
            self._finish(request, "abort", now)

    def _finish(self, request: LiveRequest, reason: FinishReason, now: float, message: str = "") -> None:
        """End a request and tell the front end; its slots go back now, or at the end of its iteration."""
        del self._requests[request.request]
        if request.iteration is None:
            self._free(request.request)
        if reason in ("stop", "length") and request.decode_since_s is not None:
            self._decode_s_sum += now - request.decode_since_s
            self._num_decoded += 1
        self.journal.count({"abort": "aborted", "error": "failed"}.get(reason, "finished"))
        text = f"{reason} after {request.output_tokens} tokens" + (f": {message}" if message else "")
        self.journal.note(now, "abort" if reason == "abort" else "finish", text, requests=(request.request,))
        self._commands.append(Finished(request.request, reason, request.prompt_tokens, request.output_tokens, message))

    def _free(self, request: int) -> None:
        """Return all slots of a request; the ledger has them back as soon as the commands are queued."""
        for instance in sorted(self._ledger.free(request)):
            self._commands.append(Free(self._seq(), self._epoch, instance, request))

    # Ranks: ready, tokens, the end of an iteration, loss

    def _on_ready(self, ready: Ready, now: float) -> None:
        if not 0 <= ready.instance < self._num_instances or ready.instance in self._num_slots:
            logger.warning("ignored Ready of instance %d: unknown, or ready before", ready.instance)
            return
        self._num_slots[ready.instance] = ready.num_slots
        if len(self._num_slots) < self._num_instances or self._broken is not None:
            return
        self._ledger = PlacementLedger(dict(sorted(self._num_slots.items())))
        self._limits = AdmissionLimits(self._vocab_size, self._max_model_len, sum(self._num_slots.values()))
        held, self._held = self._held, []
        for submit in held:
            self._on_submit(submit, now)

    def _on_tokens(self, event: StepTokens, now: float) -> None:
        running = self._running.get(event.seq)
        if running is None or event.epoch != self._epoch:
            return
        for sampled in event.tokens:
            request = self._requests.get(sampled.request)
            # A known position was published before; one beyond the next can't be: a rank reports its steps in order.
            if (
                request is not None
                and request.iteration == event.seq
                and sampled.position == len(request.tokens)
                and running.sampler(sampled.request) == event.instance
            ):
                self._publish(request, sampled, now)

    def _publish(self, request: LiveRequest, sampled: SampledToken, now: float) -> None:
        self.journal.count("output_tokens")
        self._commands.append(Token(request.request, request.output_tokens, sampled.token, sampled.logits))
        reason = request.add_token(sampled.token, now)
        if reason is not None:
            self._finish(request, reason, now)

    def _on_done(self, event: IterationDone, now: float) -> None:
        running = self._running.get(event.seq)
        if running is None or event.epoch != self._epoch or not running.done(event):
            return
        iteration = running.iteration
        del self._running[event.seq]
        for instance in iteration.group:
            del self._running_on[instance]
        if running.kind == "decode":
            self._clock.observe(len(iteration.group), iteration.steps, running.elapsed_s)
        whole = True
        for segment in iteration.segments:
            request = self._requests.get(segment.request)
            if request is None:
                self._free(segment.request)
                whole = False
                continue
            request.iteration = None
            request.computed = segment.begin + segment.count + iteration.steps - 1
            if request.computed >= len(request.tokens):
                message = f"instance {running.sampler(segment.request)} ended an iteration without its token"
                self._finish(request, "error", now, message)
                whole = False
        drained = any(instance in self._drains for instance in iteration.group)
        if running.kind == "prefill" or not whole or drained or not self._renew(iteration):
            self._changed = True

    def _renew(self, ended: Iteration) -> bool:
        """Launch a decode group again with the next tokens, masters kept. Returns: False when a master lacks slots."""
        group = ended.group
        requests = [self._requests[segment.request] for segment in ended.segments]
        masters = [group[segment.sampler_member(len(group))] for segment in ended.segments]
        steps = self._clock.steps(
            len(group),
            rows_of=Counter(masters),
            free_of={master: self._ledger.free_slots(master) for master in masters},
            remaining=min(request.max_kv_tokens - request.computed for request in requests),
        )
        if steps < 1:
            return False
        rows = [
            _Row(request, 1, ((master, request.computed, request.computed + steps),), group.index(master))
            for request, master in zip(requests, masters, strict=True)
        ]
        self.journal.count("renewals")
        self._start(group, rows, steps, "decode")
        return True

    def _break(self, instance: int, message: str, now: float) -> None:
        """Give up: end every request, refuse new ones. The world is not built anew by this manager."""
        if instance in self._lost:
            return
        self._lost.add(instance)
        logger.error("%s", message)
        self.journal.note(now, "lost", message, group=(instance,))
        if self._broken is not None:
            return
        self._broken = message
        self._drains = {}
        self._running = {}
        self._running_on = {}
        for request in tuple(self._requests.values()):
            # Nothing is freed by command any more: the pools end with their instances.
            request.iteration = None
            self._ledger.free(request.request)
            self._finish(request, "error", now, message)
        for leftover in self._ledger.requests():
            self._ledger.free(leftover)
        held, self._held = self._held, []
        for submit in held:
            self._on_submit(submit, now)

    # Planning

    def _plan(self, now: float) -> None:
        while self._requests:
            plan = self._planner.plan(self._view(now))
            if plan is not None:
                self._carry_out(plan, now)
                return
            if self._running:
                # Asked again when an iteration ends.
                return
            # Not even the fallback can run anything: rather than wait for ever, the first request makes way.
            self._finish(next(iter(self._requests.values())), "error", now, "no policy finds a way to run it")
        self._drains = {}

    def _view(self, now: float) -> ClusterView:
        prefills: list[RequestView] = []
        decodes: list[RequestView] = []
        for request in self._requests.values():
            placement = self._ledger.resident(request.request, request.computed)
            # Also the rule that makes masters sticky: it stored the last token and goes on to store the next.
            master = placement[-1][0] if placement else None
            (prefills if request.phase == "prefill" else decodes).append(request.view(placement, master))
        return ClusterView(
            now_s=now,
            instances=tuple(self._instance_view(instance) for instance in self._ledger.instances),
            prefills=tuple(prefills),
            decodes=tuple(decodes),
            mean_decode_s=self._decode_s_sum / self._num_decoded if self._num_decoded else 0.0,
        )

    def _instance_view(self, instance: int) -> InstanceView:
        running = self._running_on.get(instance)
        drained_for = self._drains.get(instance)
        return InstanceView(
            instance=instance,
            num_slots=self._num_slots[instance],
            free_slots=self._ledger.free_slots(instance),
            running=running.kind if running else None,
            drained_for=drained_for if drained_for in self._requests else None,
        )

    def _carry_out(self, plan: Plan, now: float) -> None:
        if plan.reasons != self._last_reasons:
            self._last_reasons = plan.reasons
            for reason in plan.reasons:
                self.journal.note(now, "policy", reason)
        for name in plan.evictions:
            self._free(name)
            self._requests[name].evict()
            self.journal.count("evictions")
            self.journal.note(now, "evict", "KV dropped, to be computed again", requests=(name,))
        for instance, name in plan.drains.items():
            if self._drains.get(instance) != name:
                self.journal.count("drains")
                self.journal.note(now, "drain", f"instance {instance} is kept free", (instance,), (name,))
        self._drains = dict(plan.drains)
        for launch in plan.launches:
            self._launch(launch, now)

    def _launch(self, launch: Launch, now: float) -> None:
        group = launch.group
        rows = [
            _Row(self._requests[segment.request], segment.count, segment.save, segment.rotation)
            for segment in launch.segments
        ]
        prefills = [row for row in rows if row.request.phase == "prefill"]
        kind: Literal["prefill", "decode"] = "prefill" if prefills else "decode"
        names = tuple(row.request.request for row in rows)
        self.journal.note(now, kind, f"{sum(row.count for row in rows)} tokens, {launch.steps} steps", group, names)
        self._note_pauses(launch, now)
        if kind == "decode":
            before = {instance for name in names for instance in self._ledger.holders(name)}
            joined = sorted({instance for row in rows for instance, begin, end in row.save if begin < end} - before)
            if joined:
                self.journal.count("scale_ups")
                self.journal.note(now, "scale_up", f"instances {joined} join and store new KV", group, names)
        self._start(group, rows, launch.steps, kind)
        for row in prefills:
            name = row.request.request
            self.journal.count("prefills")
            self.journal.count("prefill_tokens", row.count)
            holders = self._ledger.holders(name)
            if row.request.computed + row.count == row.request.known_tokens and len(holders) < len(group):
                self.journal.count("scale_downs")
                text = f"prefill on {len(group)} instances leaves its KV on {sorted(holders)}"
                self.journal.note(now, "scale_down", text, group, (name,))

    def _note_pauses(self, launch: Launch, now: float) -> None:
        for name in launch.pauses:
            request = self._requests[name]
            if not request.paused:
                request.paused = True
                self.journal.count("pauses")
                self.journal.note(now, "pause", "waits with its KV in place", launch.group, (name,))

    def _start(
        self, group: tuple[int, ...], rows: Iterable[_Row], steps: int, kind: Literal["prefill", "decode"]
    ) -> None:
        """Reserve the slots of all steps and queue the iteration."""
        seq = self._seq()
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
                    resident=self._ledger.resident(request.request, request.computed),
                    save=save,
                    rotation=row.rotation,
                    sampling=request.sampling if samples else None,
                    return_logits=request.return_logits and samples,
                )
            )
            self._ledger.place(request.request, save)
            request.known_at_launch = len(request.tokens)
            request.iteration = seq
            request.paused = False
        iteration = Iteration(seq, self._epoch, group, tuple(segments), steps)
        running = RunningIteration(iteration, kind)
        self._running[seq] = running
        self._running_on.update(dict.fromkeys(group, running))
        self.journal.count("iterations")
        self._commands.append(iteration)

    def _seq(self) -> int:
        self._next_seq += 1
        return self._next_seq

    def _status(self, query: int) -> Status:
        running = sum(request.iteration is not None for request in self._requests.values())
        return Status(
            query=query,
            instances=tuple(self._instance_status(instance) for instance in sorted(self._num_slots)),
            waiting=len(self._held) + len(self._requests) - running,
            running=running,
            counters=dict(self.journal.counters),
            decisions=self.journal.decisions,
        )

    def _instance_status(self, instance: int) -> InstanceStatus:
        running = self._running_on.get(instance)
        state: str = running.kind if running else "drained" if instance in self._drains else "idle"
        num_slots = self._num_slots[instance]
        return InstanceStatus(
            instance=instance,
            num_slots=num_slots,
            free_slots=num_slots if self._limits is None else self._ledger.free_slots(instance),
            state="lost" if instance in self._lost else state,
            group=running.iteration.group if running else (),
        )


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
