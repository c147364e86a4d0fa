"""Import what a config names as `package.module:name`: a recipe, or the class of an optimizer.

Importing runs the module's code, so only a command that trains the config which the user gave it imports what that
names. Commands that read a run folder check the config saved there by its form alone.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from lockstep.errors import UserError


def import_named(name: str) -> Any:
    """Return the object that `package.module:name` names, in a module of the working directory or an installed one."""
    module, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as under `python -m lockstep`: it may be a module in this folder
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything when imported
        raise UserError(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}") from None
