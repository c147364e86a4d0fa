"""`lockstep init`: a training script to start from."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from lockstep.commands.new_file import write_new

_SKELETON = Path(__file__).with_name("skeleton.py")


def init(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The file to write.")] = Path("train.py"),
) -> None:
    """Write a commented training script to start from; it runs as it stands.

    \b
    lockstep init train.py
    lockstep run -n 2 train.py
    """
    text = _SKELETON.read_text().replace("train.py", script.name).replace("runs/train", f"runs/{script.stem}")
    write_new(script, text, "choose another name")
    print(f"wrote {script}: your data, model, loss and metrics stand at its top")
    path = shlex.quote(str(script))
    print(f"run it: python {path}, or lockstep run -n 2 {path}")
