"""The tensor-parallel plan: which layers are split over the ranks of the axis `tensor`, and how.

`tensor_plan: {"*.query": column, "*.out": row}` gives each pattern of module names a style:

column     split the outputs of a Linear or an Embedding: each rank continues with its own features
row        split the inputs of a Linear, as a column layer before it leaves them; its output is whole again. Of an
           Embedding, split the rows
sequence   split the input of a norm or a dropout along dimension 1. `row_to_sequence` splits its output like this, and
           `column_from_sequence` expects its input split like this

Styles that end in `_gathered` gather the output on every rank.
"""

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from lockstep.engine.compiled_models import named_modules
from lockstep.errors import UserError
from lockstep.train.strategies.fsdp_units import inside_attention, own_parameters

_LAYERS = (nn.Linear, nn.Embedding)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.Dropout)
_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "column": _LAYERS,
    "column_gathered": _LAYERS,
    "column_from_sequence": (nn.Linear,),
    "row": _LAYERS,
    "row_to_sequence": _LAYERS,
    "sequence": _NORMS,
    "sequence_gathered": _NORMS,
}


class PlannedModule(NamedTuple):
    """A module to split, and how."""

    path: str
    module: nn.Module
    style: str


class TensorPlan:
    """The plan for all models of a run. Every pattern must match a module of at least one of them."""

    def __init__(self, plan: Mapping[str, str], num_ranks: int) -> None:
        for pattern, style in plan.items():
            if style not in _KINDS:
                raise UserError(f"tensor_plan: {pattern}: {style!r} is not one of {', '.join(_KINDS)}")
        if num_ranks > 1 and not plan:
            raise UserError(
                f"tensor={num_ranks} needs a tensor_plan that says which layers to split, as in "
                'tensor_plan={"*.query": "column", "*.out": "row"}'
            )
        self._plan = plan
        self._num_ranks = num_ranks
        self._unmatched = set(plan)
        self._paths: list[str] = []

    def check_matched(self) -> None:
        """Raise if a pattern has matched no module of any model."""
        for pattern in self._plan:
            if pattern in self._unmatched:
                near = difflib.get_close_matches(pattern, self._paths, n=3, cutoff=0.3)
                hint = f"; similar names are {', '.join(near)}" if near else ""
                raise UserError(f"tensor_plan: {pattern!r} matches no module of the model{hint}")

    def apply(self, model: nn.Module, mesh: Any) -> None:
        """Split a model's layers over the ranks of a mesh."""
        for planned in self.modules(model):
            if self._num_ranks > 1:
                _parallelize(planned, mesh)

    def modules(self, model: nn.Module) -> list[PlannedModule]:
        """Return a model's modules to split. Of several patterns that match, the first counts."""
        chosen = []
        tied = _modules_with_tied_weights(model)
        uncalled = inside_attention(model)
        for path, module in named_modules(model):
            self._paths.append(path)
            pattern = next((each for each in self._plan if fnmatchcase(path, each)), None)
            if pattern is None:
                continue
            self._unmatched.discard(pattern)
            planned = PlannedModule(path, module, self._plan[pattern])
            _check(planned, self._num_ranks)
            if module in uncalled:
                raise UserError(
                    f"tensor_plan: {path} is inside a MultiheadAttention, which does not call it: build attention from "
                    "separate Linear layers"
                )
            if module in tied:
                raise UserError(
                    f"tensor_plan: {path} shares its weight with another module, and would stop sharing it: omit it"
                )
            chosen.append(planned)
        return chosen


def _check(planned: PlannedModule, num_ranks: int) -> None:
    path, module, style = planned
    if not isinstance(module, _KINDS[style]):
        kinds = " or ".join(kind.__name__ for kind in _KINDS[style])
        raise UserError(f"tensor_plan: {path} is a {type(module).__name__}, and {style} is for a {kinds}")
    if isinstance(module, nn.Linear):
        what, size = ("in", module.in_features) if style.startswith("row") else ("out", module.out_features)
    elif isinstance(module, nn.Embedding):
        rows = style.startswith("row")
        what, size = ("row", module.num_embeddings) if rows else ("out", module.embedding_dim)
    else:
        return
    if size % num_ranks:
        raise UserError(f"tensor_plan: {path} has {size} {what} features, which {num_ranks} ranks cannot split equally")


def _parallelize(planned: PlannedModule, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    is_embedding = isinstance(planned.module, nn.Embedding)
    whole, features, sequence = Replicate(), Shard(-1), Shard(1)
    rows_from = whole if is_embedding else features
    styles: dict[str, Iterable[Any]] = {
        "column": [ColwiseParallel(output_layouts=features)],
        "column_gathered": [ColwiseParallel(output_layouts=whole)],
        "column_from_sequence": [ColwiseParallel(input_layouts=sequence)],
        "row": [RowwiseParallel(input_layouts=rows_from)],
        "row_to_sequence": [RowwiseParallel(input_layouts=rows_from, output_layouts=sequence)],
        "sequence": [SequenceParallel()],
        "sequence_gathered": [
            SequenceParallel(),
            PrepareModuleOutput(output_layouts=sequence, desired_output_layouts=whole),
        ],
    }
    for style in styles[planned.style]:
        parallelize_module(planned.module, mesh, style, src_data_rank=None)  # all ranks have the same weights already


def _modules_with_tied_weights(model: nn.Module) -> set[nn.Module]:
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in own_parameters(module):
            users.setdefault(parameter, []).append(module)
    return {module for modules in users.values() if len(modules) > 1 for module in modules}
