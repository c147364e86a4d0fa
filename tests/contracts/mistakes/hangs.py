"""Mistakes that make ranks wait for ever, and pauses that are none."""

from tests.contracts.mistakes.mistake import Mistake, training_script

PLAIN = """
import os, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear({features}, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
metric = torch.zeros(2)
for step in range(12):
    loss = model(torch.ones(4, {features})).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
{body}
"""


def plain(body: str, features: int = 8) -> str:
    """A script of plain PyTorch with this in each step."""
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return PLAIN.format(body=indented, features=features)


RUN_1, RUN_2 = (f"lockstep run -n {processes} --hang-limit 1 train.py" for processes in (1, 2))

OTHER_ORDER = """
from threading import Event, Lock, Thread

first, second, begun = Lock(), Lock(), Event()


def other_order():
    with second:
        begun.set()
        with first:
            pass
"""

MISTAKES = [
    Mistake(
        "a barrier on rank 0 alone",
        script=plain("if rank == 0 and step == 8:\n    dist.barrier()"),
        command=RUN_2,
        code=5,
        says=r"rank 0 waits .* in barrier at \S*train\.py:18; .* Every rank must call the same collectives in the same",
    ),
    Mistake(
        "two ranks that both receive first",
        script=plain("if step == 8:\n    dist.recv(metric, src=1 - rank)\n    dist.send(metric, dst=1 - rank)"),
        command=RUN_2,
        code=5,
        says=r"all 2 ranks .* waiting to receive, and none sends, .* in recv at \S*train\.py:18; .* Let one rank of",
    ),
    Mistake(
        "collectives in another order on one rank",
        script=plain(
            "order = [dist.all_reduce, lambda x: dist.broadcast(x, src=0)]\n"
            "for collective in order if rank == 0 or step < 8 else order[::-1]:\n"
            "    collective(metric)"
        ),
        command=RUN_2,
        code=5,
        says=r"waiting for each other in different collectives .* torch's flight recorder, rank [01] skipped the",
    ),
    Mistake(
        "a rank that skips a collective, noticed by gloo on the other",
        script=plain("if not (rank == 1 and step == 8):\n    dist.all_reduce(metric)", features=40_000),
        command=RUN_2,
        code=3,
        says=r"rank 1 of 2 .*, the cause: it skipped the all_reduce of \[\[2\]\] .*; gloo seems to have aborted rank 0",
    ),
    Mistake(
        "a collective that one of two ranks calls once, noticed by gloo",
        script=plain("if rank == 0 and step == 8:\n    dist.all_reduce(metric)", features=40_000),
        command=RUN_2,
        code=3,
        says=r"this rank and another one called different collectives(: rank 1 called all_reduce .*)?; either",
    ),
    Mistake(
        "a barrier that one of two ranks skips once",
        script=plain("if rank == 0 and step == 8:\n    dist.barrier()"),
        command=RUN_2,
        code=5,
        says=r"flight recorder, rank 0 called barrier where the other ranks call all_reduce of \[\[27\]\]",
    ),
    Mistake(
        "a rank that leaves the loop early",
        script=plain("if rank == 1 and step == 8:\n    break"),
        command=RUN_2,
        code=3,
        says=r"rank 1 of 2 .* failed .*, the cause: it finished early \(exit code 0\) while others still waited for it",
    ),
    Mistake(
        "an evaluation on rank 0 alone",
        script=training_script(
            body="if world.rank == 0 and step.number == 3:\n"
            "    run.evaluate(model, data, accuracy, batch=16)\n"
            "step.accumulate(loss, model)\nstep.update(optimizer)",
        ),
        command=RUN_2,
        code=5,
        says=r"rank 0 waits .* at \S*train\.py:\d+; rank 1 waits in step 3 .* Every rank must call the same",
    ),
    Mistake(
        "a pipe whose writing end was left open",
        script=plain("if step == 8:\n    reading, writing = os.pipe()\n    os.read(reading, 1)"),
        command=RUN_1,
        code=5,
        says=r"reads a pipe that no other process can write to, at \S*train\.py:19",
    ),
    Mistake(
        "a lock that is taken twice",
        script=plain(
            "if step == 8:\n    from threading import Lock\n    lock = Lock()\n    with lock, lock:\n        pass"
        ),
        command=RUN_1,
        code=5,
        says=r"it waits for a lock that none of its threads can release, at \S*train\.py:20 in <module>\. Take several",
    ),
    Mistake(
        "two threads of a rank that take two locks in another order",
        script=training_script(
            before=OTHER_ORDER,
            body="if world.rank == 1 and step.number == 3:\n"
            "    with first:\n"
            "        Thread(target=other_order, daemon=True).start()\n"
            "        begun.wait()\n"
            "        with second:\n"
            "            pass\n"
            "step.accumulate(loss, model)\nstep.update(optimizer)",
        ),
        command=RUN_2,
        code=5,
        says=r"rank 1 .* waits for a lock .* in main, and another thread waits for one at \S*train\.py:28\.",
    ),
    Mistake(
        "a pause is reported, and goes on",
        script=plain("if step == 8:\n    time.sleep(6)"),
        command=RUN_1,
        code=0,
        says=r"has made no progress after step 9 .* If it is meant to take this long, nothing is wrong",
    ),
    Mistake(
        "a pause until a thread is done, while another rank waits",
        script=plain(
            "if rank == 0 and step == 8:\n"
            "    from threading import Event, Timer\n"
            "    written = Event()\n"
            "    Timer(6, written.set).start()\n"
            "    written.wait()"
        ),
        command=RUN_2,
        code=0,
        says=r"rank 0 .* it waits or sleeps at \S*train\.py:21 .* Rank 1 waits for it in .* nothing is wrong",
    ),
    Mistake(
        "a thread that goes on after the script, and meets the other rank",
        script=plain(
            "if step == 11:\n"
            "    from threading import Timer\n"
            "    dist.barrier() if rank == 0 else Timer(6, dist.barrier).start()"
        ),
        command=RUN_2,
        code=0,
        says=r"rank 1 of 2 .* has made no progress after step 12 .* Rank 0 waits for it in barrier at \S*train\.py:19",
    ),
    Mistake(
        "a stop limit that is no number",
        script="",
        command="lockstep run -n 2 --hang-stop never train.py",
        says=r"--hang-stop never: expected a number of seconds, or off",
    ),
]
