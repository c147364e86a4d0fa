"""`train.py` in plain PyTorch: the same model, data, batch and optimizer, with DistributedDataParallel.

    python examples/train_plain_ddp.py --epochs 10 --batch-size 32
    lockstep run -n 2 examples/train_plain_ddp.py --epochs 10 --batch-size 32
    torchrun --nproc-per-node 2 examples/train_plain_ddp.py --epochs 10 --batch-size 32
    python -m torch.distributed.launch --nproc-per-node 2 examples/train_plain_ddp.py --epochs 10 --batch-size 32

What it lacks, although it is written carefully:
- The result depends on the number of processes: gradients are added in another order, and dropout depends on the rank.
- The batch must be divisible by the number of processes, and so must the number of lanes.
- If it is killed in the middle of an epoch, it repeats that epoch with other dropout masks, so the result differs. It
  does not notice a damaged checkpoint, or a checkpoint of a run with another batch.
- Sampler, wrapper, `no_sync`, means over ranks, barriers and rank 0's tasks are all written by hand, and an omission
  often goes unnoticed: without `set_epoch` every epoch has the same order, without `no_sync` every part is all-reduced.
- It leaves nothing but a checkpoint: no history, no digest, no report of a NaN or of a rank that hangs.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported after init_process_group, it would hold the group until Python exits
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

LANES = 8  # parts of a batch, computed one after another or on up to eight processes
BASE_BATCH, BASE_RATE = 32, 2e-3  # the learning rate was tuned at this batch


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10),
    )  # fmt: skip


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,797 images of 8 × 8 pixels; every fifth is held out for the test."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(pixels[~is_test], labels[~is_test]), TensorDataset(pixels[is_test], labels[is_test])


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


@torch.no_grad()
def accuracy(model: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    """Evaluate each image once: a DistributedSampler would repeat some to give every rank the same number."""
    own = Subset(test_set, range(dist.get_rank(), len(test_set), dist.get_world_size()))
    correct = num_images = 0
    model.eval()
    for pixels, labels in DataLoader(own, batch_size=256):
        correct += (model(pixels.to(device)).argmax(1) == labels.to(device)).sum().item()
        num_images += len(labels)
    model.train()
    correct, num_images = sum_over_ranks([correct, num_images], device)
    return correct / num_images


def save(path: Path, **state: object) -> None:
    """Save on rank 0, under a temporary name first: if it is killed meanwhile, the previous checkpoint remains."""
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        torch.save(state, draft)
        draft.replace(path)
    dist.barrier()  # no rank continues, or ends, before it is saved


def train(epochs: int, global_batch: int, folder: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if global_batch % num_ranks or LANES % num_ranks or global_batch % LANES:
        raise SystemExit(f"a batch of {global_batch} in {LANES} parts cannot be shared by {num_ranks} processes")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    train_set, test_set = load_images()
    sampler = DistributedSampler(train_set, shuffle=True, seed=0, drop_last=True)
    # A batch of the loader is one part; an update uses `num_parts` of them.
    loader = DataLoader(train_set, batch_size=global_batch // LANES, sampler=sampler, drop_last=True)
    num_parts = LANES // num_ranks
    steps_per_epoch = len(loader) // num_parts
    if not steps_per_epoch:
        raise SystemExit(f"a batch of {global_batch} is larger than the {len(train_set)} images to train on")

    torch.manual_seed(0)  # the same weights on all ranks
    model = DistributedDataParallel(make_model().to(device))
    torch.manual_seed(1 + rank)  # but different dropout
    rate = BASE_RATE * (global_batch / BASE_BATCH) ** 0.5  # a larger batch allows a higher rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps_per_epoch))

    first_epoch, checkpoint = 0, Path(folder) / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])  # unwrapped: no prefix in checkpoints
        optimizer.load_state_dict(state["optimizer"])
        warmup.load_state_dict(state["warmup"])
        first_epoch = state["epoch"]

    for epoch in range(first_epoch, epochs):
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        batches = iter(loader)
        for _ in range(steps_per_epoch):
            optimizer.zero_grad()
            total = 0.0
            for part in range(num_parts):
                pixels, labels = (tensor.to(device) for tensor in next(batches))
                # Reduce once, after the last part.
                with nullcontext() if part == num_parts - 1 else model.no_sync():
                    loss = F.cross_entropy(model(pixels), labels) / num_parts
                    loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
        # On every rank, because these contain collectives; only rank 0 prints.
        (loss_sum,), correct = sum_over_ranks([float(total)], device), accuracy(model.module, test_set, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss_sum / num_ranks:.6g}, accuracy {correct:.6g}")
        save(
            checkpoint,
            model=model.module.state_dict(),
            optimizer=optimizer.state_dict(),
            warmup=warmup.state_dict(),
            epoch=epoch + 1,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per update, on each process")
    parser.add_argument("--global-batch", type=int, help="images per update, over all processes; replaces --batch-size")
    parser.add_argument("--run-dir", help="folder of the checkpoint; default: runs/train_plain_ddp-BATCH")
    parser.add_argument("--local-rank", type=int)  # torch.distributed.launch passes it; LOCAL_RANK is used instead
    args = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.set_num_threads(1)  # by default every process would use all cores
    # Without a launcher, make a process group of one, so that the code above needs no special case.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if has_gpu else "gloo", **alone)
    try:
        global_batch = args.global_batch or args.batch_size * dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"effective batch {global_batch}, processes {dist.get_world_size()}")
        train(args.epochs, global_batch, args.run_dir or f"runs/train_plain_ddp-{global_batch}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
