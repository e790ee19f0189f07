"""Adam's states in host memory: a step copies them to the GPU and back in groups, and overlaps copies with kernels.

[Note: streamed steps]
Adam's moments lie in pinned host memory, with `offload="states"` main parameters, too (main_parameters.py). Gradients
lie on the GPU. A step divides the parameters into groups with at most `GROUP_BYTES` of states; a large parameter is cut
into pieces. The GPU has `SLOTS` sets of buffers. For each group, the step copies the states into a set of buffers, runs
the optimizer's usual kernel on them, and copies them back, while other groups are copied in and out. Four waits order
this:
  - The first copy into a set of buffers waits for work enqueued before, which may still use the buffers' memory.
  - The kernel of a group waits for the group's copy to the GPU.
  - The group's copy back to the host waits for the kernel.
  - The next copy into a set of buffers waits until the last group in these buffers was copied back.
With "moments", the program's stream does not wait for the last copies, so they overlap with the next forward. With
"states", it does, since any later kernel may read main parameters. Until the copies end, moments in host memory are old
or partly written. So `optimizer.state` is a mapping whose reads first block the host until the copies have ended.

Results are bitwise those of a step without offload, because the kernel is the same and elementwise. Pieces begin at
multiples of `GRAIN` elements, so that a CPU's kernel splits them into the same vectors and remainder.
"""

import contextlib
import functools
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from zcompile import _C
from zcompile.calibration.memory import host_memory_bytes
from zcompile.state.sharded_model import ShardedModel, models_of
from zcompile.state.sharded_parameter import OnHost
from zcompile.training.host_link import Queue, host_link_of
from zcompile.training.local_parts import fits, is_sharded_as, local_of, with_local
from zcompile.training.main_parameters import finish_step, move_to_host, narrow_dtype, on_host, warn_of_device_bytes
from zcompile.training.streamed_groups import Piece, Stream, plan_groups

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN, FIRST_MOMENT = 0, 2  # indices in the arguments of torch's fused kernel; second moments come next
COUNTS = 5  # index of the counts of steps

Tensors = list[list[torch.Tensor]]  # parameters, gradients, both moments, maxima of squares if any, counts of steps
# A function (items, done, tensors) that runs Adam's kernel on `tensors`, pieces of parameters on the device. `items`:
# for each piece, the index of its parameter in the step. `done`: the indices whose last piece is in `tensors`.
Step = Callable[[Sequence[int], Sequence[int], Tensors], None]


class HostStates(defaultdict[torch.Tensor, dict[str, Any]]):
    """The class of `optimizer.state`. A read waits until the latest step has copied its moments to host memory."""

    def __init__(self, offloads: "list[Offload]", states: Any):
        super().__init__(dict, states)
        self.offloads = offloads

    def copy(self) -> Any:
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __reduce__(self) -> Any:
        """Deep-copy and pickle as a plain defaultdict: no step writes to the copied tensors, so reads need not wait."""
        return defaultdict, (dict, dict(self.items()))


def _waiting(name: str) -> Callable[..., Any]:
    """Wrap defaultdict's method `name`: first wait until the key's moments (no key: all) are in host memory."""
    read = getattr(defaultdict, name)

    @functools.wraps(read)
    def method(self: HostStates, *args: Any) -> Any:
        for offload in self.offloads:
            offload.wait(*args[:1])
        return read(self, *args)

    return method


for _name in ("__getitem__", "__iter__", "get", "items", "values", "pop", "popitem", "setdefault"):
    setattr(HostStates, _name, _waiting(_name))


@dataclass
class Loaded:
    """Wraps `source`, a checkpoint's moment, so that torch does not move it. It is copied to `target`, on the host."""

    source: DTensor
    target: DTensor


