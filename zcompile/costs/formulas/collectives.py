"""Transfer times, over fast links such as NVLink, of collectives that the user's model calls itself."""

from torch.fx import Node

from zcompile.costs.formulas.work import nbytes_of, sizes_of
from zcompile.costs.hardware import Link
from zcompile.graph.ops import WAIT_TENSOR, named_args

COLLECTIVES = ("nccl", "gloo")  # transports that run the model's collectives; "p2p" runs none


def is_collective_wait(node: Node) -> bool:
    return node.op == "call_function" and node.target is WAIT_TENSOR


def collective_s(node: Node, link: Link) -> float:
    """Return the seconds that a collective takes if no other transfer runs."""
    name = str(node.target.overloadpacket.__name__)  # type: ignore[union-attr]
    given, result = nbytes_of(sizes_of(node.args)), nbytes_of(sizes_of(node.meta.get("val")))
    of_group = _link_of(node, link)
    if name.startswith("all_gather"):
        return of_group.gather_s(result)
    if name.startswith("reduce_scatter"):
        return of_group.reduce_s(given)
    if name.startswith("all_reduce"):  # a reduce-scatter, then an all-gather
        return of_group.reduce_s(given) + of_group.gather_s(given)
    return of_group.gather_s(max(given, result))  # all_to_all, broadcast


def collective_bytes(node: Node) -> int:
    """Return the size of the unsharded tensors that a collective moves, in bytes."""
    return max(nbytes_of(sizes_of(node.args)), nbytes_of(sizes_of(node.meta.get("val"))))


def _link_of(node: Node, link: Link) -> Link:
    """Return the link of a collective's process group, of `group_size` ranks if the op has this argument."""
    hardware = link.hardware
    known = {wire.transport for wire in hardware.wires}
    transport = next((name for name in COLLECTIVES if name in known), link.wire.transport)
    world = named_args(node).get("group_size", link.world)
    return hardware.over(transport, world if isinstance(world, int) else link.world)
