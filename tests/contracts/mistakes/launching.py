"""Mistakes in how a script is started: commands, options, environment, and scripts that `launch` does not run."""

from tests.contracts.mistakes.mistake import Mistake, training_script

# A script with its own loop, which joins no job.
ALONE = """
import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
"""

# A script that starts its own processes, and sets their address: in main, before they start, or in each of them.
SPAWNING = """
import os
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import init_process_group

def work(rank, size):
    {inside}
    init_process_group("gloo", rank=rank, world_size=size)

if __name__ == "__main__":
    {before}
    {start}
"""
ADDRESS = "os.environ.update(MASTER_ADDR='localhost', MASTER_PORT='12355')"
SPAWN = "mp.spawn(work, (2,), nprocs=2)"
PROCESSES = "started = [mp.Process(target=work, args=(rank, 2)) for rank in range(2)]; [p.start() for p in started]"
NESTED = r"starts processes for a job of its own inside a rank .* start it with `python`, or leave it to `lockstep run"

# One rank of two ends early.
EARLY_END = """
import os, sys
import lockstep

def main(world):
    lockstep.barrier()
    if world.rank == 1:
        {end}
    lockstep.barrier()

if __name__ == "__main__":
    lockstep.launch(main)
"""

# Trains without `launch`: the body of `main`, with a world that the script has joined itself.
UNLAUNCHED = training_script().replace("lockstep.launch(main)", "main(lockstep.setup_distributed())")
STOP_AFTER_TWO = "import os, signal; step.number == 2 and os.kill(os.getpid(), signal.SIGTERM)"


def launching(call: str, main: str = "def main(world):\n    pass") -> str:
    """Return a script that calls `launch` in this way."""
    return f"import lockstep\n\n{main}\n\nif __name__ == '__main__':\n    {call}\n"


