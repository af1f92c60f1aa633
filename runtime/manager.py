"""The manager: the one sequencer of the cluster. Sans-IO: events in, commands out; no clock, socket, thread or torch.

It admits requests, keeps the books of all pools, asks the policy what to run on a change, sequences all commands and
publishes each token once. The same code runs real ranks, an in-process cluster and a simulator.

When the policy is asked: on an arrival, the end of a prefill, the end of an iteration in which a row finished or was
aborted, an abort of a waiting request, a shortage of slots and when a drained instance comes to rest. Any other decode
group is renewed at once as it was, without asking: to get hold of a group that decodes, a policy drains it.
"""

import logging
from collections import Counter
from dataclasses import replace

from loongserve.kvpool.ledger import PlacementLedger
from loongserve.policies.base import Launch, Plan, Policy
from loongserve.runtime.cluster import Cluster, Row
from loongserve.runtime.iteration import IterationKind, StepClock
from loongserve.runtime.journal import Journal
from loongserve.runtime.planner import Planner
from loongserve.runtime.protocol import (
    Abort,
    Command,
    Event,
    Finished,
    FinishReason,
    GetStatus,
    InstanceLost,
    InstanceStatus,
    Iteration,
    IterationDone,
    IterationFailed,
    Ready,
    Refused,
    SampledToken,
    Status,
    StepTokens,
    Submit,
    Token,
)
from loongserve.runtime.request import AdmissionLimits, LiveRequest

logger = logging.getLogger(__name__)


