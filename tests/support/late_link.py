"""A link to host memory on which all is late that nothing waits for; on a CPU, where copies are else done at once."""

import contextlib
from collections import deque
from unittest import mock

import torch
from torch import nn

import zcompile
from tests.support.models import Chain, mean_square
from zcompile.training.host_link import HostLink, Queue

SECOND = "second"  # the queue of `aside`


class LateLink(HostLink):
    """Queues hold their work back until something waits for it, but for those in `eager`.

    `ignored` waits, (the waiting queue, the other queue or None for the host), are left out."""

    def __init__(self, offload, eager=(), ignored=()):
        self.offload = offload
        self.eager, self.ignored = eager, ignored
        queues = [*Queue, SECOND]
        self.work = {queue: deque() for queue in queues}
        self.given = dict.fromkeys(queues, 0)
        self.done = dict.fromkeys(queues, 0)
        self.compute = Queue.COMPUTE  # SECOND inside of `aside`
        self.hosts = []
        self.may_write = False  # whether the memory of buffers is no longer used by work from before the step
        self.runs = dict.fromkeys(Queue, 0)

    def allocate(self, like):
        self.hosts.append(torch.full_like(like, float("nan")))
        return self.hosts[-1]

    def is_host(self, tensor):
        return any(tensor.data_ptr() == host.data_ptr() for host in self.hosts)

    def run(self, queue, work):
        assert queue is not Queue.TO_DEVICE or self.may_write, "copied to memory that may still be in use"
        self.runs[queue] += 1
        self.give(self.of(queue), work)

    def of(self, queue):
        return self.compute if queue is Queue.COMPUTE else queue

    def mark(self, queue):
        queue = self.of(queue)
        return queue, self.given[queue]

    def is_passed(self, mark):
        return self.done[mark[0]] >= mark[1]

    @contextlib.contextmanager
    def aside(self):
        before, self.compute = self.mark(Queue.COMPUTE), SECOND
        self.wait(Queue.COMPUTE, before)
        yield
        self.compute = Queue.COMPUTE

    def join(self):
        self.wait(Queue.COMPUTE, (SECOND, self.given[SECOND]))

    def wait(self, queue, mark):
        queue = self.of(queue)
        self.may_write |= (queue, mark[0]) == (Queue.TO_DEVICE, Queue.COMPUTE)
        if (queue, mark[0]) not in self.ignored:
            self.give(queue, lambda: self.reach(mark))

    def synchronize(self, mark):
        if (None, mark[0]) not in self.ignored:
            self.reach(mark)

    def release(self, buffer):
        self.may_write = False

    def give(self, queue, work):
        self.work[queue].append(work)
        self.given[queue] += 1
        if queue in self.eager:
            self.reach(self.mark(queue))

    def reach(self, mark):
        """Do the work that the mark is behind."""
        queue, count = mark
        with torch.no_grad():
            while self.done[queue] < count:
                self.done[queue] += 1
                self.work[queue].popleft()()

    def finish_compute(self):
        """What the program's stream has done when the next forward runs on it."""
        self.reach(self.mark(Queue.COMPUTE))


class Full(LateLink):
    """Host memory has room for three moments, until there is more."""

    room = 3

    def allocate(self, like):
        if len(self.hosts) >= self.room:
            raise RuntimeError("CUDA error: out of memory")
        return super().allocate(like)


@contextlib.contextmanager
def small_groups(link=None, elements=512):
    """Groups of so many elements, which cut parameters, over `link`."""
    with contextlib.ExitStack() as stack:
        sizes = {"GRAIN": 128, "GROUP_BYTES": 8 * elements, "SLOTS": 3}
        stack.enter_context(mock.patch.multiple("zcompile.training.streamed_groups", **sizes))
        if link is not None:
            stack.enter_context(mock.patch("zcompile.training.offload.host_link_of", lambda device: link))
        yield


def fused(model, optimizer, link, **how):
    """`optimizer`, with states on `link`, or not offloaded."""
    return zcompile.fuse_optimizer(model, optimizer, **({} if link is None else {"offload": link.offload, **how}))


def step(optimizer, link):
    """A step, and all that comes before it on the program's stream, where the next forward runs."""
    optimizer.step()
    if link is not None:
        link.finish_compute()
    optimizer.zero_grad()


def results_of(model, optimizer):
    """Copies of this rank's parameters, before anything reads the states, and of the states, on one device."""
    values = {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}
    device, states = next(iter(values.values())).device, sorted(optimizer.state_dict()["state"].items())
    named = ((f"{key}.{name}", value) for key, state in states for name, value in state.items())
    return values | {name: getattr(value, "_local_tensor", value).to(device, copy=True) for name, value in named}


def hosted(model, link):
    return {name for name, parameter in model.named_parameters() if link.is_host(parameter.to_local())}


def unfused(seed=0):
    """A model in eager, whose matrices are cut, and its optimizer."""
    torch.manual_seed(seed)
    model = zcompile.shard(Chain(nn.Linear(37, 41), nn.Linear(41, 37)), param_dtype=torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def linear(link, seed=0):
    model, optimizer = unfused(seed)
    return model, fused(model, optimizer, link)


linear_loss = mean_square(3, 37)


def train(model, optimizer, link, rank, steps):
    for i in steps:
        linear_loss(model, i, rank).backward()
        step(optimizer, link)


def linear_steps(rank, link, steps=4):
    model, optimizer = linear(link)
    train(model, optimizer, link, rank, range(steps))
    return results_of(model, optimizer)
