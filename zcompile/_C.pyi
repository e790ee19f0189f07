"""The compiled runtime; see csrc/bindings.cpp."""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

built_for_torch: str  # version of the torch that this was built for
built_with_cuda: bool

class Stats(TypedDict):
    """What a model moved since reset_stats(). Not a name of the compiled module."""

    gathered_bytes: dict[str, int]  # bytes of unsharded tensors, by dtype ("bfloat16")
    reduced_bytes: dict[str, int]
    replica_bytes: int  # of shards of gradients, received from replicas
    gathers: int
    reduces: int
    peak_unsharded_bytes: int  # most bytes of gathered storages alive at once
    own_bytes: int  # of both, what this model alone moved
    transport: str
    transport_bytes: int  # device memory that the transport has for itself

class Model:
    """The sharded parameters of one model and what happened to them; csrc/runtime/model.h."""

    def __init__(
        self,
        *,
        gather: str,
        reduce: str,
        replicate: str,
        rank: int,
        world: int,
        native_reduce: bool = False,
        number: int = 0,
        domain: int = 0,
        divisor: float | None = None,
    ) -> None: ...
    @property
    def world(self) -> int: ...
    def add(
        self,
        *,
        name: str,
        shard: Tensor,
        shape: Sequence[int],
        chunk: int,
        replicated: bool,
        reduce_dtype: torch.dtype | None,
        is_counted: bool = True,  # in statistics
        subclass: str = "",  # the class of a main parameter that has FSDP2's all-gather hooks
        is_component: bool = False,  # of such a parameter: `shard` is empty, and given to each gather
    ) -> int: ...
    def replace(self, index: int, shard: Tensor) -> None: ...
    def watch(self, index: int, main_params: Sequence[Tensor]) -> None: ...
    def guard_data(self, index: int, parameter: Tensor) -> None: ...
    # -1: none. `parameters` are all of them, by index.
    def assigned_data(self, parameters: Sequence[Tensor]) -> int: ...
    def move_to_host(self, index: int, host: Tensor, narrow: Tensor) -> None:
        """Let the main parameter lie in `host`, with the values there; gathers read `narrow`, on the device."""

    def finish_host_step(self, indices: Sequence[int]) -> None: ...  # main parameters and narrow shards were written
    def gathered_in(self, index: int) -> set[torch.dtype]: ...
    def count_gather(self, unsharded: Tensor) -> None: ...
    def gather_components(self, indices: Sequence[int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Start to gather `inputs` in one transfer: this rank's pieces of components, by index."""

    def fill(self, tensors: Sequence[Tensor], gathered: Sequence[Tensor]) -> None:
        """Move the memory of `gathered` into the storages of `tensors`, in place of what they had."""

    def record_gathers(self) -> None: ...
    def stop_recording(self) -> list[tuple[list[int], torch.dtype]]: ...  # parameters that travelled together, dtype
    def forbid_gathers(self, index: int, forbid: bool) -> None: ...
    def use_transport(self, name: str, *, timeout_ms: int | None = None) -> None: ...
    def join(self, other: Model) -> None: ...
    def keep_in_flight(self, on: bool) -> None: ...
    def refresh(self) -> None: ...
    def prepare_for_graphs(self) -> None: ...
    def count_step(self) -> None: ...
    # Number, hash and text of collectives: transport/order_log.h.
    def order(self, log: int = 0) -> list[tuple[int, int, str]]: ...
    def order_digests(self) -> list[tuple[int, int]]: ...  # count and hash, of each log
    def order_failure(self) -> str: ...  # empty unless ranks are known to differ
    def fail_order(self, message: str) -> None: ...
    @staticmethod
    def wake_waits() -> None: ...  # so that Python handles signals (Ctrl-C) where its main thread waits for a message
    def nccl_failure(self) -> str: ...  # why its collectives fail; empty while they work
    def connect_nccl(self) -> None: ...  # all ranks together
    def abort_nccl(self) -> None: ...  # so that no host waits for a device that waits for another rank
    def fused_adam_step(
        self,
        indices: Sequence[int],
        tensors: Sequence[Sequence[Tensor]],  # main parameters, gradients, exp_avg, exp_avg_sq, counts of steps
        *,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
    ) -> bool: ...
    def begin_caching(self, bytes: int) -> None: ...
    def limit_cache(self, bytes: int) -> None: ...
    def end_caching(self) -> None: ...
    def accumulate_onto(self, index: int, gradient: Tensor, *, owner: Tensor | None = None) -> None: ...
    def defer(self, what: str) -> None: ...  # "replicas", "reduces" or "" for nothing
    def take_unreduced(self, index: int) -> Tensor | None: ...
    def count_replicas(self, bytes: int) -> None: ...
    def take_base(self, index: int) -> Tensor | None: ...
    def has_base(self, index: int) -> bool: ...
    def collect_squares(self) -> None: ...
    def squares_of(self, index: int, gradient: Tensor) -> Tensor | None: ...
    def clear_squares(self) -> None: ...
    def stats(self) -> Stats: ...
    def reset_stats(self) -> None: ...

def own_storage(tensor: Tensor) -> Tensor:
    """A contiguous tensor over the same memory, with a storage of its own, by which the runtime finds it."""

def cast(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None: ...
def mean(
    rows: Sequence[Tensor], divisor: float, out: Tensor, *, base: Tensor | None = None, squares: Tensor | None = None
) -> None: ...
def make_squares(numel: int, device: torch.device) -> Tensor: ...

# For tests alone; csrc/bindings.cpp has their signatures.
DescriptorSockets: Any
GradPlacement: Any
ShardLayout: Any
Staleness: Any
adam_schedule: Any
fail_together: Any
group_for_refresh: Any
head_bytes: Any
lay_out_cache: Any
packed_bytes: Any

def wait_for_gathers(gathered: Sequence[Tensor]) -> None: ...
def wait_for_reduces(pending: Sequence[Tensor]) -> None: ...
def free_memory(tensors: Sequence[Tensor]) -> None:
    """Empty the storages of `tensors`, which `Model.fill` filled: views of them stay, and have no data."""

class GraphPool:
    """What captured graphs share; csrc/runtime/captured_graph.h."""

    def __init__(self) -> None: ...

class CapturedGraph:
    """The inputs and results of a captured graph; csrc/runtime/captured_graph.h."""

    class Match:
        yes: CapturedGraph.Match
        other_memory: CapturedGraph.Match
        other_shape: CapturedGraph.Match
        other_staging: CapturedGraph.Match
        model_gone: CapturedGraph.Match

    def __init__(
        self,
        pool: GraphPool,
        models: Sequence[Model],
        inputs: Sequence[Tensor | None],
        in_place: Sequence[bool],
        is_backward: bool,
    ) -> None: ...
    def inputs(self) -> list[Tensor | None]: ...
    def prepare_capture(self, before: HostEffects) -> None: ...
    def start_capture(self) -> None: ...
    def end_capture(self) -> None: ...
    def keep_results(self, results: Sequence[Tensor | None]) -> None: ...
    def set_executable(self, graph: int) -> None: ...
    def abandon_capture(self) -> None: ...
    # With the position of the first input that is elsewhere, or -1.
    def start_replay(self, inputs: Sequence[Tensor | None]) -> tuple[Match, int]: ...
    def results(self) -> list[Tensor | None]: ...

class LastingInputs:
    """Which inputs of a piece of code have the same storage in each call."""

    def __init__(self) -> None: ...
    def note(self, inputs: Sequence[Tensor | None]) -> None: ...
    def forget(self, index: int) -> None: ...
    @property
    def lasting(self) -> list[bool]: ...

class HostEffects:
    """The host's part in a piece of code that ran uncaptured; csrc/transport/host_effects.h."""

    def __init__(self) -> None: ...
    @property
    def obstacle(self) -> str: ...  # why the code cannot be captured; empty if nothing is known against it
    def is_of(self, models: Sequence[Model]) -> bool: ...  # with the transports that they have now

def observe_effects() -> None: ...
def stop_observing(models: Sequence[Model]) -> HostEffects: ...
def may_replay(model: Model) -> bool: ...
def note_nothing() -> None: ...
def note_again() -> None: ...
