"""Which table of rates and transfer times the ranks of a mesh plan with: that of the first rank, for all of them."""

import logging

from torch.distributed.device_mesh import DeviceMesh

from zcompile.calibration.results import Calibration, Tables, device_name, read_calibration, tables_of
from zcompile.costs.hardware import CPU
from zcompile.costs.hardware_tables import stand_in_notice, table_of_name
from zcompile.ranks.process_groups import all_gather_over_mesh, device_of, shard_group_of

log = logging.getLogger("zcompile")

_told: set[str] = set()


def agreed_tables(mesh: DeviceMesh) -> Tables:
    """The tables of the first rank's device, with what `zcompile calibrate` measured of it; all ranks call together.

    Other ranks may have other devices, or other files in their homes. Plans of one model must not differ.
    """
    device = device_of(mesh)
    calibration, problem = read_calibration(device, shard_group_of(mesh).size())
    text = "" if calibration is None else calibration.to_json()
    notice = "" if calibration is not None else problem or stand_in_notice(device)
    name, text, notice = all_gather_over_mesh(mesh, (device_name(device), text, notice))[0]
    if notice and mesh.get_rank() == mesh.mesh.flatten().tolist()[0] and notice not in _told:
        _told.add(notice)
        log.warning("zcompile: %s", notice)
    shipped = table_of_name(name)[0] if device.type == "cuda" else CPU
    return tables_of(shipped, Calibration.from_json(text)) if text else Tables(shipped, shipped)
