"""Collectives of the user's own model, such as the exchange of tokens between experts: time on the wire.

They start and are waited for where the model has them. Ranks of one group are taken to share the fast links as those of
the sharded model do.
"""

from torch.fx import Node

from zcompile.costs.formulas.work import nbytes_of, sizes_of
from zcompile.costs.hardware import Link
from zcompile.graph.ops import WAIT_TENSOR, named_args

COLLECTIVES = ("nccl", "gloo")  # which transport runs them; peer to peer, the copy engines do not


def is_collective_wait(node: Node) -> bool:
    """Whether `node` waits for a collective of the user's."""
    return node.op == "call_function" and node.target is WAIT_TENSOR


def collective_s(node: Node, link: Link) -> float:
    """Seconds that a collective takes alone on the wire."""
    name = str(node.target.overloadpacket.__name__)  # type: ignore[union-attr]
    given, result = nbytes_of(sizes_of(node.args)), nbytes_of(sizes_of(node.meta.get("val")))
    of_group = _link_of(node, link)
    if name.startswith("all_gather"):
        return of_group.gather_s(result)
    if name.startswith("reduce_scatter"):
        return of_group.reduce_s(given)
    if name.startswith("all_reduce"):  # a reduce-scatter, then an all-gather
        return of_group.reduce_s(given) + of_group.gather_s(given)
    return of_group.gather_s(max(given, result))  # all_to_all, broadcast: each rank receives what others have


def collective_bytes(node: Node) -> int:
    """Bytes of the unsharded tensors that a collective moves."""
    return max(nbytes_of(sizes_of(node.args)), nbytes_of(sizes_of(node.meta.get("val"))))


def _link_of(node: Node, link: Link) -> Link:
    """The link of the collective's group: as many ranks as the op says, else as the model has."""
    hardware = link.hardware
    known = {wire.transport for wire in hardware.wires}
    transport = next((name for name in COLLECTIVES if name in known), link.wire.transport)
    world = named_args(node).get("group_size", link.world)
    return hardware.over(transport, world if isinstance(world, int) else link.world)
