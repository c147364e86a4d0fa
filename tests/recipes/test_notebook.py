"""`examples/notebook.ipynb`, run by a separate kernel on loopback; and how a notebook shows an error."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import BIN, run
from tests.examples import EXAMPLES

# An interrupt in the middle of training, as the stop button sends it.
INTERRUPT = """
import os, signal

def interrupted(model, batch):
    if train.accuracy is interrupted:  # once: a second one would not wait for the step's end
        train.accuracy = usual
        os.kill(os.getpid(), signal.SIGINT)
    return usual(model, batch)

usual, train.accuracy = train.accuracy, interrupted
lockstep.launch(lambda world: train.train(world, epochs=2, global_batch=64, folder="runs/interrupted"))
"""
GO_ON = """
lockstep.launch(lambda world: train.train(world, epochs=2, global_batch=64, folder="runs/interrupted"))
assert digest("runs/interrupted") == digest("runs/notebook-one")
"""
SEVERAL_FROM_A_CELL = "lockstep.launch(main, nproc=2)"


def cells_of(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def executed(folder: Path, more: list[str]) -> list[dict[str, Any]]:
    """Run the notebook's code cells and additional ones; return them with their outputs."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    for number, source in enumerate(more):
        fresh = {"cell_type": "code", "id": f"more-{number}", "metadata": {}, "source": source}
        notebook["cells"].append(fresh | {"execution_count": None, "outputs": []})
    (folder / "notebook.ipynb").write_text(json.dumps(notebook))
    shutil.copy(EXAMPLES / "train.py", folder)
    kernel = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "language": "python"}
    places = {f"JUPYTER_{name}": str(folder / "jupyter") for name in ("PATH", "DATA_DIR", "CONFIG_DIR", "RUNTIME_DIR")}
    (folder / "jupyter" / "kernels" / "here").mkdir(parents=True)
    (folder / "jupyter" / "kernels" / "here" / "kernel.json").write_text(json.dumps(kernel | {"display_name": "here"}))
    command = [str(BIN / "jupyter-execute"), "--kernel_name=here", "--allow-errors", "--inplace", "notebook.ipynb"]
    finished = run(command, folder, places | {"IPYTHONDIR": str(folder / "ipython")}, timeout_s=120)
    assert finished.code == 0, finished.err
    return cells_of(folder / "notebook.ipynb")


@pytest.mark.slow
def test_it_trains_here_and_on_two_processes_and_says_what_it_cannot_do(tmp_path: Path) -> None:
    cells = executed(tmp_path, [INTERRUPT, GO_ON, SEVERAL_FROM_A_CELL])
    errors = [[output for output in cell["outputs"] if output["output_type"] == "error"] for cell in cells]
    assert not any(errors[:-3]), errors
    (stopped,), nothing, (refused,) = errors[-3:]
    assert stopped["ename"] == "Stopped"
    assert len(stopped["traceback"]) == 1, "one line, and the kernel lives on"
    assert nothing == []
    assert refused["traceback"] == [f"lockstep: {refused['evalue']}"]
    assert "put main into a file and run" in refused["evalue"]


def test_it_is_kept_without_outputs() -> None:
    cells = cells_of(EXAMPLES / "notebook.ipynb")
    assert cells
    for cell in cells:
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
