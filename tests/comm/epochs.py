"""Random histories of real processes over shared memory, in which ranks are killed; run as a script: FIRST LAST seeds.

One process forks the ranks of each history, so that none imports torch anew. In every other history a rank is killed at
a random moment. The others learn of it, end their transports, and form a new world with its successor beside the old
one. Prints a line a history; the last is "end ok".
"""

import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from exchanges import Iteration, barrier, make_history, play, stress

from loongserve.comm.shm import ShmTransport, create_shm_world
from loongserve.comm.transport import PeerLost

DEADLINE_S = 30.0
MAX_DETECTION_S = 2.0
LONGEST_LIFE_S = 0.02


@dataclass
class Rank:
    """A forked process and what it has written."""

    number: int
    pid: int
    pipe: int
    lines: list[str] = field(default_factory=list)
    ended: bool = False


def fork(number: int, worlds: Sequence[int], history: Sequence[Iteration], seed: int, *, stays: bool) -> Rank:
    """Start a rank that plays the history in each world in turn; one that stays does so in the first, and is killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Rank(number, pid, reader)
    try:
        os.close(reader)
        live(number, worlds, history, seed, writer, stays=stays)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def live(
    number: int, worlds: Sequence[int], history: Sequence[Iteration], seed: int, pipe: int, *, stays: bool
) -> None:
    rng = random.Random(f"{seed}:{number}")
    transports = []
    for world in worlds:
        transport = ShmTransport(number, world, timeout_s=DEADLINE_S)
        transports.append(transport)
        os.write(pipe, b"present\n")
        try:
            for iteration in history:
                if rng.random() < 0.3:
                    time.sleep(rng.uniform(0.0, 0.002))
                play(transport, [iteration])
            stress(transport, seed, 60)
            barrier(transport)
        except PeerLost as error:
            os.write(pipe, f"lost {error.rank} {time.monotonic()}\n".encode())
            transport.abort()
        else:
            os.write(pipe, b"ok\n")
        if stays:
            time.sleep(DEADLINE_S)
    for transport in transports:
        transport.close()


def read(ranks: Sequence[Rank], until: float) -> None:
    """Read what ranks have written, as soon as one has, and note who has ended."""
    open_ranks = {rank.pipe: rank for rank in ranks if not rank.ended}
    for pipe in select.select(list(open_ranks), [], [], max(0.0, until - time.monotonic()))[0]:
        rank = open_ranks[pipe]
        data = os.read(pipe, 4096)
        rank.lines += data.decode().splitlines()
        if not data:
            rank.ended = True
            os.close(pipe)
            rank.lines.append(f"status {os.waitpid(rank.pid, 0)[1]}")


def run(seed: int) -> str:
    rng = random.Random(seed)
    size = rng.randint(2, 4)
    history = make_history(seed, size, num_iterations=4, scale=rng.choice((1, 1, 300)))
    victim = rng.randrange(size) if seed % 2 else None
    arena_bytes = rng.choice((1, 1 << 20, 1 << 26))
    worlds = [create_shm_world(size, arena_bytes) for _ in range(1 if victim is None else 2)]
    ranks = [
        fork(number, worlds[:1] if number == victim else worlds, history, seed, stays=number == victim)
        for number in range(size)
    ]
    killed_s = float("inf")
    dead: Rank | None = None
    deadline_s = time.monotonic() + DEADLINE_S
    try:
        if victim is not None:
            dead = ranks[victim]
            while not dead.lines and time.monotonic() < deadline_s:
                read(ranks, deadline_s)
            time.sleep(rng.uniform(0.0, LONGEST_LIFE_S))
            killed_s = time.monotonic()
            os.kill(dead.pid, signal.SIGKILL)
            ranks.append(fork(victim, worlds[1:], history, seed, stays=False))
        while not all(rank.ended for rank in ranks) and time.monotonic() < deadline_s:
            read(ranks, deadline_s)
        return judge(ranks, dead, killed_s)
    finally:
        for rank in ranks:
            if not rank.ended:
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
                os.close(rank.pipe)
        for world in worlds:
            os.close(world)


def judge(ranks: Sequence[Rank], dead: Rank | None, killed_s: float) -> str:
    story = {f"{rank.number}{' (dead)' if rank is dead else ''}": rank.lines for rank in ranks}
    lost = set() if dead is None else {dead.number}
    losses = sorted(
        (float(line.split()[2]), rank.number, int(line.split()[1]))
        for rank in ranks
        for line in rank.lines
        if line.startswith("lost")
    )
    for when_s, number, peer in losses:
        # Whoever gives up is a lost peer to others in turn.
        if peer not in lost or not 0 <= when_s - killed_s < MAX_DETECTION_S:
            raise AssertionError(f"killed at {killed_s}: {story}")
        lost.add(number)
    for rank in ranks:
        if rank is dead:
            continue
        outcomes = [line.split()[0] for line in rank.lines if line != "present"]
        if outcomes[-1:] != ["status"] or rank.lines[-1] != "status 0" or "ok" not in outcomes[-2:]:
            raise AssertionError(f"rank {rank.number} did not get through: {story}")
    return f"{len(losses)} lost a peer" if dead else "nobody died"


def main(first: int, last: int) -> None:
    torch.set_num_threads(1)
    for seed in range(first, last):
        try:
            print(seed, run(seed), flush=True)
        except AssertionError as error:
            error.add_note(f"history of seed {seed}")
            raise
    print("end ok", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
