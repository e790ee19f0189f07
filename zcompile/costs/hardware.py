"""Hardware tables: rates of a machine's kernels and times of its transfers, the same on all ranks of a model.

`Hardware.source` says where the figures of a table are from. `zcompile calibrate` measures other machines.
"""

import re
from bisect import bisect
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

Points = tuple[tuple[int, float], ...]  # measured: (bytes that a rank receives, seconds), rising in both


@dataclass(frozen=True)
class Wire:
    """Measured times of a transport's transfers between `world` ranks of one NVLink domain (on CPUs, of one host)."""

    transport: str
    world: int
    # Gathers and reduces of rising size, of one tensor each; on CPUs, of several tensors, because packing takes time.
    gather: Points
    reduce: Points
    # Seconds that compute loses for each second of transfer beside it: transfers take memory bandwidth, power or SMs.
    interference: float


@dataclass(frozen=True)
class Network:
    """The network between NVLink domains."""

    bytes_s: float  # bytes a second that each rank receives
    latency_s: float  # of a message, in seconds


def network_of(gbit_s: float) -> Network:
    """Return the network of hosts that have a NIC of `gbit_s` Gb/s for each GPU. Transfers reach 0.9 of that rate."""
    return Network(bytes_s=0.9 * gbit_s * 1e9 / 8, latency_s=15e-6)


# Bytes of an element in a step of AdamW in fp32: reads weight, gradient and two moments, writes all but the gradient.
ADAM_BYTES = 28

# Rates of attention kernels, divided by flash attention's rate: measured on an H100; "math" is an estimate.
ATTENTION_SHARES = {"flash": 1.0, "cudnn": 1.8, "flex": 1.03, "efficient": 0.48, "math": 0.1}

# A dtype without a matmul rate in a table -> (the dtype whose rate is used instead, the share of that rate).
STAND_INS = {
    torch.float8_e5m2: (torch.float8_e4m3fn, 1.0),
    torch.float8_e4m3fn: (torch.bfloat16, 1.0),  # a GPU without fp8 matmuls computes in bf16
    torch.uint8: (torch.int8, 1.0),
    torch.int8: (torch.bfloat16, 1.0),
    torch.float16: (torch.bfloat16, 1.0),
    torch.bfloat16: (torch.float32, 1.0),
    torch.float64: (torch.float32, 0.5),
    torch.complex64: (torch.float32, 0.25),
    torch.complex128: (torch.float64, 0.25),
}


