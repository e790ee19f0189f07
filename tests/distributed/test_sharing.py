"""How ranks of one host hand each other memory: over sockets that no other process can take or use."""

import os
import resource
import signal
import socket
import time

import pytest
import torch.distributed as dist

from tests.support.ranks import slow_case
from tests.support.time_limits import scaled
from zcompile import _C

TIMEOUT_MS = int(scaled(20_000))
connect = lambda rank, world: _C.DescriptorSockets.connect_all(dist.group.WORLD.group_name, rank, world, TIMEOUT_MS)


def sends_to_all(sockets, rank, world):
    """Every rank sends a file with its number, and reads those of all others."""
    file = os.memfd_create(f"rank {rank}")
    os.write(file, b"%d" % rank)
    received = sockets.exchange([file])
    os.close(file)
    texts = {peer: os.pread(descriptor, 10, 0) for peer, descriptor in received}
    for _, descriptor in received:
        os.close(descriptor)
    assert texts == {peer: b"%d" % peer for peer in range(world) if peer != rank}


@pytest.mark.parametrize("world", [2, slow_case(4)])
def test_descriptors_reach_all_ranks_and_none_is_left_open(rank, world):
    before = len(os.listdir("/proc/self/fd"))
    sockets = connect(rank, world)
    for _ in range(3):
        sends_to_all(sockets, rank, world)
    del sockets
    assert len(os.listdir("/proc/self/fd")) == before


def test_names_cannot_be_guessed():
    names = [_C.DescriptorSockets(0, 2, 1000).name for _ in range(50)]
    assert len(set(names)) == 50 and all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in names)
    columns = [{name[i] for name in names} for i in range(32)]
    assert all(len(column) > 4 for column in columns)  # no digit is that of a process or a counter


def in_another_process(function):
    child = os.fork()
    if child == 0:
        os._exit(function() or 0)
    return child


def told(sockets, world):
    """(name, process) of every rank."""
    peers = [None] * world
    dist.all_gather_object(peers, (sockets.name, os.getpid()))
    return peers


def connect_first(name):
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(b"\0zcompile-" + name.encode())
    stranger.recv(1)  # until it is turned away
    return 0


def test_another_process_that_connects_gets_nothing(rank, world):
    """A process that knows the name connects before the other rank does."""
    sockets = _C.DescriptorSockets(rank, world, TIMEOUT_MS)
    peers = told(sockets, world)
    child = in_another_process(lambda: connect_first(sockets.name))
    time.sleep(0.5)
    dist.barrier()
    sockets.connect(peers)
    sockets.accept()
    sends_to_all(sockets, rank, world)
    assert os.waitpid(child, 0)[1] == 0


def keep_connecting(name):
    while True:
        connect_first(name)
        time.sleep(0.1)


def test_strangers_who_connect_do_not_extend_the_wait_for_ranks():
    sockets = _C.DescriptorSockets(0, 2, 1_000)
    name = sockets.name
    child = in_another_process(lambda: keep_connecting(name))
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="0 of 1 ranks connected to rank 0 within 1000 ms"):
        sockets.accept()
    assert time.monotonic() - begin < scaled(2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_socket_of_another_process_is_refused(rank, world):
    """A process that is not of the group listens where a rank should."""
    sockets = _C.DescriptorSockets(rank, world, TIMEOUT_MS)
    peers = [(name, process + 1 if peer != rank else process) for peer, (name, process) in enumerate(told(sockets, 2))]
    with pytest.raises(RuntimeError, match=rf"rank {1 - rank} is process \d+, but its socket belongs to process"):
        sockets.connect(peers)
    dist.barrier()  # until then both listen


def imitate_rank(name, tell, user):
    """Listen as a rank does, tell by which name, and connect as `user`."""
    listening = _C.DescriptorSockets(1, 2, 5_000)
    os.write(tell, listening.name.encode())
    if user != os.getuid():
        os.setuid(user)
    return connect_first(name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("user", [0, 65534])
def test_a_process_of_another_user_gets_nothing(user):
    sockets = _C.DescriptorSockets(0, 2, 2_000)
    told, tell = os.pipe()
    own_name = sockets.name
    child = in_another_process(lambda: imitate_rank(own_name, tell, user))
    name = os.read(told, 32).decode()
    sockets.connect([(own_name, os.getpid()), (name, child)])
    if user == os.getuid():
        sockets.accept()
    else:
        with pytest.raises(RuntimeError, match="0 of 1 ranks connected to rank 0 within 2000 ms"):
            sockets.accept()
    del sockets
    os.waitpid(child, 0)
    os.close(told)
    os.close(tell)


def test_a_rank_that_cannot_share_raises_on_all_ranks(rank, world):
    if rank == 1:
        open_now = max(map(int, os.listdir("/proc/self/fd")))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = [os.dup(0) for _ in range(8)]  # fill what lies below the highest
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(open_now, *spare), limits[1]))
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="Too many open files" if rank == 1 else "rank 1 .* Too many open files"):
        connect(rank, world)
    assert time.monotonic() - begin < 0.75e-3 * TIMEOUT_MS  # for which a rank would wait
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in spare:
            os.close(descriptor)
    sends_to_all(connect(rank, world), rank, world)


@pytest.mark.parametrize("late", [False, True])
def test_ranks_do_not_wait_for_one_that_failed(rank, world, late):
    """One rank fails, when others wait for what it sends or (rank 0 is `late`) before they send."""
    sockets = connect(rank, world)
    box = [sockets]
    del sockets

    def attempt():
        connected = box.pop()
        if (rank == 0) == late:
            time.sleep(0.5)
        if rank == 1:
            del connected  # as a failure in C++ does
            raise RuntimeError("out of memory\nand a trace")
        sends_to_all(connected, rank, world)

    begin = time.monotonic()
    expected = "out of memory" if rank == 1 else "a rank ended, or failed, while"
    with pytest.raises(RuntimeError, match=expected):
        _C.fail_together(dist.group.WORLD.group_name, attempt)
    assert time.monotonic() - begin < 0.75e-3 * TIMEOUT_MS  # for which a rank would wait


def test_what_fails_on_one_rank_raises_on_all(rank, world):
    def attempt():
        if rank == 1:
            raise ValueError("broken on purpose")

    expected = (ValueError, "broken on purpose") if rank == 1 else (RuntimeError, "rank 1 .* broken on purpose$")
    with pytest.raises(expected[0], match=expected[1]):
        _C.fail_together(dist.group.WORLD.group_name, attempt)
    _C.fail_together(dist.group.WORLD.group_name, lambda: None)
