"""Mistakes with data sets that are streams, and uses of them that simply work."""

from tests.contracts.mistakes.mistake import Mistake, training_script

ROWS = """
import itertools
import os
import numpy
import torch.distributed as dist


def row(number):
    return torch.randn(8, generator=torch.Generator().manual_seed(number)), number % 3


class Rows(IterableDataset):
    length = 64
    start, stop = 0, 64
    noise = numpy.random.default_rng()  # nobody seeds it

    def __iter__(self):
        {body}
"""

EVERY_ROW = "return map(row, range(64))"


def rows(body: str = EVERY_ROW) -> str:
    return ROWS.format(body=body)


def stream_script(
    body: str = EVERY_ROW, loader: str = "run.loader(Rows(), global_batch=16, lanes=4)", **parts: str
) -> str:
    return training_script(**{"before": rows(body), "run": "None, world, seed=7", "loader": loader, **parts})


TWO = "lockstep run -n 2 train.py"

MISTAKES = [
    Mistake(
        "a stream that shards itself by get_rank",
        script=stream_script(
            "return itertools.islice(map(row, range(64)), dist.get_rank(), None, dist.get_world_size())"
        ),
        command=TWO,
        says=r"the stream Rows: row 0 of epoch 0 is not the same on rank 1 .*: yield every row on every rank",
    ),
    Mistake(
        "a stream that shards itself by RANK, read by a worker",
        script=stream_script(
            "return (row(n) for n in range(64) if n % 2 == int(os.environ['RANK']))",
            loader="run.loader(Rows(), global_batch=16, lanes=4, workers=1)",
        ),
        command=TWO,
        says=r"the stream Rows: row 0 of epoch 0 is not the same on rank 1 .*: yield every row on every rank",
    ),
    Mistake(
        "a stream with noise that nobody seeds",
        script=stream_script("return ((row(n)[0] + self.noise.normal(), 1) for n in range(64))"),
        command=TWO,
        code=0,
        says=r"the stream Rows: row 0 .*, so rows may be missing or repeated: .* which lockstep seeds",
    ),
    Mistake(
        "a stream of whole batches that every rank reads alike",
        script=stream_script(
            "return (torch.utils.data.default_collate([row(n), row(n + 1)]) for n in range(0, 64, 2))",
            loader="run.loader(DataLoader(Rows(), batch_size=None))",
        ),
        command=TWO,
        code=0,
        says=r"all 2 ranks read the same batch from this DataLoader, .*: let its sampler shard by rank",
    ),
    Mistake(
        "a stream that shards itself by worker",
        script=stream_script(
            """info = torch.utils.data.get_worker_info()
        return iter(map(row, range(64) if info is None else range(info.id, 64, info.num_workers)))""",
            loader="run.loader(Rows(), global_batch=16, lanes=4, workers=2)",
            steps="epochs=1",
            after="print('rows', 16 * step.number, 'of 64')",
        ),
        code=0,
        says="^rows 64 of 64$",
    ),
    Mistake(
        "a worker_init that gives each worker its part",
        script=stream_script(
            "return map(row, range(self.start, self.stop))",
            before=rows("return map(row, range(self.start, self.stop))")
            + """

def give_part(number):
    info = torch.utils.data.get_worker_info()
    part = info.dataset.length // info.num_workers
    info.dataset.start, info.dataset.stop = part * info.id, part * (info.id + 1)
""",
            loader="run.loader(DataLoader(Rows(), batch_size=16, num_workers=2, worker_init_fn=give_part), lanes=4)",
            steps="epochs=1",
            after="print('rows', 16 * step.number, 'of 64')",
        ),
        code=0,
        says="^rows 64 of 64$",
    ),
    Mistake(
        "a generator for two epochs",
        script=stream_script(loader="run.loader(map(row, range(64)), global_batch=16, lanes=4)", steps="epochs=2"),
        says=r"epoch 1 of the iterable data set gave no sample: .* use an IterableDataset whose __iter__ starts again",
    ),
    Mistake(
        "a generator function instead of what it returns",
        script=stream_script(loader="run.loader(row, global_batch=16, lanes=4)"),
        says=r"row is a function, not a data set: give an IterableDataset whose __iter__ yields samples",
    ),
    Mistake(
        "a schedule to the end of epochs of unknown length",
        script=stream_script(
            optimizer="run.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), lockstep.Schedule.cosine())",
            steps="epochs=2",
        ),
        says=r"schedule: cosine ends with the run, and this run's length is not known: give length=",
    ),
    Mistake(
        "a save every epoch of unknown length",
        script=stream_script(steps="epochs=2, save_every='1 epoch'"),
        says=r"save_every: 1 epoch cannot be converted to steps, .*: give it in steps",
    ),
]