@dataclass(frozen=True)
class Hardware:
    """One machine. Rates are those that kernels reach, not those of a data sheet."""

    name: str
    # (dtype, operations a second that large matmuls reach), for each dtype that was measured.
    matmul_flops_s: tuple[tuple[torch.dtype, float], ...]
    # Operations a second that flash attention reaches: forward and backward together, heads 128 wide, no mask.
    # `formulas/attention.py` has the shares of this rate that other calls reach.
    attention_flops_s: float
    bytes_s: float  # bytes of memory a second that a pointwise kernel reads and writes
    kernel_s: float  # the least time of a kernel, in seconds
    wires: tuple[Wire, ...]  # `over` takes the transport's wire with the most ranks, but no more than the link has
    domain: int  # the number of ranks that NVLink connects; on CPUs, those of one host
    network: Network  # between domains
    memory_bytes: int  # of one device
    source: str  # the origin of the rates, which `explain` prints
    # (kernel, operations a second) of attention kernels other than flash. A kernel without an entry has a share of
    # `attention_flops_s`, from ATTENTION_SHARES.
    attention_by_kernel: tuple[tuple[str, float], ...] = ()
    grouped_share: float = 0.8  # rate of grouped matmuls, padding counted as work, divided by that of plain ones
    # Whether attention calls reach the share `Work.share` of `attention_rate`, as on GPUs; if not, `Work.cpu_share`.
    attention_varies: bool = True
    # The widest head, in elements of 2 bytes, for which torch prefers cuDNN's attention. 0: it prefers flash attention.
    widest_cudnn_head: int = 0
    adam_bytes_s: float | None = None  # bytes a second that fused AdamW reads and writes. None: `bytes_s`

    def matmul_rate(self, dtype: torch.dtype) -> float:
        """Return the operations a second that matmuls of `dtype`, or of its stand-in (STAND_INS), reach."""
        rates = dict(self.matmul_flops_s)
        while dtype not in rates:
            if dtype not in STAND_INS:
                return self.bytes_s / dtype.itemsize  # integers on no tensor core: memory bounds the rate
            dtype, share = STAND_INS[dtype]
            rates = {known: rate * share for known, rate in rates.items()}
        return rates[dtype]

    def adam_rate(self) -> float:
        return self.adam_bytes_s or self.bytes_s

    def attention_rate(self, kernel: str) -> float:
        """Return the operations a second that `kernel`, one of ATTENTION_SHARES, reaches."""
        return dict(self.attention_by_kernel).get(kernel, self.attention_flops_s * ATTENTION_SHARES[kernel])

    def over(self, transport: str, world: int) -> "Link":
        """Return the link of `world` ranks over `transport`, or over the table's first one if it lacks `transport`."""
        known = [wire for wire in self.wires if wire.transport == transport]
        wires = known or [wire for wire in self.wires if wire.transport == self.wires[0].transport]
        fitting = [wire for wire in wires if wire.world <= min(world, self.domain)]
        return Link(self, max(fitting, key=lambda wire: wire.world) if fitting else wires[0], world)


class NarrowGathers(NamedTuple):
    """Gathers of parameters in int8 or float8."""

    dtypes: str  # of the gathered bytes, in words
    share: float  # gathered bytes divided by the bytes of the unsharded parameter
    dequantizes: bool  # whether a kernel converts the gathered bytes to the unsharded parameter


@dataclass(frozen=True)
class Hosts:
    """A mesh (host, gpu): parameters are gathered inside of a host, and gradients are summed over hosts in fp32."""

    count: int
    shards_states: bool  # `states="global"`: main parameters, gradients and moments are sharded over hosts; else HSDP
    sums_once: bool  # gradients are summed over hosts after the last microbatch alone: `accumulate(reduce="shards")`
    itemsize: int  # bytes of an element as it is gathered, and as its gradient is reduced

    def gathered_bytes(self, elements: int) -> int:
        """Return the bytes that a rank receives from other hosts in a step, for its host shard of `elements`."""
        return self.itemsize * elements * (self.count - 1) // self.count if self.shards_states else 0

    def summed_bytes(self, elements: int) -> int:
        """Return the bytes that a rank receives to sum its shard's gradient over hosts; HSDP also gathers the sums."""
        return (4 if self.shards_states else 8) * elements * (self.count - 1) // self.count


