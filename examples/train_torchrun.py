"""Data-parallel training: every rank takes its share of one global sequence of batches.

    torchrun --nproc-per-node 2 examples/train_torchrun.py data.hs

The loader finds its rank in torch.distributed.  All ranks get equally many batches, so none waits for another at the
end of an epoch, and a checkpoint can go on with another number of ranks.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from draft import draft_for
from torch.nn.parallel import DistributedDataParallel

import hsloader


def main() -> None:
    """Parse the arguments and train for two epochs."""
    parser = argparse.ArgumentParser(description="train a tiny draft model on several ranks")
    parser.add_argument("dataset")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    with hsloader.DataLoader(
        arguments.dataset, trainer="speculators-0.9", max_tokens=512, device=device, log_every=0
    ) as loader:
        model = optimizer = None
        for epoch in range(2):
            for batch in loader:
                if model is None:
                    model = DistributedDataParallel(draft_for(batch))
                    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                mean = total.item() / dist.get_world_size()
                print(f"epoch {epoch}: {len(loader)} batches a rank, loss {mean:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
