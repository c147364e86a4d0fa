"""Lets a script's own `torch.distributed.init_process_group()` meet the other ranks in the job's store.

[Note: env rendezvous names]

Torch joins a job by `env://` unless told otherwise, and then connects to the store at MASTER_PORT, which every user of
the machine can reach: [Note: job store]. What `env` means is looked up in a private table of torch, which the public
`register_rendezvous_handler` does not let one change: `_rendezvous_handlers` of `torch.distributed.rendezvous`. A torch
without it joins as it would anyway. Torch's own handler stays in charge of every job but the one the agent has made.
Checked with torch 2.11 and 2.13; see `tests/contracts/test_private_names_elastic.py`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlparse

from lockstep.config import environment
from lockstep.config.placement import Placement
from lockstep.errors import WorldError

RENDEZVOUS_MODULE = "torch.distributed.rendezvous"
HANDLERS_TABLE = "_rendezvous_handlers"
_SCHEME = "env"

Handler = Callable[..., Iterator[tuple[Any, int, int]]]


def join_through_job_store(place: Placement) -> None:
    """Let this rank join its job through the job's store, from now on or as soon as its script has imported torch."""
    module = sys.modules.get(RENDEZVOUS_MODULE)
    if module is None:
        sys.meta_path.insert(0, _OnImport(place))
    else:
        _replace_handler(module, place)


class _OnImport(MetaPathFinder):
    """Replaces the handler when torch is imported, by a script that may never do that."""

    def __init__(self, place: Placement) -> None:
        self._place = place

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != RENDEZVOUS_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_replace(module: ModuleType) -> None:
                run(module)
                _replace_handler(module, self._place)

            spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


def _replace_handler(module: ModuleType, place: Placement) -> None:
    handlers: dict[str, Handler] = module._rendezvous_handlers if hasattr(module, HANDLERS_TABLE) else {}
    if _SCHEME in handlers:
        handlers[_SCHEME] = _handler(place, handlers[_SCHEME])


def _handler(place: Placement, torchs_own: Handler) -> Handler:
    def join(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        query = dict(parse_qsl(urlparse(url).query))
        if not environment.is_same_job(place, query.get("rank"), query.get("world_size")):
            yield from torchs_own(url, **options)
            return
        from torch.distributed import DistStoreError
        from torch.distributed.constants import default_pg_timeout

        from lockstep.launcher.job_store import meet_other_ranks

        try:
            store = meet_other_ranks(place, options.get("timeout", default_pg_timeout))
        except WorldError as error:
            raise DistStoreError(str(error)) from None  # what torch raises, and scripts may catch
        yield store, place.rank, place.world_size
        raise RuntimeError("cannot rendezvous again: join with a new call of init_process_group")

    return join
