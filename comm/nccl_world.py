"""The communicators of one world of ranks, what is under way on them, and the thread that watches over both.

Three things can go wrong that a stream does not tell anyone who waits for it: a peer is gone (its link says so), NCCL
met an error (polled), and a deadline passed. Each fails the world as a whole: every post under way fails with the
cause, the communicators are aborted, so that streams run on and the host can't hang on them, and the other ranks are
told. A peer that goes while nothing with it is under way only fails what is posted with it later.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

import torch

from loongserve.comm.nccl_communicator import UNIQUE_ID_BYTES, Communicator, RemoteFailure, load_nccl, new_unique_id
from loongserve.comm.peer_links import PeerLinks, Store, fetch
from loongserve.comm.streams import StreamDevice
from loongserve.comm.transport import PeerLost, TransportClosed, TransportError, TransportTimeout

# How often the watching thread looks for errors and deadlines; a peer that goes wakes it.
_WATCH_INTERVAL_S = 0.05
# NCCL's error may be here before the news of the peer that caused it.
_CAUSE_GRACE_S = 0.5
# What a peer sent before it closed in good order may still be arriving.
_ARRIVAL_GRACE_S = 0.5
# What closing waits at most for other ranks to close too, and for NCCL to give up.
_CLOSE_GRACE_S = 1.0
_MAX_PAUSE_S = 0.001


@dataclass(eq=False)
class Post:
    """What was put into a stream at once: done when its event is.

    Attributes:
        peers: The ranks that must take part.
        what: Gives words for messages.
        tensors: Kept until the post is done.
    """

    peers: frozenset[int]
    what: Callable[[], str]
    tensors: Sequence[torch.Tensor]
    event: int | None = None
    error: TransportError | None = None
    deadline_s: float | None = None

    def raise_error(self) -> None:
        if self.error is not None:
            # Several waiters may raise it: the traceback is each one's own.
            raise self.error.with_traceback(None)


@dataclass(eq=False)
class _Lane:
    """A communicator with its stream and the posts in it, oldest first."""

    comm: Communicator
    stream: int
    posting: threading.Lock = field(default_factory=threading.Lock)
    posts: deque[Post] = field(default_factory=deque)


class _Phase(Enum):
    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


class NcclWorld:
    """Communicators of the same ranks; each has a stream of its own. Safe to use from several threads.

    Every rank must make it; it returns when all communicators are connected.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        store: For the rendezvous; keys of this world alone.
        device: Of all tensors and streams.
        num_comms: Number of communicators.
        timeout_s: Seconds to wait for the other ranks here, and deadline of waits that name none.
        host: Address under which the other ranks reach this one.

    Raises:
        ValueError: An argument is out of range.
        ImportError: As `load_nccl` raises.
        PeerLost: A rank went away meanwhile.
        TransportTimeout: Some ranks did not come in time.
        TransportError: The ranks could not be connected.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        device: StreamDevice,
        num_comms: int,
        timeout_s: float,
        host: str,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        load_nccl()
        self.rank = rank
        self.device = device
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._phase = _Phase.OPEN
        self._error: TransportError | None = None
        # What the device said when it was asked for an event.
        self._broken: TransportError | None = None
        self._gone: dict[int, PeerLost] = {}
        # Until when what is under way with a rank that is gone may still be done.
        self._grace_s: dict[int, float] = {}
        self._lanes: list[_Lane] = []
        self._events: list[int] = []
        self._free_events: list[int] = []
        # NCCL may still use the tensors of a failed post.
        self._failed: list[Post] = []
        self._aborter: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        deadline_s = time.monotonic() + timeout_s
        self._links = PeerLinks(rank, world_size, store, deadline_s, host)
        try:
            for index in range(num_comms if world_size > 1 else 0):
                self._lanes.append(self._connect(index, world_size, store, deadline_s))
        except BaseException as error:
            self._fail(error if isinstance(error, TransportError) else TransportError(f"could not connect: {error}"))
            self.close()
            raise
        if world_size > 1:
            self._watcher = threading.Thread(target=self._watch, name=f"nccl-watch-{rank}", daemon=True)
            self._watcher.start()

    def submit(
        self,
        index: int,
        start: Callable[[Communicator, int], None],
        peers: Iterable[int],
        tensors: Sequence[torch.Tensor],
        what: Callable[[], str],
        in_compute_stream: bool = False,
    ) -> Post:
        """Put work into the stream of a communicator, after all that is in torch's current stream now.

        Waits for no peer, only until NCCL has launched its kernels.

        Args:
            index: Which communicator.
            start: Begins the work, given the communicator and the stream.
            peers: The ranks that must take part.
            tensors: What the work uses.
            what: Gives words for messages.
            in_compute_stream: Put it into torch's current stream itself, where the device has one.

        Raises:
            TransportClosed: This end was closed or aborted.
            ValueError: `start` refused the tensors.
        """
        lane, device = self._lanes[index], self.device
        post = Post(frozenset(peers), what, tensors)
        with lane.posting:
            with self._lock:
                if self._phase is _Phase.CLOSED:
                    raise TransportClosed(str(self._error))
                post.error = self._error or next((self._gone[peer] for peer in post.peers if peer in self._gone), None)
                if post.error is not None:
                    return post
                event = self._take_event()
            compute, stream = device.compute_stream(), lane.stream
            try:
                if compute is not None and in_compute_stream:
                    stream = compute
                elif compute is not None:
                    device.record(event, compute)
                    device.make_wait(stream, event)
                start(lane.comm, stream)
                self._settle(lane.comm, time.monotonic() + self.timeout_s)
                device.record(event, stream)
            except (TransportError, RuntimeError) as error:
                failure = error if isinstance(error, TransportError) else TransportError(str(error))
                self._fail(self._name_cause(failure))
            with self._lock:
                post.error = self._error
                if post.error is None:
                    post.event = event
                    lane.posts.append(post)
                else:
                    self._failed.append(post)
        self._fail_if_gone()
        return post

    def wait(self, post: Post, timeout_s: float | None) -> None:
        """Let what this thread issues from now on run after the post; block only where threads compute."""
        compute = self.device.compute_stream()
        if compute is None:
            self.synchronize(post, timeout_s)
            return
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._lock:
            post.raise_error()
            if post.event is not None:
                self.device.make_wait(compute, post.event)
                deadline_s = time.monotonic() + limit_s
                post.deadline_s = deadline_s if post.deadline_s is None else min(post.deadline_s, deadline_s)

    def synchronize(self, post: Post, timeout_s: float | None) -> None:
        """Block this thread until the post is done; look after NCCL's errors meanwhile."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s, pauses = time.monotonic() + limit_s, _Pauses()
        while not self.is_done(post):
            if time.monotonic() >= deadline_s:
                raise TransportTimeout(f"rank {self.rank}, {post.what()}: not done after {limit_s:g} s")
            self._look_for_errors()
            pauses.pause()
        post.raise_error()

    def is_done(self, post: Post) -> bool:
        """Say, without waiting, whether the post is done or has failed."""
        with self._lock:
            if post.error is None and post.event is not None:
                self._reap()
            return post.error is not None or post.event is None

    def check_open(self) -> None:
        """Raise `TransportClosed` if this end was closed or aborted."""
        with self._lock:
            if self._phase is _Phase.CLOSED and self._error is not None:
                raise self._error.with_traceback(None)

    def check(self) -> None:
        """Raise what failed the world, if something has, also if nobody has looked yet."""
        if self._phase is _Phase.OPEN:
            self._look_for_errors()
        self._raise_error()

    def abort(self) -> None:
        """Fail all that is under way with `TransportClosed`; wait for nothing."""
        self._end(_Phase.CLOSED, TransportClosed(f"rank {self.rank}: the transport was aborted"), "it aborted")

    def close(self) -> None:
        """End the world and free it. If all is done, what was sent is flushed first, for a second at most."""
        with self._lock:
            self._reap()
            quiet = self._phase is _Phase.OPEN and not any(lane.posts for lane in self._lanes)
            if quiet:
                self._phase = _Phase.CLOSED
                self._error = TransportClosed(f"rank {self.rank}: the transport was closed")
        if quiet:
            self._flush()
            self._links.say_farewell(self.rank, "it closed", finished=True)
        else:
            self._end(_Phase.CLOSED, TransportClosed(f"rank {self.rank}: the transport was closed"), "it closed")
        for thread in (self._watcher, self._aborter):
            if thread is not None and thread is not threading.current_thread():
                thread.join(_CLOSE_GRACE_S)
        self._links.close()
        if self._aborter is not None and self._aborter.is_alive():
            # NCCL may still use the streams, and what they use: they stay.
            return
        with self._lock:
            lanes, self._lanes = self._lanes, []
            events, self._events, self._free_events, self._failed = self._events, [], [], []
        for event in events:
            self.device.destroy_event(event)
        for lane in lanes:
            self.device.destroy_stream(lane.stream)

    def _connect(self, index: int, world_size: int, store: Store, deadline_s: float) -> _Lane:
        key = f"unique-id/{index}"
        if self.rank == 0:
            store.set(key, new_unique_id())
        unique_id = fetch(store, key, deadline_s, "the unique id of rank 0")
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise TransportError(f"the unique id of rank 0 must have {UNIQUE_ID_BYTES} bytes, got {len(unique_id)}")
        comm = Communicator(unique_id, self.rank, world_size, self.device)
        lane = _Lane(comm, self.device.create_stream())
        try:
            self._settle(comm, deadline_s, alone=True)
        except TransportError:
            # So that it is aborted with the others.
            self._lanes.append(lane)
            raise
        return lane

    def _settle(self, comm: Communicator, deadline_s: float, alone: bool = False) -> None:
        """Wait until NCCL is through with the last call; look after peers too where no other thread does yet."""
        pauses = _Pauses()
        while (state := comm.state()) is False:
            if alone:
                for loss in self._links.poll(0).values():
                    raise loss.error
            self._raise_error()
            if time.monotonic() >= deadline_s:
                raise TransportTimeout(f"rank {self.rank}: NCCL is still in progress at the deadline")
            pauses.pause()
        if isinstance(state, TransportError):
            raise state

    def _raise_error(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)

    def _take_event(self) -> int:
        if self._free_events:
            return self._free_events.pop()
        event = self.device.create_event()
        self._events.append(event)
        return event

    def _reap(self) -> None:
        """Take off the posts that are done; the lock is held."""
        for lane in self._lanes:
            finished = 0
            try:
                for post in lane.posts:
                    if post.event is not None and not self.device.is_done(post.event):
                        break
                    finished += 1
            except RuntimeError as error:
                self._broken = TransportError(f"rank {self.rank}: {error}")
                continue
            # A stream also runs on after an error of NCCL, which is there by then: it fails what seems done.
            if finished and isinstance(lane.comm.state(), TransportError):
                continue
            for _ in range(finished):
                post = lane.posts.popleft()
                if post.event is not None:
                    self._free_events.append(post.event)
                post.event, post.tensors = None, ()

    def _watch(self) -> None:
        while self._phase is _Phase.OPEN:
            self._take_losses(_WATCH_INTERVAL_S)
            self._look_for_errors()
            self._look_for_deadlines()

    def _take_losses(self, timeout_s: float) -> None:
        losses = self._links.poll(timeout_s)
        with self._lock:
            for peer, loss in losses.items():
                self._gone.setdefault(peer, loss.error)
                self._grace_s.setdefault(peer, time.monotonic() + (_ARRIVAL_GRACE_S if loss.finished else 0))
        self._fail_if_gone()

    def _fail_if_gone(self) -> None:
        """Fail the world if a post under way needs a rank that is gone, and nothing of it can still arrive."""
        with self._lock:
            if not self._gone or self._phase is not _Phase.OPEN:
                return
            self._reap()
            needed = {peer for lane in self._lanes for post in lane.posts for peer in post.peers}
            now_s = time.monotonic()
            lost = (peer for peer in self._gone if peer in needed and self._grace_s[peer] <= now_s)
            error = next((self._gone[peer] for peer in lost), None)
        if error is not None:
            self._fail(error)

    def _look_for_errors(self) -> None:
        if self._broken is not None:
            self._fail(self._broken)
        for lane in list(self._lanes):
            state = lane.comm.state()
            if isinstance(state, TransportError) and self._phase is _Phase.OPEN:
                self._fail(self._name_cause(state))

    def _look_for_deadlines(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._reap()
            late = [post for lane in self._lanes for post in lane.posts if (post.deadline_s or now_s) < now_s]
        for post in late:
            self._fail(TransportTimeout(f"rank {self.rank}, {post.what()}: not done by its deadline"))

    def _name_cause(self, error: TransportError) -> TransportError:
        """Return the loss of the peer that must be behind NCCL's error, if the news of it is here or comes."""
        deadline_s = time.monotonic() + _CAUSE_GRACE_S
        while isinstance(error, RemoteFailure) and time.monotonic() < deadline_s:
            with self._lock:
                if self._gone:
                    lost = next(iter(self._gone.values()))
                    return PeerLost(lost.rank, f"{lost.detail}; {error}")
                if self._phase is not _Phase.OPEN:
                    break
            self._take_losses(0.005)
        return error

    def _fail(self, error: TransportError) -> None:
        self._end(_Phase.FAILED, error, str(error))

    def _end(self, phase: _Phase, error: TransportError, words: str) -> None:
        """Fail all that is under way, then abort the communicators on a thread of its own, and tell the peers."""
        with self._lock:
            if self._phase is _Phase.CLOSED:
                return
            first = self._phase is _Phase.OPEN
            if first:
                self._reap()
            if first or phase is _Phase.CLOSED:
                self._phase, self._error = phase, error
            if not first:
                return
            for lane in self._lanes:
                for post in lane.posts:
                    post.error, post.event = error, None
                self._failed += lane.posts
                lane.posts.clear()
            self._aborter = threading.Thread(target=self._abort_comms, name=f"nccl-abort-{self.rank}", daemon=True)
        self._links.say_farewell(error.rank if isinstance(error, PeerLost) else self.rank, words)
        self._aborter.start()

    def _abort_comms(self) -> None:
        for lane in list(self._lanes):
            # Nothing is left to be done about one that can't be aborted, but the others still can.
            with suppress(TransportError):
                lane.comm.abort()

    def _flush(self) -> None:
        """Finalize the communicators; abort those that are not through in time."""
        deadline_s = time.monotonic() + _CLOSE_GRACE_S
        for lane in self._lanes:
            with lane.posting, suppress(TransportError):
                lane.comm.finalize()
                pauses = _Pauses()
                while (state := lane.comm.state()) is False and time.monotonic() < deadline_s:
                    pauses.pause()
                if state is True:
                    lane.comm.destroy()
        self._abort_comms()


class _Pauses:
    """Waits between polls: none at first, then longer and longer ones."""

    def __init__(self) -> None:
        self._number = 0

    def pause(self) -> None:
        self._number += 1
        time.sleep(0 if self._number < 20 else min(20e-6 * (self._number - 19), _MAX_PAUSE_S))