class Offload:
    """Keeps Adam's states of one model in host memory. `kind`: "moments", or "states": main parameters, too."""

    def __init__(self, kind: str, state: ShardedModel, optimizer: torch.optim.Optimizer):
        self.kind, self.model, self.optimizer = kind, weakref.ref(state), weakref.ref(optimizer)
        _check_dtypes(kind, self.find_parameters(), optimizer)
        found = (sharded for each in models_of(state) for sharded in each.parameters.values())
        self.link = host_link_of(next(found).parameter.device)
        movable = self._movable(self.trained(optimizer))
        move_to_host(movable, map(local_of, self._allocate([*movable])))
        self.running: Stream | None = None  # set during a step, which may begin in backward
        self.streamed: list[Any] = []  # parameters of this step
        self.has_stepped = False
        self.in_backward = False  # whether parameters are stepped in backward; see step_in_backward.py
        self.copied_out: Any = None  # mark (`HostLink.mark`) after the last copy to the host; None if no copy runs
        self.in_flight: set[int] = set()  # ids of parameters whose moments may not be in host memory yet
        self.offloads: list[Offload] = getattr(optimizer.state, "offloads", [])  # one for each model
        self.offloads.append(self)
        optimizer.register_load_state_dict_pre_hook(self._keep_on_host)
        optimizer.register_load_state_dict_post_hook(self._finish_load)
        optimizer.state = HostStates(self.offloads, optimizer.state)

    def find_parameters(self) -> dict[int, str]:
        """Set and return `self.parameters`."""
        state = self.model()
        models = [] if state is None else models_of(state)
        found = (sharded for each in models for sharded in each.parameters.values())
        self.parameters = {id(sharded.parameter): sharded.name for sharded in found}
        return self.parameters

    def has_moments_of(self, parameter: torch.Tensor, moments: list[torch.Tensor]) -> bool:
        """Whether the `moments` of `parameter` lie in host memory."""
        are_on_host = all(self.link.is_host(local_of(moment)) for moment in moments)
        return id(parameter) in self.parameters and fits(parameter) and are_on_host

    def state_bytes(self) -> tuple[int, int]:
        """Return the bytes of this rank's trainable main parameters and moments: (in host memory, on the device)."""
        optimizer, nbytes = self.optimizer(), {True: 0, False: 0}
        assert optimizer is not None, "an optimizer has this"
        for parameter in self.trained(optimizer):
            nbytes[on_host(parameter) is not None] += local_of(parameter).nbytes
            state = optimizer.state.get(parameter) or {}
            for moment in (local_of(state[name]) for name in MOMENTS if name in state):
                nbytes[self.link.is_host(moment)] += moment.nbytes
        return nbytes[True], nbytes[False]

    def trained(self, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        """Return those trainable parameters of the model that `optimizer` holds."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return (each for each in parameters if id(each) in self.parameters and each.requires_grad)

    def wait(self, parameter: Any = None) -> None:
        """Block until the last step has copied the moments of `parameter` (None: of all) to host memory."""
        mark = self.copied_out
        if mark is None or (parameter is not None and id(parameter) not in self.in_flight):
            return
        self.link.synchronize(mark)
        self.copied_out = None
        self.in_flight.clear()

    @contextlib.contextmanager
    def step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context manager around a step of `optimizer`, which calls `stream` (fused_optimizer.py)."""
        self.find_parameters()
        if self.model() is None:
            self._give_back(optimizer)
        grouped = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        stepped = [
            (parameter, group)
            for parameter, group in grouped
            if parameter.grad is not None and id(parameter) in self.parameters and fits(parameter)
        ]
        self._move_to_host(optimizer, stepped)
        if stepped and not self.has_stepped and self.kind == "states":
            warn_of_device_bytes([parameter for parameter, _ in stepped])
        self.has_stepped |= bool(stepped)
        if stepped:  # before torch counts the step: a lack of memory raises here
            self.open([parameter for parameter, _ in stepped])
        try:
            yield
        finally:
            if self.running is not None:
                self.running.close()
            self.running = None
            if self.copied_out is not None and any(on_host(parameter) is not None for parameter in self.streamed):
                self.link.wait(Queue.COMPUTE, self.copied_out)
            finish_step(self.streamed)
            self.streamed = []

    def open(self, parameters: list[Any]) -> None:
        """Allocate the GPU buffers into which a step copies states of `parameters`. The end of `step` frees them."""
        if self.running is not None:
            return
        rows = len(MOMENTS) + any(on_host(parameter) is not None for parameter in parameters)
        locals_ = [local_of(parameter) for parameter in parameters]
        self.running = Stream(self.link, rows, [local.numel() for local in locals_], locals_[0].device)

    def stream(self, parameters: list[Any], tensors: Tensors, step: Step) -> None:
        """Update `parameters` in groups: copy a group's states to the device, call `step`, and copy them back.

        `tensors`: local tensors, in the lists that torch's fused kernel takes. The moments lie in host memory.
        """
        self.in_flight |= {id(parameter) for parameter in parameters}
        self.streamed += parameters
        mains = [on_host(parameter) for parameter in parameters]
        assert self.running is not None, "a step streams"
        for pieces in plan_groups([shard.numel() for shard in tensors[MAIN]], self.running.capacity):
            self._stream_group(self.running, pieces, tensors, mains, step)

    def _stream_group(
        self, stream: Stream, pieces: list[Piece], tensors: Tensors, mains: list[OnHost | None], step: Step
    ) -> None:
        """Copy those states of `pieces` that lie in host memory to the device, step, and copy the states back."""
        group = [[piece.of(values[piece.item]) for piece in pieces] if values else [] for values in tensors]
        group[COUNTS] = [tensors[COUNTS][piece.item] for piece in pieces]
        found = [mains[piece.item] for piece in pieces]
        hosts = [
            [group[FIRST_MOMENT][k], group[FIRST_MOMENT + 1][k], *([piece.of(main.main)] if main else [])]
            for k, (piece, main) in enumerate(zip(pieces, found, strict=True))
        ]
        items, done = [piece.item for piece in pieces], [piece.item for piece in pieces if piece.is_last]

        def compute(buffers: list[list[torch.Tensor]]) -> None:
            casts: list[tuple[torch.Tensor, torch.Tensor]] = []  # (main parameter, narrow shard)
            for k, (piece, main, each) in enumerate(zip(pieces, found, buffers, strict=True)):
                group[FIRST_MOMENT][k], group[FIRST_MOMENT + 1][k] = each[: len(MOMENTS)]
                if main:
                    group[MAIN][k] = each[-1]
                    casts.append((each[-1], piece.of(main.narrow)))
            step(items, done, group)
            _C.cast([main for main, _ in casts], [narrow for _, narrow in casts])

        stream.run(pieces, hosts, compute)
        self.copied_out = stream.copied_out

    @contextlib.contextmanager
    def on_device(self, args: Tensors) -> Iterator[Tensors]:
        """Yield `args` of torch's fused kernel with moments copied to the device. At the end, copy the moments back.

        Used if torch's kernel must get DTensors, not local tensors: a parameter, its gradient and its moments are not
        sharded alike, GradScaler's scale is a DTensor, or `lr` or a beta is a tensor.
        """
        self.wait()
        moved = list(args)
        for i in range(FIRST_MOMENT, FIRST_MOMENT + len(MOMENTS)):
            moved[i] = [
                with_local(moment, torch.empty_like(local_of(moment), device=parameter.device).copy_(local_of(moment)))
                for parameter, moment in zip(args[0], args[i], strict=True)
            ]
        yield moved
        for i in range(FIRST_MOMENT, FIRST_MOMENT + len(MOMENTS)):
            for host, moment in zip(args[i], moved[i], strict=True):
                local_of(host).copy_(local_of(moment))

    def _move_to_host(self, optimizer: torch.optim.Optimizer, stepped: list[tuple[Any, dict[str, Any]]]) -> None:
        """Create missing moments of `stepped` in host memory. Move main parameters and existing moments to the host.

        All host memory is allocated before the first state changes, so that a failed allocation changes no state.
        """
        states = {parameter: optimizer.state.get(parameter) or {} for parameter, _ in stepped}
        missing = [
            (parameter, name)
            for parameter, state in states.items()
            for name in MOMENTS
            if not state or (name in state and self._is_movable(parameter, state[name]))
        ]
        movable = self._movable(parameter for parameter, _ in stepped)
        allocated = self._allocate([*movable, *(parameter for parameter, _ in missing)])
        move_to_host(movable, map(local_of, allocated[: len(movable)]))
        memory = dict(zip(missing, allocated[len(movable) :], strict=True))
        for parameter, group in stepped:
            state = states[parameter]
            if not state:  # make the rest of the state as torch does, on the device
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = torch.zeros_like(parameter)
                optimizer.state[parameter] = state
            for name in MOMENTS:
                host = memory.get((parameter, name))
                if host is None:
                    continue
                local_of(host).copy_(local_of(state[name])) if name in state else local_of(host).zero_()
                state[name] = host

    def _is_movable(self, parameter: DTensor, moment: torch.Tensor) -> bool:
        return is_sharded_as(moment, parameter) and not self.link.is_host(local_of(moment))

    def _movable(self, parameters: Iterable[Any]) -> dict[Any, torch.dtype]:
        """Return {main parameter: dtype of its gathers} for those of `parameters` that must move to the host now."""
        if self.kind != "states":
            return {}
        ours = (parameter for parameter in parameters if id(parameter) in self.parameters and fits(parameter))
        dtypes = {parameter: narrow_dtype(parameter) for parameter in ours}
        return {parameter: dtype for parameter, dtype in dtypes.items() if dtype is not None}

    def _allocate(self, parameters: list[DTensor]) -> list[DTensor]:
        """Allocate host memory for one state of each of `parameters`. Raises RuntimeError if there is too little."""
        locals_ = [local_of(parameter) for parameter in parameters]
        total = sum(local.nbytes for local in locals_)
        has = host_memory_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if total > has:
            raise RuntimeError(self._no_memory(total, f"each rank's share of this machine or container is {_gib(has)}"))
        try:
            memory = [self.link.allocate(local) for local in locals_]
        except (RuntimeError, MemoryError) as error:
            raise RuntimeError(self._no_memory(total, str(error).partition("\n")[0])) from error
        return [with_local(parameter, local) for parameter, local in zip(parameters, memory, strict=True)]

    def _no_memory(self, total: int, reason: str) -> str:
        return (
            f"zcompile.fuse_optimizer(offload={self.kind!r}) asked for {total} bytes ({_gib(total)}) of pinned host "
            f"memory for states of Adam on rank {dist.get_rank()}, and did not get them: {reason}. No state was "
            "changed. Give the container or the machine more memory, raise its limit of locked memory (ulimit -l), "
            "train on more ranks, or leave offload out."
        )

    def _give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Move moments to the device if their parameters' model was freed: torch's own step needs them there."""
        for parameter, state in optimizer.state.items():
            if any(id(parameter) in each.parameters for each in self.offloads):
                continue
            for name in MOMENTS:
                moment = state.get(name)
                if moment is not None and moment.device != parameter.device:
                    state[name] = with_local(moment, local_of(moment).to(parameter.device))

    def _keep_on_host(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Pre-hook of `load_state_dict`: wrap moments in `Loaded`. If not, torch would copy them all to the device."""
        self.wait()
        self.find_parameters()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        if len(parameters) != len(saved):
            return None  # torch raises
        found = []
        for key, parameter in zip(saved, parameters, strict=True):
            if id(parameter) in self.parameters and fits(parameter):
                state = state_dict["state"].get(key, {})
                found += [(key, name, parameter) for name in MOMENTS if is_sharded_as(state.get(name), parameter)]
        has = {(key, name): optimizer.state.get(parameter, {}).get(name) for key, name, parameter in found}
        missing = [each for each in found if (old := has[each[:2]]) is None or self._is_movable(each[2], old)]
        for each, memory in zip(missing, self._allocate([parameter for *_, parameter in missing]), strict=True):
            has[each[:2]] = memory
        states = dict(state_dict["state"])
        for key, name, _ in found:
            states[key] = {**states[key], name: Loaded(state_dict["state"][key][name], has[key, name])}
        return {**state_dict, "state": states}

    def _finish_load(self, optimizer: torch.optim.Optimizer) -> None:
        """After `load_state_dict`: copy `Loaded` moments to host memory, and torch's new `state` to a `HostStates`."""
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Loaded):
                    local_of(value.target).copy_(local_of(value.source))
                    state[name] = value.target
        if not isinstance(optimizer.state, HostStates):
            optimizer.state = HostStates(self.offloads, optimizer.state)


def _check_dtypes(kind: str, names: dict[int, str], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if a trained parameter is not float32, because a step streams only float32 states."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if id(parameter) in names and parameter.requires_grad and parameter.dtype != torch.float32:
            raise ValueError(
                f"zcompile.fuse_optimizer(offload={kind!r}) takes float32 parameters, but '{names[id(parameter)]}' is "
                f"{parameter.dtype} (rank {dist.get_rank()}). Shard the model in float32, with zcompile.shard(model, "
                "param_dtype=torch.bfloat16), or leave offload out."
            )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