class Manager:
    """Turns events into commands; ``handle`` is all of it.

    Requests that arrive before every instance is ready are held, and admitted or refused once the pools are known.
    When an instance fails or is lost, every request ends with an error and new ones are refused: the world is not
    built anew by this manager.
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
        for name, value, least in (
            ("num_instances", num_instances, 1),
            ("vocab_size", vocab_size, 1),
            ("max_model_len", max_model_len, 2),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.journal = Journal()
        self._planner = Planner(policy, fallback, self.journal)
        self._step_clock = StepClock(control_interval_s, max_steps)
        self._num_instances = num_instances
        self._limits = AdmissionLimits(vocab_size, max_model_len, total_slots=0)
        # Instances that have reported their pools; all of them: the cluster is ready.
        self._num_slots: dict[int, int] = {}
        self._cluster = Cluster({})
        self._held: list[Submit] = []
        self._lost: set[int] = set()
        # Why nothing is served any more; None while all is well.
        self._broken: str | None = None
        self._last_reasons: tuple[str, ...] = ()
        # Of the event that is handled now.
        self._commands: list[Command] = []
        self._changed = False

    @property
    def ledger(self) -> PlacementLedger:
        """Who holds what; without instances until all are ready. To be read only."""
        return self._cluster.ledger

    @property
    def is_ready(self) -> bool:
        """Whether all instances have reported their pools."""
        return len(self._num_slots) == self._num_instances

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
                self._on_loss(event.instance, f"instance {event.instance} failed: {event.message}", now)
            case InstanceLost():
                self._on_loss(event.instance, f"instance {event.instance} was lost: {event.message}", now)
        if self._changed:
            self._plan(now)
        return self._commands

    # Requests: admission, abort, end

    def _on_submit(self, submit: Submit, now: float) -> None:
        if not self.is_ready and self._broken is None:
            self._held.append(submit)
            return
        refused = self._refusal(submit)
        if refused is not None:
            self.journal.count("refused")
            self.journal.note(now, "refuse", f"{refused.code}: {refused.message}", requests=(submit.request,))
            self._commands.append(refused)
            return
        self.journal.count("admitted")
        self._cluster.requests[submit.request] = LiveRequest(
            request=submit.request,
            arrival_s=now,
            prompt_tokens=len(submit.tokens),
            max_new_tokens=self._limits.clamp_new_tokens(submit),
            tokens=list(submit.tokens),
            sampling=submit.sampling,
            stop_tokens=frozenset(submit.stop_tokens),
            return_logits=submit.return_logits,
        )
        self._changed = True

    def _refusal(self, submit: Submit) -> Refused | None:
        if self._broken is not None:
            return Refused(submit.request, "UNAVAILABLE", self._broken)
        if self._cluster.is_live(submit.request):
            return Refused(submit.request, "ALREADY_EXISTS", f"request: {submit.request} is the id of a live request")
        return self._limits.check(submit)

    def _on_abort(self, abort: Abort, now: float) -> None:
        for held in self._held:
            if held.request == abort.request:
                self._held.remove(held)
                self.journal.count("aborted")
                self._commands.append(Finished(held.request, "abort", len(held.tokens), 0))
                return
        request = self._cluster.requests.get(abort.request)
        if request is not None:
            # A running one gives its slots back at the end of its iteration, and only then is there a change.
            self._changed = request.iteration is None
            self._finish(request, "abort", now)

    def _finish(self, request: LiveRequest, reason: FinishReason, now: float, message: str = "") -> None:
        """End a request and tell the front end; its slots go back now, or at the end of its iteration."""
        self._commands.extend(self._cluster.remove(request))
        if reason in ("stop", "length") and request.decode_since_s is not None:
            self._cluster.observe_decode(now - request.decode_since_s)
        counter, kind = {"abort": ("aborted", "abort"), "error": ("failed", "error")}.get(
            reason, ("finished", "finish")
        )
        self.journal.count(counter)
        text = f"{reason} after {request.output_tokens} tokens" + (f": {message}" if message else "")
        self.journal.note(now, kind, text, requests=(request.request,))
        self._commands.append(Finished(request.request, reason, request.prompt_tokens, request.output_tokens, message))

    # Ranks: ready, tokens, the end of an iteration, loss

    def _on_ready(self, ready: Ready, now: float) -> None:
        if not 0 <= ready.instance < self._num_instances or ready.instance in self._num_slots:
            logger.warning("ignored Ready of instance %d: unknown, or ready before", ready.instance)
            return
        self._num_slots[ready.instance] = ready.num_slots
        if self.is_ready and self._broken is None:
            self._cluster = Cluster(self._num_slots)
            self._limits = replace(self._limits, total_slots=sum(self._num_slots.values()))
            self._admit_held(now)

    def _admit_held(self, now: float) -> None:
        held, self._held = self._held, []
        for submit in held:
            self._on_submit(submit, now)

    def _on_tokens(self, event: StepTokens, now: float) -> None:
        running = self._cluster.running(event.seq, event.epoch)
        if running is None:
            return
        for sampled in event.tokens:
            request = self._cluster.requests.get(sampled.request)
            # A known position was published before. None can be skipped: a rank reports its steps in order.
            if (
                request is not None
                and request.iteration == event.seq
                and sampled.position == len(request.tokens)
                and running.samplers.get(sampled.request) == event.instance
            ):
                self._publish(request, sampled, now)

    def _publish(self, request: LiveRequest, sampled: SampledToken, now: float) -> None:
        self.journal.count("output_tokens")
        self._commands.append(Token(request.request, request.output_tokens, sampled.token, sampled.logits))
        reason = request.add_token(sampled.token, now)
        if reason is not None:
            self._finish(request, reason, now)

    def _on_done(self, event: IterationDone, now: float) -> None:
        running = self._cluster.running(event.seq, event.epoch)
        if running is None or not running.done(event):
            return
        self._cluster.end(running)
        iteration = running.iteration
        if running.kind == "decode":
            self._step_clock.observe(len(iteration.group), iteration.steps, running.elapsed_s)
        renewable = running.kind == "decode" and not any(i in self._cluster.drains for i in iteration.group)
        for segment in iteration.segments:
            request = self._cluster.requests.get(segment.request)
            if request is None:
                self._commands.extend(self._cluster.free(segment.request))
                renewable = False
                continue
            request.iteration = None
            request.computed = segment.begin + segment.count + iteration.steps - 1
            if request.computed >= len(request.tokens):
                sampler = running.samplers[segment.request]
                message = f"instance {sampler} ended iteration {iteration.seq} without its token"
                self._finish(request, "error", now, message)
                renewable = False
        self._changed = not (renewable and self._renew(iteration))

    def _renew(self, ended: Iteration) -> bool:
        """Launch a decode group again with the next tokens, masters kept. Returns: False when a master lacks slots."""
        group = ended.group
        requests = [self._cluster.requests[segment.request] for segment in ended.segments]
        masters = [group[segment.sampler_member(len(group))] for segment in ended.segments]
        steps = self._step_clock.steps(
            len(group),
            rows_of=Counter(masters),
            free_of={master: self.ledger.free_slots(master) for master in masters},
            remaining=min(request.max_kv_tokens - request.computed for request in requests),
        )
        if steps < 1:
            return False
        rows = [
            Row(request, 1, ((master, request.computed, request.computed + steps),), group.index(master))
            for request, master in zip(requests, masters, strict=True)
        ]
        self.journal.count("renewals")
        self._start(group, rows, steps, "decode")
        return True

    def _on_loss(self, instance: int, message: str, now: float) -> None:
        if instance in self._lost:
            return
        self._lost.add(instance)
        logger.error("%s", message)
        self.journal.note(now, "lost", message, group=(instance,))
        if self._broken is None:
            self._broken = message
            for request in tuple(self._cluster.requests.values()):
                # As if it ran, so that nothing is commanded any more.
                request.iteration = 0
                self._finish(request, "error", now, message)
            self._cluster.clear()
            self._admit_held(now)

    # Planning

    def _plan(self, now: float) -> None:
        cluster = self._cluster
        while cluster.requests:
            plan = self._planner.plan(cluster.view(now))
            if plan is not None:
                self._carry_out(plan, now)
                return
            if cluster.is_running:
                # Asked again when an iteration ends.
                return
            # Not even the fallback can run anything: rather than wait for ever, the first request makes way.
            self._finish(next(iter(cluster.requests.values())), "error", now, "no policy finds a way to run it")
        cluster.drains = {}

    def _carry_out(self, plan: Plan, now: float) -> None:
        if plan.reasons != self._last_reasons:
            self._last_reasons = plan.reasons
            for reason in plan.reasons:
                self.journal.note(now, "policy", reason)
        for name in plan.evictions:
            self._commands.extend(self._cluster.free(name))
            self._cluster.requests[name].evict()
            self.journal.count("evictions")
            self.journal.note(now, "evict", "KV dropped, to be computed again", requests=(name,))
        for instance, name in plan.drains.items():
            if self._cluster.drains.get(instance) != name:
                self.journal.count("drains")
                self.journal.note(now, "drain", f"instance {instance} is kept free", (instance,), (name,))
        self._cluster.drains = dict(plan.drains)
        for launch in plan.launches:
            self._launch(launch, now)

    def _launch(self, launch: Launch, now: float) -> None:
        group = launch.group
        rows = [Row(self._cluster.requests[s.request], s.count, s.save, s.rotation) for s in launch.segments]
        prefills = [row for row in rows if row.request.phase == "prefill"]
        kind: IterationKind = "prefill" if prefills else "decode"
        names = tuple(row.request.request for row in rows)
        before = {instance for name in names for instance in self.ledger.holders(name)}
        self._note_pauses(launch, now)
        num_tokens = sum(row.count for row in rows)
        self.journal.note(now, kind, f"{num_tokens} new tokens", group, names)
        self._start(group, rows, launch.steps, kind)
        joined = sorted({instance for name in names for instance in self.ledger.holders(name)} - before)
        if kind == "decode" and joined:
            self.journal.count("scale_ups")
            text = f"joins the decode group {list(group)} to store new KV; no KV moves"
            self.journal.note(now, "scale_up", text, tuple(joined), names)
        for row in prefills:
            self._note_prefill(row, group, now)

    def _note_prefill(self, row: Row, group: tuple[int, ...], now: float) -> None:
        name = row.request.request
        self.journal.count("prefills")
        self.journal.count("prefill_tokens", row.count)
        holders = self.ledger.holders(name)
        if row.request.computed + row.count == row.request.known_tokens and len(holders) < len(group):
            self.journal.count("scale_downs")
            text = f"the prefill on {list(group)} leaves its KV on {sorted(holders)}"
            self.journal.note(now, "scale_down", text, tuple(sorted(holders)), (name,))

    def _note_pauses(self, launch: Launch, now: float) -> None:
        for name in launch.pauses:
            request = self._cluster.requests[name]
            if not request.paused:
                request.paused = True
                self.journal.count("pauses")
                self.journal.note(now, "pause", "waits with its KV in place", launch.group, (name,))

    def _start(self, group: tuple[int, ...], rows: list[Row], steps: int, kind: IterationKind) -> None:
        self.journal.count("iterations")
        self._commands.append(self._cluster.start(group, rows, steps, kind))

    # Status

    def _status(self, query: int) -> Status:
        requests = self._cluster.requests.values()
        running = sum(request.iteration is not None for request in requests)
        return Status(
            query=query,
            instances=tuple(self._instance_status(instance) for instance in sorted(self._num_slots)),
            waiting=len(self._held) + len(requests) - running,
            running=running,
            counters=dict(self.journal.counters),
            decisions=self.journal.decisions,
        )

    def _instance_status(self, instance: int) -> InstanceStatus:
        num_slots = self._num_slots[instance]
        if instance in self._lost:
            return InstanceStatus(instance, num_slots, 0, "lost")
        if instance not in self._cluster.num_slots:
            return InstanceStatus(instance, num_slots, num_slots, "idle")
        return self._cluster.instance_status(instance)
