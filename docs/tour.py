"""zcompile's idea in a program: ZeRO-3 as graph passes, on two CPU ranks over gloo. It uses nothing of zcompile.

    torchrun --standalone --nproc-per-node 2 docs/tour.py

Read it from top to bottom. Each step names the file in which zcompile has the full version. At the end the program
trains a model with the passes and without them, and checks both against the unsharded model.
"""

import copy
import functools
import weakref

import torch
import torch.distributed as dist
from functorch.compile import aot_module_simplified, make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

# --- 1. A transport. It moves bytes and knows nothing of graphs. (csrc/transport)

memory = {"now": 0, "peak": 0}  # bytes of unsharded parameters
started = {"gathers": 0, "reduces": 0}


def count(buffer: torch.Tensor) -> torch.Tensor:
    """Count a buffer in `memory` until the last view of it is gone."""
    memory["now"] += buffer.nbytes
    memory["peak"] = max(memory["peak"], memory["now"])
    weakref.finalize(buffer.untyped_storage(), lambda nbytes: memory.update(now=memory["now"] - nbytes), buffer.nbytes)
    return buffer


def gather_start(shard: torch.Tensor, shape: list[int]):
    """Start an all-gather of the ranks' pieces. Padding makes them equally long, so one collective fits any shape."""
    started["gathers"] += 1
    buffer = count(shard.new_empty(dist.get_world_size() * shard.numel()))
    work = dist.all_gather(list(buffer.split(shard.numel())), shard.detach(), async_op=True)
    return work, lambda: buffer[: torch.Size(shape).numel()].view(shape)


def reduce_start(grad: torch.Tensor, numel: int):
    """Start to send each rank its slice of the gradient. Sums are in rank order, so all transports agree bitwise."""
    started["reduces"] += 1
    slices = F.pad(grad.flatten(), (0, dist.get_world_size() * numel - grad.numel()))
    received = torch.empty_like(slices)
    work = dist.all_to_all_single(received, slices, async_op=True)
    return work, lambda: received.view(-1, numel).mean(0)


def wait(transfer) -> torch.Tensor:
    work, result = transfer
    work.wait()
    return result()


# --- 2. Two ops, which the compiler sees in its graphs and passes can move. (csrc/ops.cpp)


