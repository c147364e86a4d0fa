"""`lockstep init`: write a training script to start from."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from lockstep.command_line.output_paths import write_new_file
from lockstep.terminal_text import print_line

_TEMPLATE = Path(__file__).with_name("script_template.py")


def init(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The file to write.")] = Path("train.py"),
) -> None:
    """Write a commented training script to start from; it runs without changes.

    \b
    lockstep init train.py
    lockstep run -n 2 train.py
    """
    text = _TEMPLATE.read_text().replace("train.py", script.name).replace("runs/train", f"runs/{script.stem}")
    write_new_file(script, text, "choose another name")
    print_line(f"wrote {script}: replace the data, model, loss and metrics at its top with yours")
    path = shlex.quote(str(script))
    print_line(f"run it: python {path}, or lockstep run -n 2 {path}")