@dataclass(frozen=True)
class Link:
    """A machine, and the measured transport (`wire`) between the ranks of a model."""

    hardware: Hardware
    wire: Wire
    world: int  # the number of ranks, each of which holds one shard; with `hosts`, the ranks of one host
    narrow: NarrowGathers | None = None
    hosts: Hosts | None = None

    @property
    def state_ranks(self) -> int:
        """The number of ranks over which main parameters, gradients and moments are sharded."""
        return self.world * (self.hosts.count if self.hosts is not None and self.hosts.shards_states else 1)

    @property
    def sums_in_reduces(self) -> bool:
        """Whether sums of gradients over hosts overlap with backward: only with p2p. `C10dReduce` sums in its wait."""
        return self.hosts is not None and not self.hosts.sums_once and self.wire.transport == "p2p"

    def sum_over_hosts_s(self, nbytes: int) -> float:
        """Return the seconds to sum a gradient of `nbytes`, unsharded, over hosts, after its sum inside of a host."""
        assert self.hosts is not None
        return self.network_s(self.hosts.summed_bytes(nbytes // (self.hosts.itemsize * self.world)), self.hosts.count)

    def network_s(self, received_bytes: int, domains: int) -> float:
        """Return the seconds in which a rank receives `received_bytes` from the others of `domains` NVLink domains."""
        network = self.hardware.network
        return received_bytes / network.bytes_s + network.latency_s * (domains - 1).bit_length()

    def gathered_bytes(self, nbytes: int) -> int:
        """Return the bytes that a gather of an unsharded tensor of `nbytes` transfers: fewer with `narrow`."""
        return nbytes if self.narrow is None else round(nbytes * self.narrow.share)

    def gather_s(self, nbytes: int) -> float:
        """Return the seconds to gather an unsharded tensor of `nbytes`."""
        return self._seconds(self.wire.gather, self.gathered_bytes(nbytes))

    def dequantize_s(self, nbytes: int) -> float:
        """Return the seconds of the kernel that converts gathered bytes to an unsharded tensor of `nbytes`."""
        if self.narrow is None or not self.narrow.dequantizes:
            return 0.0
        return self.hardware.kernel_s + (nbytes + self.gathered_bytes(nbytes)) / self.hardware.bytes_s

    def reduce_s(self, nbytes: int) -> float:
        """Return the seconds to reduce-scatter unsharded gradients of `nbytes`."""
        return self._seconds(self.wire.reduce, nbytes)

    def outside_bytes(self, nbytes: int) -> int:
        """Return the bytes of a tensor of `nbytes` that each rank of an NVLink domain receives from other domains.

        Ranks of the domain receive different parts, and exchange these inside of the domain.
        """
        inside, domains = min(self.world, self.hardware.domain), -(-self.world // self.hardware.domain)
        return nbytes * (domains - 1) // (inside * domains)

    def _seconds(self, points: Points, nbytes: int) -> float:
        if self.world == 1:
            return 0.0
        inside = min(self.world, self.hardware.domain)
        seconds = _interpolate(points, nbytes * (inside - 1) // inside)
        domains = -(-self.world // self.hardware.domain)
        if domains > 1:  # transfers between domains and inside of them overlap
            latency_s = self.network_s(0, domains)
            seconds = max(seconds + latency_s, self.network_s(self.outside_bytes(nbytes), domains))
        return seconds


def _interpolate(points: Points, nbytes: int) -> float:
    """Return the seconds of a transfer of `nbytes`: linear between `points`, constant below, the last slope above."""
    if nbytes <= points[0][0]:
        return points[0][1]
    i = min(bisect(points, (nbytes,)), len(points) - 1)
    (bytes_below, s_below), (bytes_above, s_above) = points[i - 1], points[i]
    return s_below + (nbytes - bytes_below) * (s_above - s_below) / (bytes_above - bytes_below)


MIB = 1 << 20

H200 = Hardware(
    name="H200",
    matmul_flops_s=(
        (torch.bfloat16, 740e12),
        (torch.float16, 740e12),
        (torch.float32, 50e12),
        (torch.float8_e4m3fn, 1300e12),
        (torch.int8, 800e12),
        (torch.float64, 55e12),
    ),
    attention_flops_s=306e12,
    bytes_s=3.5e12,
    kernel_s=3e-6,
    wires=(
        Wire("p2p", 2, ((MIB // 2, 20e-6), (32 * MIB, 108e-6)), ((MIB // 2, 20e-6), (32 * MIB, 97e-6)), 0.23),
        Wire("p2p", 4, ((MIB, 20e-6), (48 * MIB, 174e-6)), ((MIB, 20e-6), (48 * MIB, 173e-6)), 0.14),
        Wire("p2p", 8, ((MIB, 20e-6), (56 * MIB, 209e-6)), ((MIB, 20e-6), (56 * MIB, 215e-6)), 0.14),
        Wire("nccl", 2, ((MIB // 2, 12e-6), (32 * MIB, 174e-6)), ((MIB // 2, 20e-6), (32 * MIB, 183e-6)), 0.45),
        Wire("nccl", 4, ((MIB, 12e-6), (48 * MIB, 197e-6)), ((MIB, 20e-6), (48 * MIB, 223e-6)), 0.40),
        Wire("nccl", 8, ((MIB, 12e-6), (56 * MIB, 206e-6)), ((MIB, 20e-6), (56 * MIB, 253e-6)), 0.30),
    ),
    domain=8,
    network=network_of(400),
    memory_bytes=140 << 30,
    source="transfers alone and beside matrix products on 2, 4 and 8 H200 and the parts of a step on 2 "
    "(docs/lab/measurements.md); attention and int8 as measured on an H100, which has the same SMs; launches, fp8 and "
    "fp64 estimated; between hosts, 400 Gb/s for each GPU are assumed",
    widest_cudnn_head=256,
    adam_bytes_s=3.5e12,
)

H100 = replace(
    H200,  # which has the same NVLink 4, and the attention rate of an H100
    name="H100",  # SXM
    matmul_flops_s=(
        (torch.bfloat16, 700e12),  # of 989 in the data sheet
        (torch.float16, 700e12),
        (torch.float32, 48e12),  # of 67
        (torch.float8_e4m3fn, 1250e12),  # of 1979
        (torch.int8, 800e12),  # of 1979; measured
        (torch.float64, 50e12),  # of 67
    ),
    bytes_s=2.8e12,  # of 3.35e12; as measured, large additions reach 3.04e12 and casts 1.9e12
    memory_bytes=79 << 30,
    source="0.63 to 0.75 of the data sheet of the H100 SXM, as on an H200; attention, int8 and memory measured; "
    "transfers as measured on H200, which has the same NVLink; between hosts, 400 Gb/s for each GPU are assumed",
    adam_bytes_s=2.6e12,  # measured
)

KIB = 1 << 10

CPU = Hardware(
    name="CPU",
    matmul_flops_s=((torch.float32, 105e9), (torch.bfloat16, 470e9)),
    attention_flops_s=30e9,
    bytes_s=20e9,
    kernel_s=3e-6,
    wires=(
        Wire(
            "gloo",
            2,
            ((32 * KIB, 0.4e-3), (512 * KIB, 1.1e-3), (8 * MIB, 15e-3)),
            ((32 * KIB, 0.35e-3), (512 * KIB, 0.7e-3), (8 * MIB, 9.5e-3)),
            0.5,
        ),
    ),
    domain=64,
    network=Network(bytes_s=1e9, latency_s=100e-6),
    memory_bytes=8 << 30,
    attention_varies=False,
    source="one thread of a server with AMX, and gloo between two ranks on one host; other CPUs differ by factors; "
    "between hosts, 8 Gb/s are assumed",
)

TABLES = {"h200": H200, "h100": H100, "cpu": CPU}


def table_of_name(name: str) -> tuple[Hardware, bool]:
    """Return the table for a GPU that torch calls `name`, and whether it is this GPU's own, not a stand-in."""
    for pattern, table in ((r"\bH200\b", H200), (r"\bH100\b.*\bHBM3\b", H100)):
        if re.search(pattern, name):
            return table, True
    stand_in = H100 if re.search(r"H100|H800|H20\b", name) else H200
    return replace(stand_in, source=f"the table of the {stand_in.name}, as there is none for {name}"), False


def stand_in_notice(device: torch.device) -> str:
    """Return a line for the user if another GPU's table stands in for that of `device`; else ''."""
    if device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device)
    table, is_of_it = table_of_name(name)
    if is_of_it:
        return ""
    return (
        f"plans for {name} rest on a table of the {table.name}: to measure this GPU's own rates, run `zcompile "
        "calibrate` once, on all GPUs of the machine"
    )
