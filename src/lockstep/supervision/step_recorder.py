"""Records each optimizer step of a plain PyTorch loop, through torch's hooks, for `lockstep verify`.

For each optimizer step, a line is written to the rank's file: the rows of data that its models were given, the
gradients that the optimizer saw, and the weights before and after each update. All of it is written as
digests, which tell whether two are equal. Rank 0 also keeps some values of each tensor, which tell by how much they
differ. Nothing is communicated: every rank records its own steps, and `lockstep verify` compares the files.

[Note: one step recorder per process]

Torch's hooks for optimizer steps and forward passes are process-wide, so a process has at most one recorder, held here.
`launcher.worker_main` installs it before the script begins. A lockstep run, which writes a trace itself, replaces it.
That object is the only state of this module.
"""

import atexit
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep.supervision.batch_rows import RecordedRow, digest_tensor, record_rows
from lockstep.supervision.io_recorder import OutputRecord
from lockstep.supervision.sampler_epochs import SamplerEpochs

MAX_KEPT_VALUES = 4096  # per tensor
RANDOM_NUMBERS = "random numbers"  # among the layers: the model draws some, as functional dropout does
START, ROWS, GRADIENT, RATES, WEIGHTS, BUFFERS = "start", "rows", "gradient", "rates", "weights", "buffers"

# What DistributedDataParallel, torch.compile, Fabric and FSDP insert into the names of parameters.
_WRAPPER_PREFIX = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_forward_module|_fsdp_wrapped_module)\.")
_WAIT_FOR_RANKS_S = 20.0
_DEVICE_TYPES = ("cpu", "cuda")
# Of optimizers, and what they are called in messages.
_SETTINGS = {"lr": "learning rate", "weight_decay": "weight decay", "momentum": "momentum", "betas": "pair of betas"}


class StepRecorder:
    """Records the optimizer steps of this process while it is installed."""

    def __init__(self) -> None:
        self._recording: _Recording | None = None
        self._run_folders: list[Path | None] = []

    def install(self, files: OutputRecord, num_steps: int, num_ranks: int) -> None:
        """Start to record; end the script after `num_steps` steps.

        Args:
            files: the record of this rank.
            num_steps: the number of steps after which to end the script.
            num_ranks: of the job: all ranks end together.
        """
        self.remove()
        self._recording = _Recording(files, num_steps, num_ranks)

    def remove(self) -> None:
        """Stop recording."""
        if self._recording is not None:
            self._recording.remove_hooks()
            self._recording = None

    def replace_by_run(self, folder: Path | None) -> list[Path | None]:
        """Stop recording, because a lockstep run with this folder begins; return the folders of the runs before it."""
        self.remove()
        earlier = list(self._run_folders)
        self._run_folders.append(folder)
        return earlier


_of_this_process = StepRecorder()  # [Note: one step recorder per process]

record_steps = _of_this_process.install
replace_recorder_by_run = _of_this_process.replace_by_run


