"""PeerLinks: who is let in, and what each rank hears of a loss."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import FileStore

from loongserve.comm.peer_links import Loss, PeerLinks
from loongserve.comm.transport import TransportError, TransportTimeout


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., list[PeerLinks]]]:
    made: dict[int, PeerLinks] = {}

    def make(size: int, meanwhile: Callable[[FileStore], None] | None = None) -> list[PeerLinks]:
        path = str(tmp_path / "store")

        def run(rank: int) -> None:
            made[rank] = PeerLinks(rank, size, FileStore(path), time.monotonic() + 10)

        # The last rank comes when all else is said.
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads[:-1]:
            thread.start()
        if meanwhile is not None:
            meanwhile(FileStore(path))
        threads[-1].start()
        for thread in threads:
            thread.join(20)
        return [made[rank] for rank in range(size)]

    yield make
    for links in made.values():
        links.close()


def hear(links: PeerLinks) -> dict[int, Loss]:
    losses: dict[int, Loss] = {}
    deadline_s = time.monotonic() + 5
    while not losses and time.monotonic() < deadline_s:
        losses = links.poll(0.1)
    return losses


def test_losses_are_told_with_their_cause(connect: Callable[..., list[PeerLinks]]) -> None:
    first, second, third, fourth = connect(4)
    assert first.poll(0) == {}
    # A dead process says nothing.
    fourth.close()
    loss = hear(first)[3]
    assert (loss.error.rank, loss.error.detail, loss.finished) == (3, "its process ended", False)
    first.say_farewell(3, "rank 3 is lost")
    first.say_farewell(0, "said only once")
    losses = hear(third)
    losses.update(third.poll(0.2))
    assert set(losses) == {0, 3}
    assert {each.error.rank for each in losses.values()} == {3}
    assert losses[0].error.detail == "rank 3 is lost (as rank 0 says)"
    third.say_farewell(2, "äöü" * 1000, finished=True)
    losses = hear(second)
    while 2 not in losses:
        losses.update(hear(second))
    assert losses[2].finished
    assert losses[2].error.rank == 2


def test_strangers_are_not_let_in(connect: Callable[..., list[PeerLinks]]) -> None:
    strangers = []

    def intrude(store: FileStore) -> None:
        store.wait(["links/0"])
        host, port, _ = store.get("links/0").split(b" ", 2)
        for words in (b"x" * 20, b"", b"GET / HTTP/1.1\r\n\r\n"):
            strangers.append(socket.create_connection((host.decode(), int(port))))
            strangers[-1].sendall(words)
            strangers[-1].shutdown(socket.SHUT_WR)

    first, second = connect(2, intrude)
    for stranger in strangers:
        stranger.settimeout(5)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()
    assert first.poll(0) == {}
    second.close()
    assert set(hear(first)) == {1}


def test_ranks_that_do_not_come_and_addresses_that_are_none(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"))
    with pytest.raises(TransportTimeout, match="rank 0 is not linked to all of 2 ranks in time"):
        PeerLinks(0, 2, store, time.monotonic() + 0.1)
    with pytest.raises(TransportTimeout, match="the address of rank 0 did not come in time"):
        PeerLinks(1, 2, FileStore(str(tmp_path / "another")), time.monotonic() + 0.1)
    # It came, and went again.
    with pytest.raises(TransportError, match="rank 1 can't be linked"):
        PeerLinks(1, 2, store, time.monotonic() + 5)
    with pytest.raises(TransportError, match=r"can't be linked to the others by 192\.0\.2\.1"):
        PeerLinks(0, 2, store, time.monotonic() + 1, host="192.0.2.1")
