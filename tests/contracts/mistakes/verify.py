"""Mistakes in scripts with their own loop, which `lockstep verify` finds, and in its command line."""

from textwrap import indent

from tests.contracts.mistakes.mistake import Mistake

DIFFERENT, FAILED = 6, 3

# Right as it is: it shares its batch of 16 rows, and differs by rounding alone.
SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= {divisor}


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
{seed}
model = {model}
wrapped = {wrapped}
stream = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn({samples}, 8, generator=stream), torch.randint(0, 3, ({samples},), generator=stream))
sampler = {sampler}
loader = DataLoader(data, {batch}, sampler=sampler)
optimizer = {optimizer}
for epoch in range({epochs}):
    for step, (inputs, labels) in enumerate(loader):
{inputs}
        loss = {loss}
        optimizer.zero_grad()
        loss.backward()
{gradients}
        optimizer.step()
{after}
"""

_PARTS = {
    "seed": "torch.manual_seed(0)",
    "model": "nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))",
    "wrapped": "DistributedDataParallel(model)",
    "samples": "64",
    "sampler": "DistributedSampler(data, shuffle=False)",
    "batch": "16 // size",
    "optimizer": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "epochs": "2",
    "inputs": "pass",
    "loss": "F.cross_entropy(wrapped(inputs), labels)",
    "gradients": "pass",
    "divisor": "size",
    "after": "pass",
}
_DEPTHS = {"inputs": 2, "gradients": 2, "after": 2}

# The words of each sample, padded with zeros.
PADDED_BATCHES = """
inputs = [torch.arange(1, 8 + sample) for sample in range(16 // size * rank, 16 // size * (rank + 1))]
labels = torch.tensor([len(words) % 3 for words in inputs])
inputs = nn.utils.rnn.pad_sequence(inputs, batch_first=True)
"""
BAG_OF_WORDS = "nn.Sequential(nn.EmbeddingBag(30, 8{}), nn.ReLU(), nn.Linear(8, 3))"

# Draws random numbers without a layer that shows it.
NOISY_LINEAR = """
class NoisyLinear(nn.Linear):
    def forward(self, inputs):
        return F.dropout(super().forward(inputs), 0.5, self.training)
"""
POSITIONS_FIRST = """
from torch.utils.checkpoint import checkpoint

class PositionsFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions, self.words, self.head = nn.Embedding(8, 8), nn.Embedding(30, 8), nn.Linear(8, 3)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, words):
        embedded = self.positions(torch.arange(8)) + self.words(words)
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        return self.head(checkpoint(self.block, embedded, mask, use_reentrant=False).mean(1))
"""
TIME_FIRST = """
class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(self.lstm(inputs)[0][-1])
"""

# A step of sharpness-aware minimization.
SHARPNESS = """
with torch.no_grad():
    moves = [10 * parameter.grad for parameter in model.parameters()]
    for parameter, move in zip(model.parameters(), moves):
        parameter += move
optimizer.zero_grad()
F.cross_entropy(wrapped(inputs), labels).backward()
with torch.no_grad():
    for parameter, move in zip(model.parameters(), moves):
        parameter -= move
"""

SCALE_BY_SIZE = """
with torch.no_grad():
    for parameter in model.parameters():
        parameter *= 1 + 1e-3 * (size - 1)
"""


def plain_script(**parts: str) -> str:
    """Return a script that never imports lockstep, and is right but for these parts of it."""
    assert parts.keys() <= _PARTS.keys(), parts.keys() - _PARTS.keys()
    given = {name: parts.get(name, default).strip("\n") for name, default in _PARTS.items()}
    return SCRIPT.format(**{name: indent(text, "    " * _DEPTHS.get(name, 0)) for name, text in given.items()})


def wrong(
    name: str, says: str, *, code: int = DIFFERENT, steps: int = 2, is_slow: bool = True, **parts: str
) -> Mistake:
    """Return a row: `lockstep verify` of a script with these parts."""
    command = f"lockstep verify --steps {steps} train.py"
    return Mistake(f"verify: {name}", says, plain_script(**parts), command, code, is_slow=is_slow)


MISTAKES = [
    wrong(
        "the batch size is per process",
        r"In step 1, one process was given 8 rows and 2 processes 16 in total\. Compare equal global batches",
        batch="8",
    ),
    wrong(
        "no sampler",
        r"Each of the 2 processes was given the same 16 rows .* Give the DataLoader a DistributedSampler\.",
        sampler="None",
        batch="16",
        is_slow=False,
    ),
    wrong(
        "no set_epoch",
        r"^step 5 begins an epoch with the same samples .*: call sampler\.set_epoch\(epoch\) at the start of every",
        code=0,
        steps=6,
        sampler="DistributedSampler(data)",
        is_slow=False,
    ),
    wrong(
        "no set_epoch of a sampler made for each epoch, and random augmentation",
        r"^step 5 begins an epoch with the same samples .*: call sampler\.set_epoch\(epoch\) at the start of every",
        code=0,
        steps=6,
        sampler="DistributedSampler(data)",
        inputs="inputs = inputs + epoch",
        after="loader = DataLoader(data, 16 // size, sampler=DistributedSampler(data))",
    ),
    wrong(
        "a seed for each rank, and no DDP",
        r"From the start, rank 1 of 2 had different weights than rank 0 \(0\.weight\).*DistributedDataParallel",
        seed="torch.manual_seed(rank)",
        wrapped="model",
        gradients="average_gradients(model)",
    ),
    wrong(
        "no DDP",
        r"In step 1, rank 1 of 2 used a different gradient than rank 0 \(0\.weight\): it was not averaged",
        wrapped="model",
    ),
    wrong(
        "no seed",
        r"Call torch\.manual_seed\(…\) with a constant on every rank .* Two runs on one process differ as well\.",
        seed="torch.seed()",
    ),
    wrong(
        "dropout by rank",
        r"It has Dropout: every process draws its dropout masks from its own random stream\.",
        model="nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))",
    ),
    wrong(
        "functional dropout by rank",
        r"The model draws random numbers \(by torch\.nn\.functional\.dropout .*\): every process draws them from",
        seed=f"torch.manual_seed(0)\n{NOISY_LINEAR}",
        model="nn.Sequential(NoisyLinear(8, 8), nn.ReLU(), nn.Linear(8, 3))",
    ),
    wrong(
        "local batch norm",
        r"The model has BatchNorm1d, .*convert_sync_batchnorm\(model\) makes it see the whole batch\.",
        model="nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))",
    ),
    wrong(
        "a mean of means over unequal parts",
        r"The ranks were given 12 and 4 rows, and a mean over the ranks of each rank's mean loss is not the mean",
        sampler="None",
        batch="16",
        inputs="if size == 2: inputs, labels = (inputs[:12], labels[:12]) if rank == 0 else (inputs[12:], labels[12:])",
    ),
    wrong(
        "a last batch with repeated samples",
        r"In step 2, one process was given 5 rows and 2 processes 6 in total: a DistributedSampler repeats samples",
        samples="21",
    ),
    wrong(
        "a last batch that only one process keeps",
        r"In step 2, one process was given 4 rows and 2 processes 16 in total; before that, equally many: .*drop_last",
        samples="20",
        sampler="DistributedSampler(data, shuffle=False)\nfrom functools import partial\n"
        "DataLoader = partial(DataLoader, drop_last=size > 1)",
    ),
    wrong(
        "the learning rate grows with the processes",
        r"The learning rate depends on the number of processes\.",
        optimizer="torch.optim.SGD(model.parameters(), lr=0.1 * size)",
    ),
    wrong(
        "the weight decay grows with the processes",
        r"The weight decay depends on the number of processes\.",
        optimizer="torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01 * size)",
    ),
    wrong(
        "an optimizer's own step grows with the processes",
        r"The same gradient and learning rate changed the weights differently: the optimizer has different settings",
        optimizer="torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=size)",
    ),
    wrong(
        "gradients are summed instead of averaged",
        r"2 processes has the same direction .* but 2 times its length: .*summed over the ranks instead of averaged",
        wrapped="model",
        gradients="average_gradients(model)",
        divisor="1",
    ),
    wrong(
        "a mean over as many labels as a rank has",
        r"The loss may be a mean of means over parts of unequal size \(of rows, tokens or pixels\)",
        loss="F.cross_entropy(wrapped(inputs), labels, ignore_index=0)",
    ),
    wrong(
        "labels of other rows",
        r"The same rows gave a different gradient, by far more than rounding\. .*the labels may not belong to the rows",
        inputs="labels = labels.roll(size - 1)",
    ),
    wrong(
        "the weights are changed by the number of processes",
        r"Between step 1 and step 2, something other than the optimizer changed the weights, and not in the same way",
        after=SCALE_BY_SIZE,
        is_slow=False,
    ),
    wrong(
        "the replica of rank 1 drifts",
        r"Between step 1 and step 2, something other than the optimizer changed the weights of rank 1 of 2 \(0\.weight",
        after="model[0].weight.data += 1e-6 * rank",
        is_slow=False,
    ),
    wrong(
        "fewer steps on two processes",
        r"^different: 2 processes: first at step 2, after the last step: 4 steps and 2$",
        epochs="2 // size",
        samples="32",
        steps=4,
    ),
    wrong(
        "each rank stops when its own loss is low",
        r"^failed: 2 processes ended with exit code 3 after step 1, .*; until then it differs by rounding alone",
        code=FAILED,
        after="if rank == 1 and loss < 2: break",
        epochs="1",
        steps=4,
        is_slow=False,
    ),
    wrong(
        "only rank 0 trains",
        r"The ranks of one job made different numbers of steps \(rank 0 made 2, rank 1 made 0\): share the samples",
        wrapped="model",
        inputs="if rank: break",
        is_slow=False,
    ),
    wrong(
        "each rank writes the checkpoint",
        r"^\[!\] only rank 0 creates checkpoints and results: rank 1 wrote model\.pt$",
        code=0,
        after="torch.save(model.state_dict(), 'model.pt')",
    ),
    wrong(
        "each batch is padded to its own longest row",
        r"In step 1, the rows are the same but padded differently\. .*pad to a fixed length or to a multiple",
        code=0,
        model=BAG_OF_WORDS.format(", padding_idx=0"),
        inputs=PADDED_BATCHES,
        is_slow=False,
    ),
    wrong(
        "right: positions are embedded before words, and the model is called by name",
        r"^This is rounding: .* In 2 steps nothing else was found to differ",
        code=0,
        seed=f"torch.manual_seed(0)\n{POSITIONS_FIRST}",
        model="PositionsFirst()",
        loss="F.cross_entropy(wrapped(words=inputs), labels)",
        inputs="inputs = (10 * inputs.abs()).long().clamp(max=29)",
    ),
    wrong(
        "right: activations are computed again, with a mask",
        r"^This is rounding: .* In 2 steps nothing else was found to differ",
        code=0,
        seed=f"torch.manual_seed(0)\n{POSITIONS_FIRST}",
        model="PositionsFirst()",
        inputs="inputs = (10 * inputs.abs()).long().clamp(max=29)",
    ),
    wrong(
        "right: the samples are along the second dimension",
        r"^This is rounding: .* The samples were not compared: the first dimension of the model's inputs is not",
        code=0,
        seed=f"torch.manual_seed(0)\n{TIME_FIRST}",
        model="TimeFirst()",
        inputs="inputs = inputs.view(-1, 4, 2).transpose(0, 1)",
    ),
    wrong(
        "right: the weights are changed and back before the optimizer's step",
        r"^This is rounding: .* In 2 steps nothing else was found to differ",
        code=0,
        gradients=SHARPNESS,
    ),
    wrong(
        "padding that is not masked",
        r"The same rows gave a different gradient, by more than rounding, and they are padded differently\.",
        model=BAG_OF_WORDS.format(""),
        inputs=PADDED_BATCHES,
    ),
    Mistake(
        "verify: options after the script",
        r"^--steps went to the script: put options of lockstep verify before train\.py$",
        "import argparse; argparse.ArgumentParser().parse_args()",
        "lockstep verify train.py --steps 4",
        FAILED,
    ),
    Mistake(
        "verify: an error on one process",
        r"^failed: one process ended with exit code 3 before the end of its first step, .* on standard error$",
        "raise SystemExit('no such data')",
        "lockstep verify train.py",
        FAILED,
    ),
    Mistake(
        "verify: a loss but no optimizer",
        r"^lockstep: one process: nothing was trained.*: the script must make steps with a torch optimizer",
        "import torch; torch.nn.Linear(2, 1)(torch.ones(3, 2)).sum().backward()",
        "lockstep verify train.py",
    ),
    Mistake("verify: no such script", r"^lockstep: no\.py: no such script", command="lockstep verify no.py"),
]
