"""Public names that are imported on first use, so that importing a package loads no torch."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, names_by_module: Mapping[str, str], submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package.

    Args:
        package: the package's `__name__`.
        names_by_module: the names to export from each module of lockstep, separated by spaces: `{"train.run": "Run"}`.
        submodules: subpackages that are attributes of the package without being imported first.
    """
    module_of = {name: module for module, names in names_by_module.items() for name in names.split()}

    def import_name(name: str) -> Any:
        if name in submodules:
            return import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"lockstep.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def all_names() -> list[str]:
        return sorted([*module_of, *submodules])

    return import_name, all_names