@torch.library.custom_op("tour::gather", mutates_args=())
def gather(shard: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return count(wait(gather_start(shard, shape)).clone())  # an op may not return a part of a buffer


@torch.library.custom_op("tour::reduce", mutates_args=())
def reduce(grad: torch.Tensor, numel: int) -> torch.Tensor:
    return wait(reduce_start(grad, numel))


gather.register_fake(lambda shard, shape: shard.new_empty(shape))
reduce.register_fake(lambda grad, numel: grad.new_empty(numel))
# The derivative of a gather is a reduce, so autograd puts the communication of backward into the graph.
gather.register_autograd(
    lambda ctx, grad: (reduce(grad, ctx.numel), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "numel", inputs[0].numel()),
)
GATHER, REDUCE = torch.ops.tour.gather.default, torch.ops.tour.reduce.default

# --- 3. Sharding. A module keeps a piece, and reads its parameter through a property. (zcompile/sharding)


def shard(model: nn.Module) -> None:
    """Replace each parameter by this rank's piece, and by a property that gathers, which Dynamo traces."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for module in list(model.modules()):
        properties = {}
        for name, full in list(module.named_parameters(recurse=False)):
            numel = -(-full.numel() // world)  # rounded up
            padded = F.pad(full.detach().flatten(), (0, world * numel - full.numel()))
            delattr(module, name)
            module.register_parameter(f"{name}_shard", nn.Parameter(padded[rank * numel :][:numel].clone()))
            properties[name] = property(functools.partial(read, name=f"{name}_shard", shape=list(full.shape)))
        module.__class__ = type(type(module).__name__, (type(module),), properties)


def read(module: nn.Module, name: str, shape: list[int]) -> torch.Tensor:
    return gather(getattr(module, name), shape)


# --- 4. A pass on the joint graph: forward and backward in one, before they are split. (passes/)


def calls(graph: Graph, op) -> list[Node]:
    return graph.find_nodes(op="call_function", target=op)


def chain(gathered: Node) -> list[Node]:
    """A gather and the views of it: they share memory, so they live and move together."""
    links = [gathered]
    for link in links:
        links += [user for user in link.users if user.target in (torch.ops.aten.t.default, torch.ops.aten.view.default)]
    return links


def joint_pass(graph: Graph) -> None:
    """Gather and reduce a tied parameter once, and save no unsharded parameter for backward."""
    first: dict[Node, Node] = {}
    for gathered in calls(graph, GATHER):  # dedup_gathers: one gather for all reads of a parameter
        same = first.setdefault(gathered.args[0], gathered)
        if same is not gathered:
            gathered.replace_all_uses_with(same)
            graph.erase_node(gathered)
    for add in calls(graph, torch.ops.aten.add.Tensor):  # merge_reduces: reduce(a) + reduce(b) -> reduce(a + b)
        left, right = add.args
        if left.target is REDUCE and right.target is REDUCE:
            with graph.inserting_before(add):
                total = graph.call_function(add.target, (left.args[0], right.args[0]))
                merged = graph.call_function(REDUCE, (total, left.args[1]))
            total.meta["val"], merged.meta["val"] = left.args[0].meta["val"], add.meta["val"]
            add.replace_all_uses_with(merged)
    graph.eliminate_dead_code()
    for gathered in calls(graph, GATHER):  # tag_recompute: the partitioner would save it, which undoes ZeRO-3
        for link in chain(gathered):
            link.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


# --- 5. Passes on forward and on backward. Decisions follow from the graph alone, so all ranks decide alike. (passes/)


def free(graph: Graph, most_between: int = 8) -> None:
    """Gather a parameter directly before its first reader, and again before a reader much later, to hold less memory.

    In zcompile, the passes sink_gathers and regather do this. regather goes by a budget in bytes.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for gathered in calls(graph, GATHER):
        links, copies, last = chain(gathered), {}, None
        readers = {user for link in links for user in link.users} - set(links)
        for reader in sorted(readers, key=position.__getitem__):
            if last is None or position[reader] - last > most_between:
                with graph.inserting_before(reader):
                    copies = {}
                    for link in links:
                        copies[link] = graph.node_copy(link, lambda node, known=copies: known.get(node, node))
            for link in links:
                reader.replace_input_with(link, copies[link])
            last = position[reader]
    graph.eliminate_dead_code()


def prefetch(graph: Graph) -> None:
    """Split each collective into start and wait, and move them apart, so that the wire works while the CPU computes.

    Here a gather starts before the wait of the previous gather. In zcompile, it starts as late as its predicted time
    allows, within a budget of bytes.
    """
    previous = None
    for gathered in calls(graph, GATHER):
        with graph.inserting_before(previous or gathered):
            start = graph.call_function(gather_start, gathered.args)
        gathered.target, gathered.args = wait, (start,)
        previous = gathered
    for reduced in calls(graph, REDUCE):
        with graph.inserting_before(reduced):
            start = graph.call_function(reduce_start, reduced.args)
        reduced.target, reduced.args = wait, (start,)
        if all(user.op == "output" for user in reduced.users):
            graph.output_node().prepend(reduced)


# --- 6. The backend: AOTAutograd traces the joint graph, we plan, and Python runs it. (zcompile/compiler)


def compile_part(module: GraphModule, example_inputs, planned: bool):
    if planned:
        free(module.graph)
        prefetch(module.graph)
    module.graph.lint()
    module.recompile()  # the generated code drops each value after its last reader: that frees a parameter
    return make_boxed_func(module.forward)


def partition(joint: GraphModule, inputs, planned: bool, **options):
    if planned:
        joint_pass(joint.graph)
    return min_cut_rematerialization_partition(joint, inputs, **options)


def backend(module: GraphModule, example_inputs, planned: bool):
    part = functools.partial(compile_part, planned=planned)
    split = functools.partial(partition, planned=planned)
    return aot_module_simplified(module, example_inputs, fw_compiler=part, bw_compiler=part, partition_fn=split)


# --- 7. The proof: the same losses and parameters as the unsharded model, with less memory.


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 31, layers: int = 4):  # of 31 elements of a bias, each rank has 16: padded
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, width), nn.Sequential(*(Layer(width) for _ in range(layers)))

    def forward(self, tokens):
        logits = F.linear(self.layers(F.embedding(tokens, self.embed.weight)), self.embed.weight)  # a tied head
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


def train(planned: bool, steps: int = 4) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    unsharded = copy.deepcopy(model)
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    shard(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, unsharded)]
    compiled = torch.compile(model, backend=functools.partial(backend, planned=planned), fullgraph=True)
    kept = 0
    for _ in range(steps):
        batches = torch.randint(64, (world, 2, 16))
        memory["peak"] = started["gathers"] = started["reduces"] = 0
        loss = compiled(batches[rank])
        kept = memory["now"]  # unsharded from forward to backward
        loss.backward()
        expected = [unsharded(batch) for batch in batches]
        (sum(expected) / world).backward()
        torch.testing.assert_close(loss, expected[rank])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        peak, name = memory["peak"] / model_bytes, "with passes" if planned else "without passes"
        print(
            f"{name}: {started['gathers']} gathers and {started['reduces']} reduces a step; unsharded between forward "
            f"and backward {kept / model_bytes:.0%} of the model, at most {peak:.0%}"
        )
    for name, parameter in unsharded.named_parameters():
        owner, _, attribute = name.rpartition(".")
        torch.testing.assert_close(getattr(model.get_submodule(owner), attribute), parameter)
    if planned:
        assert started["reduces"] == len(optimizers[0].state)  # the number of parameters
        assert kept < model_bytes / 8 and memory["peak"] < model_bytes / 2  # gloo's threads drop buffers a little later


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(planned=False)
    train(planned=True)
    dist.destroy_process_group()
