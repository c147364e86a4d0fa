"""`lockstep submit`: its scripts and manifests run, with stand-ins for Slurm and pods; errors are reported at once."""

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.errors import UserError
from tests.commands import LOCKSTEP, Finished, call, clean_environment, free_port, run, started
from tests.pods import as_kubernetes_starts_it

# It asks its own agent to stop in the middle, as a scheduler would.
SCRIPT = """
import os, signal, sys, time
import torch, lockstep

def loss(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)

def main(world):
    run = lockstep.Run(sys.argv[1], world, seed=7)
    model = run.prepare(torch.nn.Linear(8, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.AdamW(params, lr=3e-3))
    g = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(320, 8, generator=g), torch.randint(0, 3, (320,), generator=g))
    for step in run.steps(run.loader(data, global_batch=32, lanes=2), epochs=1, save_every=100):
        step.accumulate(loss, model)
        step.update(optimizer)
        if step.number == 4 and "stop" in sys.argv and world.rank == 0:
            os.kill(int(os.environ["LOCKSTEP_AGENT_PID"]), signal.SIGTERM)
            time.sleep(2)  # so that it is noticed before the last step

if __name__ == "__main__":
    lockstep.launch(main)
"""

# Drops the options of srun, and sets the variables of a step with one task on one machine.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1
export SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NODELIST=n1 SLURM_NTASKS=1 SLURM_NNODES=1
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$(dirname "$0")/asked"
"""


def written(*arguments: str) -> str:
    """Return the script or manifest that the command prints; user errors are raised."""
    result = CliRunner().invoke(app, ["submit", *arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "it's $HOME"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(SCRIPT)
    return folder


class Slurm:
    """A stand-in for Slurm on one machine, made of two scripts."""

    def __init__(self, folder: Path, lockstep: str) -> None:
        self.folder = folder
        folder.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("lockstep", lockstep)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def run(self, script: str, cwd: Path) -> Finished:
        (self.folder / "job.sh").write_text(script)
        path = f"{self.folder}:{clean_environment()['PATH']}"
        return run(["bash", str(self.folder / "job.sh")], cwd, {"PATH": path, "SLURM_JOB_ID": "77"})

    @property
    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []


def directives(script: str) -> dict[str, str]:
    """Return the directives that sbatch reads: it stops at the first command."""
    head = script.split("\nset -e\n")[0]
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", head, re.MULTILINE))


def test_the_script_for_slurm() -> None:
    words = "--nodes 2 -n 4 --gpus 4 --cpus 8 --memory 64G --time 1-12 --partition long,short --account us --name mine"
    script = written("slurm", *words.split(), "--setup", "source my/activate", "--", "run", "train.py", "-n", "3")
    assert script.startswith("#!/bin/bash\n")
    assert directives(script) == {
        "job-name": "mine",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "8",
        "gpus-per-node": "4",
        "mem": "64G",
        "time": "1-12",
        "partition": "long,short",
        "account": "us",
        "signal": "TERM@120",
        "requeue": "",
        "open-mode": "append",
    }
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "\nsource my/activate\n" in script
    assert "lockstep run -n 4 --grace 105 train.py -n 3" in script, "arguments after the script are the script's"


def test_options_that_are_not_given_are_not_written() -> None:
    script = written("slurm", "run", "train.py", "--nodes", "3")
    assert "lockstep run -n 1 --grace 105 train.py --nodes 3" in script, "options after a command are the command's"
    names = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "signal", "requeue", "open-mode"}
    assert set(directives(script)) == names
    assert directives(script)["job-name"] == "train"


def test_arguments_and_folders_arrive_as_they_were_given(tmp_path: Path, here: Path) -> None:
    nasty = [
        "a b",
        "it's",
        "$HOME",
        "$(touch pwned)",
        "`id`",
        ";",
        "*",
        "line\nbreak",
        '"',
        "\\",
        "",
        "# no",
        "-x",
        "ü",
    ]
    lockstep = f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.getcwd(), sys.argv[1:]]))\n"
    slurm = Slurm(tmp_path / "slurm", lockstep)
    finished = slurm.run(written("slurm", "--", "run", "train.py", *nasty), tmp_path)
    assert finished.code == 0, finished.err
    assert json.loads(finished.out) == [str(here), ["run", "-n", "1", "--grace", "105", "train.py", *nasty]]
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("command", ["run train.py", "train digits"])
@pytest.mark.parametrize("code", [0, 2, 3, 75, 143])
def test_only_a_job_that_was_stopped_is_queued_again(tmp_path: Path, here: Path, code: int, command: str) -> None:
    slurm = Slurm(tmp_path / "slurm", f"#!/bin/bash\nexit {code}\n")
    assert slurm.run(written("slurm", "--", *command.split()), here).code == code
    # 143: it has saved nothing, and a script might start over each time.
    again = [75, 143] if command.startswith("train") else [75]
    assert slurm.asked == (["requeue 77"] if code in again else [])


def test_a_setup_that_fails_ends_the_job(tmp_path: Path, here: Path) -> None:
    slurm = Slurm(tmp_path / "slurm", "#!/bin/bash\necho trained\n")
    finished = slurm.run(written("slurm", "--setup", "cd nowhere", "--", "run", "train.py"), here)
    assert finished.code != 0
    assert "trained" not in finished.out
    slurm = Slurm(tmp_path / "another", "#!/bin/bash\necho trained with $X\n")
    assert slurm.run(written("slurm", "--setup", "export X=5", "run", "train.py"), here).out == "trained with 5\n"


def test_a_pod_sets_itself_up_and_becomes_the_agent(tmp_path: Path, here: Path) -> None:
    """The agent must be the process that Kubernetes asks to stop."""
    manifest = written(
        "kubernetes", "--image", "x", "--setup", "export X=$$ Y='a  b'", "--", "run", "train.py", "$X", ""
    )
    container = yaml.safe_load(manifest)["spec"]["template"]["spec"]["containers"][0]
    lockstep = tmp_path / "lockstep"
    expressions = "os.getpid() == int(os.environ['X']), os.environ['Y'], sys.argv[4:]"
    lockstep.write_text(f"#!{sys.executable}\nimport os, sys\nprint({expressions})\n")
    lockstep.chmod(0o755)
    path = f"{tmp_path}:{clean_environment()['PATH']}"
    finished = run(as_kubernetes_starts_it(container, 0), here, {"PATH": path})
    assert finished.out == "True a  b ['--grace', '105', 'train.py', '$X', '']\n", finished.err


def digest_in(text: str) -> str:
    (found,) = re.findall("digest ([0-9a-f]{64})", text)
    return str(found)


def test_jobs_run_to_the_same_digest(tmp_path: Path, here: Path) -> None:
    """The Slurm job is stopped, queued again and resumed; the Kubernetes job runs in two pods; both end the same."""
    slurm = Slurm(tmp_path / "slurm", f'#!/bin/bash\nexec {" ".join(LOCKSTEP)} "$@"\n')
    script = written("slurm", "-n", "2", "--", "run", "train.py", "slurm", "stop")
    stopped = slurm.run(script, here)
    assert (stopped.code, slurm.asked) == (75, ["requeue 77"]), stopped.err
    went_on = slurm.run(script, here)
    assert (went_on.code, slurm.asked) == (0, ["requeue 77"]), went_on.err
    assert "resumed slurm/checkpoints/step-" in went_on.out

    manifest = written("kubernetes", "--image", "me/mine:1", "--nodes", "2", "run", "train.py", "pods")
    _, job = yaml.safe_load_all(manifest)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    port = str(free_port())
    with ExitStack() as stack:
        pods = []
        for index in range(2):
            first, *words = as_kubernetes_starts_it(container, index)
            assert first == "lockstep"
            # In place of the cluster's DNS and of separate networks.
            words = [{"train-0.train": "127.0.0.1", "29500": port}.get(word, word) for word in words]
            pods.append(stack.enter_context(started([*LOCKSTEP, *words], here, {"JOB_COMPLETION_INDEX": str(index)})))
        outputs = [pod.communicate(timeout=90) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert "processes 2" in outputs[0][0]
    assert digest_in(outputs[0][0]) == digest_in(went_on.out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("slurm", "expected a train … or run … command, and got nothing"),
        ("slurm -- verify digits", "got 'verify'"),
        ("slurm -- run nowhere.py", "nowhere.py: no such script"),
        ("slurm -- run -m no_such_module", "no module named no_such_module"),
        ("slurm -- train nowhere.yaml", "nowhere.yaml"),
        ("slurm -- train digits optim.rl=1", "optim.rl"),
        ("slurm --nodes 8 -- train digits lanes=4", "8 processes cannot share lanes=4"),
        ("slurm -- run -n 2 train.py", "put it before, lockstep submit … -n 2"),
        ("slurm -- train digits --nproc_per_node 2", "put it before, lockstep submit … -n 2"),
        ("slurm -- train digits --nnodes 2", "--nnodes 2: the scheduler places the machines; omit --nnodes"),
        ("slurm -- run --master-addr n1 train.py", "--master-addr n1: the scheduler"),
        ("slurm -- train digits --stop-after 3", "--stop-after 3 ends with exit code 75"),
        ("slurm -- run --grace 500 train.py", "--grace 500: expected 0 to 105"),
        ("slurm -- run --grace nan train.py", "--grace nan: expected a number of seconds"),
        ("slurm -- train digits --hang-limit long", "--hang-limit long: expected a number of seconds, or off"),
        ("slurm -- train digits --max-restarts -1", "--max-restarts -1: expected 0 or more"),
        ("slurm --time tomorrow -- run train.py", "--time 'tomorrow'"),
        ("slurm --time 2:00 -- run train.py", "--stop-before 120: the job has only 120 s"),
        ("slurm --partition a$b -- run train.py", "--partition 'a$b'"),
        ("slurm --name -x -- run train.py", "--name '-x'"),
        ("kubernetes --image x --name My_Job -- run train.py", "--name 'My_Job'"),
        ("kubernetes --image x --stop-before 5 -- run train.py", "--stop-before 5"),
        ("slurm -o train.py -- run train.py", "train.py exists: choose another name, or overwrite it with --force"),
        ("slurm -o no/such/folder.sh -- run train.py", "no/such/folder.sh cannot be written: No such file"),
    ],
)
def test_errors_are_reported_at_once(here: Path, arguments: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        written(*arguments.split(" "))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in here.iterdir()] == ["train.py"]
    assert (here / "train.py").read_text() == SCRIPT


def test_the_command_itself_writes_and_refuses(here: Path) -> None:
    command = ["submit", "slurm", "--nodes", "2", "-o", "job.sh"]
    first = call([*command, "--", "run", "train.py"], here)
    assert (first.code, first.out, first.err) == (0, "wrote job.sh\n", "")
    before = (here / "job.sh").read_text()
    again = call([*command, "--", "run", "train.py", "x"], here)
    assert (again.code, again.out) == (2, "")
    assert again.err == "lockstep: job.sh exists: choose another name, or overwrite it with --force\n"
    assert (here / "job.sh").read_text() == before
    assert call([*command, "--force", "run", "train.py", "x"], here).code == 0
    assert (here / "job.sh").read_text() != before
    unknown = call(["submit", "slurm", "run", "--no-such", "train.py"], here)
    assert unknown.code == 2
