"""The updates of a loop that is not lockstep's, as torch's own hooks show them: what went in, and what was left.

For each step of an optimizer, a line in the rank's file: the rows that its models were given, the gradients as the
optimizer saw them, the weights before the first update and after each; as digests, which tell whether two are equal.
Rank 0 also keeps some values of each tensor, which tell by how much they differ. Nothing is sent: every rank notes its
own, and who reads the files compares them.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.supervision.witness import WitnessFiles

MOST_VALUES = 4096  # of a tensor that are kept
START, ROWS, GRADIENT, RATES, WEIGHTS, BUFFERS = "start", "rows", "gradient", "rates", "weights", "buffers"

_DIGITS = 16
# What wrappers put into names: DistributedDataParallel, torch.compile, Fabric, FSDP.
_WRAPPER = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_forward_module|_fsdp_wrapped_module)\.")
_FAREWELL_S = 20.0

_observer: "UpdateObserver | None" = None


def observe_updates(files: WitnessFiles, steps: int, num_ranks: int) -> None:
    """From now on, and end the script after so many."""
    global _observer
    _observer = UpdateObserver(files, steps, num_ranks)
    _observer.begin()


def leave_to_lockstep() -> None:
    """The script has a loop of lockstep's, which traces itself."""
    global _observer
    if _observer is not None:
        _observer.end()
        _observer = None


class UpdateObserver:
    def __init__(self, files: WitnessFiles, steps: int, num_ranks: int) -> None:
        self._files = files
        self._steps = steps
        self._num_ranks = num_ranks
        self._handles: list[Any] = []
        self._inputs = _Inputs()
        self._number = 0  # of updates
        self._depth = 0  # an optimizer may step another one
        self._before: dict[str, Any] = {}  # the update that is being made
        self._values: dict[str, Any] = {}

    def begin(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin_update(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._end_update(optimizer)),
            *self._inputs.begin(),
        ]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin_update(self, optimizer: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        tensors = dict(self._inputs.named_parameters(optimizer))
        gradients = {name: parameter.grad for name, parameter in tensors.items()}
        rates = {
            f"learning rate {number}": repr(float(group["lr"])) for number, group in _groups_with_a_rate(optimizer)
        }
        self._values = {}
        self._before = {
            ROWS: self._inputs.take(),
            GRADIENT: self._noted(GRADIENT, gradients),
            RATES: rates,
        }
        if self._number == 0:
            self._before[START] = self._noted(START, tensors)

    def _end_update(self, optimizer: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._number += 1
        phases = {
            **self._before,
            WEIGHTS: self._noted(WEIGHTS, dict(self._inputs.named_parameters(optimizer))),
            BUFFERS: self._noted(BUFFERS, dict(self._inputs.named_buffers())),
        }
        if self._files.rank == 0:
            from safetensors.torch import save_file

            save_file(self._values, self._files.values(self._number))
        line = {"step": self._number, "phases": phases, "layers": self._inputs.layers}
        with self._files.updates.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._number >= self._steps:
            self._leave()

    def _noted(self, phase: str, tensors: dict[str, Any]) -> dict[str, str]:
        """Each tensor's digest; some of its values are kept on rank 0."""
        digests = {}
        for name, tensor in tensors.items():
            if tensor is None:
                digests[name] = "none"
                continue
            whole = _whole(tensor)
            digests[name] = _digest(whole)
            if self._files.rank == 0:
                self._values[f"{phase}/{name}"] = _some_values(whole)
        return digests

    def _leave(self) -> None:
        """Together with the other ranks: one that still waits for an answer of ours would fail."""
        self._files.end.touch()
        everyone = [WitnessFiles(self._files.folder, rank).end for rank in range(self._num_ranks)]
        deadline = time.monotonic() + _FAREWELL_S
        while not all(end.exists() for end in everyone) and time.monotonic() < deadline:
            time.sleep(0.02)
        raise SystemExit(0)


class _Inputs:
    """What models are given while they learn: the first tensor of each call, row by row. And what the models are."""

    def __init__(self) -> None:
        self.layers: list[str] = []  # kinds that see a batch as a whole, or draw
        self._models: list[Any] = []
        self._rows: list[str] = []
        self._depth = 0
        self._is_taken = False

    def begin(self) -> list[Any]:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        return [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def take(self) -> dict[str, Any]:
        """Since the update before."""
        rows, self._rows = self._rows, []
        return {"rows": rows}

    def named_parameters(self, optimizer: Any) -> Iterator[tuple[str, Any]]:
        """By their models' names for them; one that no model has, by its place in the optimizer."""
        names = self._names(lambda model: model.named_parameters())
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield names.get(id(parameter), f"group {number}, parameter {place}"), parameter

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        buffers = {id(buffer): buffer for model in self._models for buffer in model.buffers()}
        for identity, name in self._names(lambda model: model.named_buffers()).items():
            yield name, buffers[identity]

    def _names(self, members: Callable[[Any], Any]) -> dict[int, str]:
        names: dict[int, str] = {}
        for number, model in enumerate(self._models, 1):
            prefix = "" if number == 1 else f"model {number}: "
            for name, tensor in members(model):
                names.setdefault(id(tensor), prefix + _WRAPPER.sub("", name))
        return names

    def _enter(self, module: Any, args: Any) -> None:
        import torch

        if torch.compiler.is_compiling():  # what is compiled is called by a module that is not
            return
        self._depth += 1
        if self._depth == 1:
            self._is_taken = not torch.is_grad_enabled() or next(module.parameters(), None) is None
            if not self._is_taken:
                self._meet(module)
        if not self._is_taken:
            # What carries a gradient was computed, by another model for one: it is not data.
            data = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.ndim and not arg.requires_grad]
            if data:
                self._is_taken = True
                self._rows += [_digest(row) for row in data[0].detach().cpu()]

    def _leave(self, *_: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self._depth -= 1

    def _meet(self, model: Any) -> None:
        known = {id(module) for each in self._models for module in each.modules()}
        if id(model) in known:
            return
        self._models = [*(each for each in self._models if all(m is not each for m in model.modules())), model]
        kinds = {type(module).__name__ for module in model.modules()}
        self.layers = sorted({*self.layers, *(kind for kind in kinds if "BatchNorm" in kind or "Dropout" in kind)})


def _groups_with_a_rate(optimizer: Any) -> Iterator[tuple[int, Any]]:
    return ((number, group) for number, group in enumerate(optimizer.param_groups) if "lr" in group)


def _whole(tensor: Any) -> Any:
    """On the CPU, and not this rank's part alone: all ranks ask for it, in the same order."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):  # of FSDP or a mesh
        tensor = tensor.full_tensor()
    return (tensor.to_dense() if tensor.is_sparse else tensor).cpu().contiguous()


def _digest(tensor: Any) -> str:
    import torch

    whole = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\x00".encode())
    if tensor.numel():
        whole.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()[:_DIGITS]


def _some_values(tensor: Any) -> Any:
    """All, or as many as are kept, spread evenly."""
    import torch

    flat = tensor.reshape(-1)
    if flat.numel() > MOST_VALUES:
        flat = flat[torch.linspace(0, flat.numel() - 1, MOST_VALUES, dtype=torch.float64).long()]
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    return flat.clone()
