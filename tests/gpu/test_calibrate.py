"""`zcompile.calibrate` on GPUs: what is measured there, and that plans take it."""

import os
from unittest import mock

import torch
from torch import nn

import zcompile
from zcompile.calibration import measure_compute, measure_machine
from zcompile.costs.hardware import table_of_name
from zcompile.state.sharded_model import state_of

SMALL = measure_compute.Sizes((512, 1024), (1024,), 4, 256, 256, (1, 4, 512, 64), 1 << 24)


def rank_calibrates(rank, world, folder):
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=folder),
        mock.patch.object(measure_compute, "GPU_SIZES", SMALL),
        mock.patch.object(measure_machine, "GPU_BYTES", (1 << 20, 1 << 22, 1 << 24)),
    ):
        calibration = zcompile.calibrate()
        torch.distributed.barrier()  # the first rank has written it
        table = state_of(zcompile.shard(nn.Linear(4, 4, device="cuda"))).machine.hardware
        return calibration.to_json(), calibration, table, table_of_name(torch.cuda.get_device_name())[0]


def test_ranks_measure_kernels_and_transfers_and_plan_with_what_the_first_one_found(gpus, tmp_path):
    (first, calibration, table, shipped), (second, _, other_table, _) = gpus(2).run(rank_calibrates, str(tmp_path))
    assert first == second and table == other_table != shipped  # kernels this small reach less
    assert {"bfloat16", "float16", "float32"} <= {name for name, _ in calibration.matmul_flops_s}
    assert calibration.driver and "nccl" in {wire.transport for wire in calibration.wires}
    assert all(wire.world == 2 and len(wire.gather) == len(wire.reduce) == 3 for wire in calibration.wires)