MISTAKES = [
    # What to run
    Mistake("the script does not exist", "^lockstep: nowhere.py: no such script$", command="lockstep run nowhere.py"),
    Mistake(
        "a folder is launched",
        r"^lockstep: src: a folder, not a script: name the script in it$",
        files={"src/train.py": ""},
        command="lockstep run -n 2 src",
    ),
    Mistake(
        "a notebook is launched",
        r"^lockstep: train.ipynb: a notebook is not a script: `jupyter nbconvert",
        files={"train.ipynb": "{}"},
        command="lockstep run -n 2 train.ipynb",
    ),
    Mistake(
        "a config is launched",
        r"^lockstep: mine.yaml: a config is not a script: `lockstep train mine.yaml` trains it$",
        files={"mine.yaml": "base: digits"},
        command="lockstep run mine.yaml",
    ),
    Mistake(
        "python is named before the script",
        r"^lockstep: python: no such script: `lockstep run` starts Python and the processes itself",
        script=ALONE,
        command="lockstep run -n 2 python train.py",
    ),
    Mistake(
        "an option that does not exist comes before the script",
        r"^lockstep: --nproc: neither a script nor an option of `lockstep run`: see its --help$",
        script=ALONE,
        command="lockstep run --nproc 2 train.py",
    ),
    # How many processes
    Mistake(
        "no process is asked for",
        r"^lockstep: --nproc-per-node 0: expected at least 1, or auto$",
        script=ALONE,
        command="lockstep run -n 0 train.py",
    ),
    Mistake(
        "the number of processes is a word",
        r"^lockstep: -n two: expected a whole number, auto, or a minimum and a maximum, as in 2:4$",
        script=ALONE,
        command="lockstep run -n two train.py",
    ),
    Mistake(
        "the number of processes comes after the script",
        r"-n 2 after train.py is an option of the script, and one process runs: .* `lockstep run -n 2 train.py`$",
        script=ALONE,
        command="lockstep run train.py -n 2",
        code=0,
    ),
    Mistake(
        "variables of another launcher are left over",
        r"^lockstep: -n 2 is not used: a launcher has started this process as rank 0 of 1 \(RANK, LOCAL_RANK\)",
        script=ALONE,
        command="lockstep run -n 2 train.py",
        env={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        code=0,
    ),
    Mistake(
        "a port for one machine",
        r"^lockstep: not used: --master-port 29511; without several machines \(--nnodes\), every start takes a free",
        script="print('trained')",
        command="lockstep run -n 1 --master-port 29511 train.py",
        code=0,
    ),
    Mistake("RANK alone is set", "WORLD_SIZE is not set, though RANK=0", script=UNLAUNCHED, env={"RANK": "0"}),
    # Scripts that do not use the processes they are given
    Mistake(
        "copies that never join",
        r"^lockstep: no process group after 3 optimizer steps, so each of the 2 processes trains a copy of its own: "
        r"join them with lockstep.launch\(main\) or .*, or start one process",
        script=ALONE,
        command="lockstep run -n 2 train.py",
        code=0,
    ),
    Mistake(
        "spawn inside a rank",
        NESTED,
        script=SPAWNING.format(inside="pass", before=ADDRESS, start=SPAWN),
        command="lockstep run -n 1 train.py",
    ),
    Mistake(
        "torch's Process inside a rank",
        NESTED,
        script=SPAWNING.format(inside=ADDRESS, before="mp.set_start_method('spawn')", start=PROCESSES),
        command="lockstep run -n 1 train.py",
        code=0,  # the script's own: it does not look at how its processes end
    ),
    Mistake(
        "a Process of Python's own inside a rank",
        NESTED,
        script=SPAWNING.format(
            inside=ADDRESS, before="import multiprocessing; mp = multiprocessing.get_context('spawn')", start=PROCESSES
        ),
        command="lockstep run -n 1 train.py",
        code=0,
        is_slow=True,
    ),
    # launch
    Mistake(
        "launch is given a result",
        r"^lockstep: launch\(main\): main is of type NoneType: give the function itself, without calling it$",
        script=launching("lockstep.launch(main(None))"),
    ),
    Mistake(
        "main takes no world",
        r"^lockstep: launch\(main\): main\(\) is called with one argument, the World: write `def main\(world\):`$",
        script=launching("lockstep.launch(main)", "def main():\n    pass"),
    ),
    Mistake(
        "nproc is a text",
        r"^lockstep: nproc='2': expected a whole number greater than 0$",
        script=launching("lockstep.launch(main, nproc='2')"),
    ),
    # How scripts end
    Mistake(
        "a syntax error on every rank",
        r"^lockstep: rank 0 of 2 on .* failed, the cause: SyntaxError: .* \(train.py, line 1\)$",
        script="def main(:\n",
        command="lockstep run -n 2 train.py",
        code=3,
    ),
    Mistake(
        "one rank exits with a code",
        r"^lockstep: rank 1 of 2 on .* failed, the cause: exited with code 7$",
        script=EARLY_END.format(end="sys.exit(7)"),
        command="lockstep run -n 2 train.py",
        code=3,
    ),
    Mistake(
        "one rank exits at once",
        r"^lockstep: rank 1 of 2 on .* failed, the cause: it finished early \(exit code 0\) while others still waited",
        script=EARLY_END.format(end="os._exit(0)"),
        command="lockstep run -n 2 train.py",
        code=3,
    ),
    Mistake(
        "a wrong argument without launch",
        r"^lockstep: resume='yes': expected one of auto, accept-drift, force$",
        script="import lockstep\nlockstep.Run('runs/mine', resume='yes')\n",
    ),
    Mistake(
        "a wrong call in the loop without launch",
        r"^lockstep: run.steps\(…\): give either epochs= or steps=, not both$",
        script=UNLAUNCHED.replace("steps=4", "steps=4, epochs=1"),
    ),
    Mistake(
        "SIGTERM without launch",
        r"^lockstep: stopped after step 2, as requested: run the same command again to continue$",
        script=UNLAUNCHED.replace("step.update(optimizer)", f"step.update(optimizer)\n        {STOP_AFTER_TWO}"),
        code=75,
    ),
    Mistake(
        "more threads without launch",
        r"^computing with 1 thread instead of 2, as under `lockstep run`, for the same bits: for more, set OMP_NUM_THR",
        script="import torch; torch.set_num_threads(2)\n" + UNLAUNCHED,
        code=0,
    ),
    # Folders, and limits
    Mistake(
        "other files in the run folder",
        r"^end 4: digest ",  # it simply works
        script=training_script(),
        files={"runs/mine/notes.txt": "", "runs/mine/.gitignore": "*", "runs/mine/tensorboard/events": ""},
        code=0,
    ),
    Mistake(
        "another program's checkpoints in the run folder",
        r"^lockstep: runs/mine is not a run folder \(it has no run.json\), but its checkpoints would be taken",
        script=training_script(),
        files={"runs/mine/checkpoints/last.ckpt": ""},
    ),
    Mistake(
        "the folder of all runs is given",
        r"^lockstep: runs is not a run folder, but holds runs, such as runs/a: give Run or Trainer another folder$",
        script=training_script(run="'runs', world"),
        files={"runs/a/run.json": "{}"},
    ),
    Mistake(
        "the same command after --stop-after",
        r"^lockstep: stopped after step 3, as requested: run the same command without --stop-after 3 .* to continue$",
        command="lockstep train digits --quick --stop-after 3",
        code=75,
    ),
]