class _Recording:
    """The hooks, and what they have recorded of the current step."""

    def __init__(self, files: OutputRecord, num_steps: int, num_ranks: int) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._files = files
        self._num_steps = num_steps
        self._num_ranks = num_ranks
        self._models = _ModelRecorder()
        self._num_updates = 0
        self._depth = 0  # an optimizer's step may call another optimizer's
        self._phases: dict[str, Any] = {}  # of the current update
        self._values: dict[str, Any] = {}
        self._weights: dict[str, str] = {}  # digests, as the last update of each has left them
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_step(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._after_step(optimizer)),
            *self._models.add_hooks(),
            epochs := SamplerEpochs(),
        ]
        self._epochs = epochs
        atexit.register(self._note_end)

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        atexit.unregister(self._note_end)

    def _before_step(self, optimizer: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        parameters = dict(self._models.named_parameters(optimizer))
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        self._values = {}
        self._epochs.note_update()
        self._phases = {
            START: self._digests(START, parameters, known=self._weights),
            ROWS: {"rows": self._models.take_rows()},
            GRADIENT: self._digests(GRADIENT, gradients),
            RATES: _settings(optimizer),
        }

    def _after_step(self, optimizer: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._num_updates += 1
        weights = self._digests(WEIGHTS, dict(self._models.named_parameters(optimizer)))
        self._weights |= weights
        phases = {
            **self._phases,
            WEIGHTS: weights,
            BUFFERS: self._digests(BUFFERS, dict(self._models.named_buffers())),
        }
        if self._files.rank == 0:
            from safetensors.torch import save_file

            save_file(self._values, self._files.values(self._num_updates))
        line = {
            "step": self._num_updates,
            "phases": phases,
            "layers": sorted(self._models.layers),
            "has_low_precision": self._models.has_low_precision,
            "repeated_epoch": self._epochs.repeated,
        }
        with self._files.updates.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._num_updates >= self._num_steps:
            self._end_script()

    def _digests(
        self, phase: str, tensors: dict[str, Any], known: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, str]:
        """Return each tensor's digest; on rank 0, also keep some of its values, unless `known` has that digest."""
        digests = {}
        for name, tensor in tensors.items():
            if tensor is None:
                digests[name] = "none"
                continue
            full = _full_tensor_on_cpu(tensor)
            digests[name] = digest_tensor(full)
            if self._files.rank == 0 and digests[name] != known.get(name):
                self._values[f"{phase}/{name}"] = _some_values(full)
        return digests

    def _end_script(self) -> None:
        """End together with the other ranks: one that still waits in a collective for this rank would fail."""
        self._note_end()
        all_ends = [OutputRecord(self._files.folder, rank).end for rank in range(self._num_ranks)]
        deadline = time.monotonic() + _WAIT_FOR_RANKS_S
        while not all(end.exists() for end in all_ends) and time.monotonic() < deadline:
            time.sleep(0.02)
        raise SystemExit(0)

    def _note_end(self) -> None:
        """Tell the other ranks not to wait for this one; also if the script has ended by itself, after fewer steps."""
        self._files.end.touch()


class _ModelRecorder:
    """The models of the script, and the rows of data that they are given in training."""

    def __init__(self) -> None:
        self.layers: set[str] = set()  # the kinds of layers that mix the samples of a batch, or draw random numbers
        self.has_low_precision = False  # some of them compute in less than fp32
        self._models: list[Any] = []
        self._rows: list[RecordedRow] = []  # since the last update
        self._depth = 0  # of nested forward calls
        # Of the outermost call:
        self._has_rows = False  # its rows are recorded, or it needs none
        self._is_given = False  # they are those of its own argument, and not of a layer's
        self._inner_batch: Any = None  # the layer's
        self._begin = 0  # how many rows there were before
        self._random_state: Any = None

    def add_hooks(self) -> list[Any]:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        return [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        ]

    def take_rows(self) -> list[RecordedRow]:
        """Return the rows since the last update, and start over."""
        rows, self._rows = self._rows, []
        return rows

    def named_parameters(self, optimizer: Any) -> Iterator[tuple[str, Any]]:
        """Yield an optimizer's parameters, by their names in the models or else by their place in the optimizer."""
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
                names.setdefault(id(tensor), prefix + _WRAPPER_PREFIX.sub("", name))
        return names

    def _before_forward(self, module: Any, args: Any) -> None:
        import torch

        if torch.compiler.is_compiling():  # a compiled module is called by one that is not, which is recorded
            return
        self._depth += 1
        self.has_low_precision |= any(torch.is_autocast_enabled(kind) for kind in _DEVICE_TYPES)
        if self._depth == 1:
            self._begin_outermost(module)
        if not self._has_rows:
            # A part that is called by itself, for example to compute activations again, is given masks besides data.
            is_part = self._depth == 1 and not self._is_model(module)
            data = [arg for arg in (args[:1] if is_part else args) if _is_data(arg)]
            self._has_rows = bool(data) or is_part
            self._is_given |= self._has_rows and self._depth == 1
            if data:
                self._inner_batch = data[0]
                self._rows += record_rows(data[0])

    def _begin_outermost(self, module: Any) -> None:
        import torch

        self._has_rows = not torch.is_grad_enabled() or next(module.parameters(), None) is None
        self._is_given, self._inner_batch, self._begin = self._has_rows, None, len(self._rows)
        self._random_state = None if self._has_rows else _random_state()
        if not self._has_rows:
            self._add_model(module)
            self.layers |= {type(part).__name__ for part in module.modules() if _mixes_or_draws(part)}

    def _after_forward(self, _: Any, args: Any, *others: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        if self._depth == 0 and len(others) == 2:  # arguments by name, and the result: there was no error
            if not self._is_given:
                self._prefer_given([*args, others[0]])
            if self._random_state is not None and not _is_equal(self._random_state, _random_state()):
                self.layers.add(RANDOM_NUMBERS)

    def _prefer_given(self, arguments: Any) -> None:
        """Record what the model was given by name, unless the recorded rows are of that: not positions, for example."""
        given = [value for each in arguments if isinstance(each, Mapping) for value in each.values() if _is_data(value)]
        places = [tensor.untyped_storage().data_ptr() for tensor in given]
        if given and (self._inner_batch is None or self._inner_batch.untyped_storage().data_ptr() not in places):
            self._rows[self._begin :] = record_rows(max(given, key=lambda tensor: tensor.numel()))

    def _is_model(self, module: Any) -> bool:
        return any(each is module for each in self._models)

    def _add_model(self, model: Any) -> None:
        known = {id(module) for each in self._models for module in each.modules()}
        if id(model) in known:
            return
        parts = {id(module) for module in model.modules()}  # which may have been called directly before
        self._models = [*(each for each in self._models if id(each) not in parts), model]
        self.has_low_precision |= _has_low_precision(model)


def _is_data(value: Any) -> bool:
    """Is this a tensor with rows? One that requires a gradient was computed, for example by another model."""
    import torch

    return isinstance(value, torch.Tensor) and value.ndim > 0 and not value.requires_grad


def _random_state() -> list[Any]:
    import torch

    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def _is_equal(before: list[Any], after: list[Any]) -> bool:
    return all(bool((left == right).all()) for left, right in zip(before, after, strict=False))


def _has_low_precision(model: Any) -> bool:
    """Has this model parameters of less than fp32, or may it use TF32?"""
    import torch

    parameters = list(model.parameters())
    if any(parameter.is_floating_point() and parameter.element_size() < 4 for parameter in parameters):
        return True
    if not any(parameter.is_cuda for parameter in parameters):
        return False
    has_convolutions = any("Conv" in type(module).__name__ for module in model.modules())
    try:
        is_allowed = torch.get_float32_matmul_precision() != "highest"
        return is_allowed or (has_convolutions and torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the script has set it through torch's newer names, which these refuse
        return True


def _mixes_or_draws(module: Any) -> bool:
    """Is this a layer, in training, that mixes the samples of a batch, or draws random numbers?"""
    kind = type(module).__name__
    if not module.training:
        return False
    if "Dropout" in kind:
        return bool(getattr(module, "p", 1) != 0)
    return ("BatchNorm" in kind and "Sync" not in kind) or (
        isinstance(getattr(module, "dropout", None), float) and module.dropout > 0
    )


def _settings(optimizer: Any) -> dict[str, str]:
    """Return what scales the update of each group of parameters: numbers, separated by spaces."""
    settings = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, name in _SETTINGS.items():
            values = group[key] if isinstance(group.get(key), tuple | list) else [group.get(key)]
            if all(hasattr(value, "__float__") for value in values):
                settings[f"{name} {number}"] = " ".join(repr(float(value)) for value in values)
    return settings


def _full_tensor_on_cpu(tensor: Any) -> Any:
    """Copy a tensor to the CPU, gathering a DTensor (FSDP, a mesh): all ranks call this in the same order."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return (tensor.to_dense() if tensor.is_sparse else tensor).cpu().contiguous()


def _some_values(tensor: Any) -> Any:
    """Return all values, or `MAX_KEPT_VALUES` of them, evenly spaced."""
    import torch

    flat = tensor.reshape(-1)
    if flat.numel() > MAX_KEPT_VALUES:
        flat = flat[torch.linspace(0, flat.numel() - 1, MAX_KEPT_VALUES, dtype=torch.float64).long()]
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    return flat.clone()
