"""The shipped tables, and which of them a device gets.

Those of the H200 and of CPUs were measured (`hardware.py`). The others rest on public data sheets: NVIDIA A100 80GB
(June 2021), NVIDIA H100 (2023), NVIDIA DGX B200 (2024) and NVIDIA L40S (2023). What a sheet promises is taken times
what an H200 reaches of its own: of dense matmuls 0.75, or 0.7 where power is short; of memory 0.75 to 0.8; of NVLink
what was measured. `zcompile calibrate` replaces them by figures of the machine.
"""

import re
from dataclasses import replace

import torch

from zcompile.costs.hardware import CPU, H200, MIB, Hardware, Network, Points, Wire


def _scaled_wires(ratio: float) -> tuple[Wire, ...]:
    """The H200's wires with `ratio` times the bandwidth and the same latency."""

    def points(measured: Points) -> Points:
        latency_s = measured[0][1]
        return tuple((nbytes, latency_s + (seconds - latency_s) / ratio) for nbytes, seconds in measured)

    return tuple(replace(wire, gather=points(wire.gather), reduce=points(wire.reduce)) for wire in H200.wires)


def _pcie_wire(world: int, bytes_s: float, latency_s: float = 25e-6) -> Wire:
    """NCCL through the host's PCIe switches and memory."""
    large = 64 * MIB
    points = ((MIB // 2, latency_s), (large, latency_s + large / bytes_s))
    return Wire("nccl", world, points, points, 0.3)


A100 = Hardware(
    name="A100",  # 80 GB, SXM
    matmul_flops_s=(
        (torch.bfloat16, 250e12),  # of 312
        (torch.float16, 250e12),
        (torch.float32, 17e12),  # of 19.5
        (torch.int8, 430e12),  # of 624
        (torch.float64, 16e12),  # of 19.5
    ),
    attention_flops_s=180e12,
    bytes_s=1.6e12,  # of 2.039
    kernel_s=3e-6,
    wires=_scaled_wires(600 / 900),  # NVLink 3: 600 GB/s in both directions, of the H200's 900
    domain=8,
    network=Network(bytes_s=22e9, latency_s=15e-6),
    memory_bytes=79 << 30,
    source="the data sheet of the A100 80GB SXM, times what an H200 reaches of its own; nothing was measured; between "
    "hosts, 200 Gb/s for each GPU are assumed",
    attention_by_kernel=(("cudnn", 190e12),),
)

H100 = Hardware(
    name="H100",  # SXM
    matmul_flops_s=(
        (torch.bfloat16, 700e12),  # of 989
        (torch.float16, 700e12),
        (torch.float32, 48e12),  # of 67
        (torch.float8_e4m3fn, 1250e12),  # of 1979
        (torch.int8, 800e12),  # of 1979; measured
        (torch.float64, 50e12),  # of 67
    ),
    attention_flops_s=306e12,  # measured
    bytes_s=2.8e12,  # of 3.35; measured, large additions reach 3.04 and casts 1.9
    kernel_s=3e-6,
    wires=H200.wires,  # the same NVLink 4
    domain=8,
    network=H200.network,
    memory_bytes=79 << 30,
    source="the data sheet of the H100 SXM, times what an H200 reaches of its own; attention and memory measured; "
    "transfers as measured on H200, which has the same NVLink; between hosts, 400 Gb/s for each GPU are assumed",
    widest_cudnn_head=256,
    adam_bytes_s=2.6e12,  # measured
)

B200 = Hardware(
    name="B200",
    matmul_flops_s=(
        (torch.bfloat16, 1600e12),  # of 2250
        (torch.float16, 1600e12),
        (torch.float32, 56e12),  # of 75
        (torch.float8_e4m3fn, 3000e12),  # of 4500
        (torch.int8, 3000e12),  # of 4500
        (torch.float64, 28e12),  # of 37
    ),
    attention_flops_s=500e12,  # flash attention 2 does not use Blackwell's own instructions
    bytes_s=6e12,  # of 8
    kernel_s=3e-6,
    wires=_scaled_wires(1800 / 900),  # NVLink 5
    domain=8,
    network=H200.network,
    memory_bytes=178 << 30,
    source="the data sheet of the DGX B200, times what an H200 reaches of its own; nothing was measured; between "
    "hosts, 400 Gb/s for each GPU are assumed",
    attention_by_kernel=(("cudnn", 1200e12),),
    widest_cudnn_head=128,
)

L40S = Hardware(
    name="L40S",
    matmul_flops_s=(
        (torch.bfloat16, 250e12),  # of 362, at 350 W
        (torch.float16, 250e12),
        (torch.float32, 60e12),  # of 91.6
        (torch.float8_e4m3fn, 500e12),  # of 733
        (torch.int8, 500e12),  # of 733
        (torch.float64, 1.2e12),  # of 1.4
    ),
    attention_flops_s=170e12,
    bytes_s=0.68e12,  # of 0.864
    kernel_s=3e-6,
    wires=(_pcie_wire(2, 20e9), _pcie_wire(4, 20e9), _pcie_wire(8, 16e9)),  # PCIe 4: 32 GB/s in each direction
    domain=8,
    network=Network(bytes_s=11e9, latency_s=20e-6),
    memory_bytes=44 << 30,
    source="the data sheet of the L40S, times what an H200 reaches of its own, and NCCL over PCIe 4 estimated; nothing "
    "was measured; between hosts, 100 Gb/s for each GPU are assumed",
    attention_by_kernel=(("cudnn", 190e12),),
)

TABLES = {"h200": H200, "h100": H100, "a100": A100, "b200": B200, "l40s": L40S, "cpu": CPU}

# Of which devices a table is, by torch's names of them; and for which others it stands in, if no table is of them.
NAMES = (
    (r"(?<!G)\bB200\b", r"GB200|B200|B300|B100", B200),
    (r"\bH200\b", r"GH200", H200),
    (r"\bH100\b.*\bHBM3\b", r"H100|H800|H20\b", H100),
    (r"\bA100-SXM.*80GB", r"A100|A800|A30\b", A100),
    (r"\bL40S\b", r"\bL40|\bL4\b|RTX|A10\b|A40\b|A6000", L40S),
)


def table_of_name(name: str) -> tuple[Hardware, bool]:
    """The shipped table for a GPU that torch calls `name`, and whether it is of that GPU or stands in for one."""
    for pattern, _, table in NAMES:
        if re.search(pattern, name):
            return table, True
    stand_in = next((table for _, kin, table in NAMES if re.search(kin, name)), H200)
    return replace(stand_in, source=f"there is no table for {name}: that of the {stand_in.name}"), False


def stand_in_notice(device: torch.device) -> str:
    """What a user should know of the table of `device`: a line, or nothing if the table is of that device."""
    if device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device)
    table, is_of_it = table_of_name(name)
    if is_of_it:
        return ""
    return (
        f"plans for {name} rest on a table of the {table.name}: `zcompile calibrate`, once and on all GPUs of the "
        "machine, measures one of its own"
    )
