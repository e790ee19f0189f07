"""Go on with the hosts that are left when one is lost. On each of two hosts, which share a folder:

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 8 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint host0:29500 examples/elastic.py --out /shared/checkpoints

torchrun starts all ranks anew when a host is lost. They load the newest whole checkpoint, of any number of ranks, and
divide the same global batches among themselves. host0 must live on, because it has torchrun's store. The
variable makes hosts tell each other their addresses anew, which torchrun otherwise does once.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import zcompile

SEQUENCES, TOKENS, WIDTH = 48, 32, 64  # of a global batch, which any number of ranks that divides 48 can take


class NextByte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 256))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        targets = (3 * inputs + 1) % 256
        return nn.functional.cross_entropy(self.layers(self.embed(inputs)).flatten(0, 1), targets.flatten())


def global_batch(step: int) -> torch.Tensor:
    return torch.randint(256, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(step))


def newest(out: Path) -> Path | None:
    """The last checkpoint that all ranks have written: its metadata come last."""
    whole = (path.parent for path in out.glob("step-*/.metadata"))
    return max(whole, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints, which all hosts share")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world, gpus = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])

    torch.manual_seed(0)  # the same initial values on all ranks
    mesh = init_device_mesh(device.type, (world // gpus, gpus), mesh_dim_names=("host", "gpu"))
    model = zcompile.shard(NextByte().to(device), mesh, states="global")  # or one dimension: checkpoints are the same
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step, checkpoint = 0, newest(args.out)
    if checkpoint is not None:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        step = step_of(checkpoint)

    while step < args.steps:
        loss = model(global_batch(step).chunk(world)[rank].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}, {world} ranks: loss {mean.item():.7f}", flush=True)
        if step % args.checkpoint_every == 0:
            of_model, of_optimizer = get_state_dict(model, optimizer)
            dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=args.out / f"step-{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
