"""Load weights from a run, a checkpoint or a file into any model, and export them as one file.

A wrapper adds its own component to every name below it: `module` (DataParallel, DistributedDataParallel), `_orig_mod`
(torch.compile). Names are compared without these, so wrapped and bare models take each other's weights.
"""

import logging
import os
import re
import stat
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.checkpoint import durable_files
from lockstep.checkpoint.checkpoint_store import best_checkpoint, latest_checkpoint, load_weights
from lockstep.checkpoint.manifest import MANIFEST, CheckpointError
from lockstep.engine.compiled_models import without_wrapper_names
from lockstep.engine.torch_internals import COMPILED_CHILD
from lockstep.errors import UserError

logger = logging.getLogger("lockstep")

StrPath = str | os.PathLike[str]

_SAFETENSORS = ".safetensors"
_PICKLES = (".pt", ".pth", ".bin")
_USUAL_KEYS = ("state_dict", "model_state_dict", "model", "module")
_WRAPPERS = ("module", COMPILED_CHILD)

_MAX_LISTED = 10
_MAX_CHARACTERS = 120


def load_checkpoint(
    model: nn.Module,
    source: StrPath,
    *,
    weights: str = "model",
    best: bool = False,
    strict: bool = True,
    pickled: bool = False,
    device: str | torch.device | None = None,
) -> None:
    """Copy saved weights into `model`, wrapped or not. If they do not fit, the model stays as it was.

    Args:
        model: the model. Its tensors keep their device, dtype and `requires_grad`.
        source: a run folder, a checkpoint's folder, a `.safetensors` file, or with `pickled=True` a `.pt`, `.pth` or
            `.bin` file.
        weights: which part of the checkpoint: `"model"`, or `"average"` for the EMA.
        best: take the run folder's best checkpoint instead of its latest.
        strict: if False, load what fits and log the rest.
        pickled: read pickle files. Only tensors and plain containers are accepted; nothing in them is executed.
        device: move the model there once it is loaded.

    Example:
        >>> model = make_model()
        >>> lockstep.load_checkpoint(model, "runs/mine", best=True)
    """
    state = model.state_dict(keep_vars=True)  # the tensors themselves, so that tied ones can be recognized
    own = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    _check_ready(own.values(), device)
    place, found = _read(source, weights, best=best, pickled=pickled)
    fit = _fit(own, found, place)
    if fit.misfits and strict:
        misfits = "\n".join(f"  {line}" for line in fit.misfits)
        raise UserError(f"{place} does not fit the model; pass strict=False to load what does\n{misfits}")
    if fit.misfits:
        logger.warning("%s: loaded %d of %d; %s", place, len(fit.tensors), len(own), "; ".join(fit.misfits))
    # Tensors that are not loaded get their own value again: modules see a complete state of their current version.
    state.update(fit.tensors)
    model.load_state_dict(state)
    if device is not None:
        model.to(device)


def export_weights(
    source: StrPath,
    target: StrPath,
    *,
    weights: str = "model",
    best: bool = False,
    pickled: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write weights as a plain state dict to one file, and return its path.

    The file appears whole or not at all, and only you can read it (mode 0600). Its names are those of the bare model,
    even if the weights were saved by a model that torch.compile has wrapped.

    Args:
        source: as for `load_checkpoint`.
        target: a file name that ends in `.safetensors`, `.pt`, `.pth` or `.bin`, which decides the format.
        weights: as for `load_checkpoint`. An average comes with the model's buffers.
        best: take the run folder's best checkpoint instead of its latest.
        pickled: read pickle files, as for `load_checkpoint`.
        overwrite: replace `target` if it exists.
    """
    path = Path(target)
    if path.suffix not in (_SAFETENSORS, *_PICKLES):
        raise UserError(f"{path}: expected a file name that ends in {_SAFETENSORS} or {' or '.join(_PICKLES)}")
    if not overwrite and os.path.lexists(path):
        raise UserError(f"{path} exists: choose another name, or pass overwrite=True")
    _, found = _read(source, weights, best=best, pickled=pickled)
    names = _without_compile_wrappers(found)
    # Copies: safetensors refuses tied tensors, which share memory, and torch.save would write a view's whole storage.
    tensors = {
        names[name]: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in found.items()
    }
    try:
        _write_whole(path, tensors)
    except (OSError, SafetensorError, RuntimeError) as error:  # each library reports a full disk in its own way
        raise UserError(f"cannot write {path}: {_reason(error)}") from None
    return path


def _check_ready(tensors: Iterable[Tensor], device: str | torch.device | None) -> None:
    for tensor in tensors:
        if is_lazy(tensor):
            raise UserError("the model has lazy modules that have no weights yet: run a batch through it first")
        if tensor.is_meta:
            raise UserError("the model is on the meta device: call model.to_empty(device=…) before loading weights")
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"device={str(device)[:40]!r} cannot be used: {_reason(error)}") from None


def _read(source: StrPath, weights: str, *, best: bool, pickled: bool) -> tuple[Path, dict[str, Tensor]]:
    """Return the file or checkpoint that `source` refers to, and the weights in it."""
    path = Path(source)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            checkpoint = _checkpoint_in(path, best=best)
            return checkpoint, _from_checkpoint(checkpoint, weights)
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
            raise UserError(f"{path} is neither a file nor a folder")
        if best or weights != "model":
            raise UserError(f"{path} is a single file: best= and weights= choose within a run folder or a checkpoint")
        if path.suffix == _SAFETENSORS:
            return path, load_file(path)
        if path.suffix in _PICKLES:
            if not pickled:
                raise UserError(
                    f"{path} is a pickle, which can contain code: pass pickled=True to read it if it holds only tensors"
                )
            return path, _from_pickle(path, status.st_size)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file: {_reason(error)}") from None
    except (OSError, ValueError) as error:  # ValueError: the path contains a null character
        raise UserError(f"cannot read {_printable(str(path))}: {_reason(error)}") from None
    raise UserError(f"{path}: expected a folder, or a file that ends in {_SAFETENSORS} or {' or '.join(_PICKLES)}")


def _checkpoint_in(folder: Path, *, best: bool) -> Path:
    checkpoints = folder / "checkpoints"
    if (folder / MANIFEST).exists():
        if best:
            raise UserError(f"{folder} is one checkpoint: best=True chooses among a run folder's")
        return folder
    if not checkpoints.is_dir():
        raise UserError(f"{folder} is neither a run folder (with checkpoints/) nor a checkpoint (with {MANIFEST})")
    found = best_checkpoint(checkpoints) if best else latest_checkpoint(checkpoints)
    if found is None:
        raise UserError(f"{folder} has no {'best ' if best else ''}checkpoint yet")
    return found


def _from_checkpoint(checkpoint: Path, weights: str) -> dict[str, Tensor]:
    """Load a checkpoint's weights. An average holds only parameters: its buffers are the model's."""
    tensors = load_weights(checkpoint, weights)
    if not weights.startswith("average"):
        return tensors
    tensors.pop("num_updates", None)
    model = load_weights(checkpoint, weights.replace("average", "model", 1))
    if unknown := [name for name in tensors if name not in model]:
        raise CheckpointError(f"{checkpoint}: {weights} has names that its model does not have: {_listed(unknown)}")
    return model | {name: tensor.to(model[name].dtype) for name, tensor in tensors.items()}


def _from_pickle(path: Path, num_bytes: int) -> dict[str, Tensor]:
    """Read the state dict from an untrusted file with torch's restricted reader: tensors and plain containers."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                # torch.save never compresses. A small file that unpacks to a huge one is meant to fill the memory.
                if sum(entry.file_size for entry in archive.infolist()) > num_bytes:
                    raise CheckpointError(f"{path} is refused: it is compressed, which torch.save never does")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # torch raises many types for bytes that are not a state dict; nothing was executed
        found = re.search(r"GLOBAL (\S+)", str(error))
        why = (
            f"it contains {_printable(found[1])}, which is not a tensor"
            if found
            else "it is damaged, or has no weights"
        )
        raise CheckpointError(f"{path} is refused: {why}") from None
    tensors = _state_dict_in(content, path)
    unusual = [name for name, tensor in tensors.items() if not _is_plain(tensor) or tensor.nbytes > num_bytes]
    if unusual:
        raise CheckpointError(f"{path} is refused: these are not ordinary tensors: {_listed(unusual)}")
    return tensors


def _state_dict_in(content: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a state dict, got {type(content).__name__}")
    nested = [key for key in _USUAL_KEYS if isinstance(content.get(key), dict)]
    if len(nested) > 1:
        raise CheckpointError(
            f"{path} has several state dicts: {_listed(nested)}; save the one to load in a separate file"
        )
    found = content[nested[0]] if nested else content
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()):
        keys = _listed([str(key) for key in content])
        raise CheckpointError(f"{path}: no state dict at the top or under {', '.join(_USUAL_KEYS)}; its keys: {keys}")
    return {name: tensor.detach() for name, tensor in found.items()}


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
    )


@dataclass(frozen=True)
class _Fit:
    """How weights fit a model."""

    tensors: dict[str, Tensor]  # what can be loaded, by the model's names
    misfits: list[str]  # a line for each kind of misfit


def _fit(own: Mapping[str, Tensor], found: Mapping[str, Tensor], place: Path) -> _Fit:
    pairs = _paired(own, found, place)
    tensors: dict[str, Tensor] = {}
    first_names: dict[int, str] = {}  # by the id of the model's tensor: tied ones have several names
    different: list[str] = []
    untied: list[str] = []
    for name, their_name in pairs.items():
        mine, theirs = own[name], found[their_name]
        first = first_names.get(id(mine), name)
        if mine.shape != theirs.shape or not torch.can_cast(theirs.dtype, mine.dtype):
            different.append(f"{_printable(name)} is {_describe(theirs)} in the source, {_describe(mine)} in the model")
        elif first != name and not _same_bits(tensors[first], theirs):
            untied.append(f"{_printable(name)} and {_printable(first)}")
        else:
            first_names.setdefault(id(mine), name)
            tensors[name] = theirs
    missing = [name for name in own if name not in pairs and id(own[name]) not in first_names]
    taken = set(pairs.values())
    unexpected = [name for name in found if name not in taken]
    kinds = {
        "missing": _listed(missing),
        "unexpected": _listed(unexpected),
        "shape or dtype differs": _counted(different),
        "tied in the model, but not in the source": _counted(untied),
    }
    return _Fit(tensors, [f"{kind}: {what}" for kind, what in kinds.items() if what])


def _paired(own: Collection[str], found: Collection[str], place: Path) -> dict[str, str]:
    """Map the model's names to the names of the same tensors in the source."""
    groups: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, names in enumerate((own, found)):
        for name in names:
            groups[_bare(name)][side].append(name)
    own_inner, found_inner = _without_outer_wrapper(own), _without_outer_wrapper(found)
    pairs: dict[str, str] = {}
    for mine, theirs in groups.values():
        if len(mine) == len(theirs) == 1:
            pairs[mine[0]] = theirs[0]
        elif set(mine) == set(theirs):
            pairs |= dict(zip(mine, mine, strict=True))
        elif mine and theirs:
            # The model itself has both an `x` and a `module.x`: only an outermost wrapper can be recognized.
            inner = {found_inner[name]: name for name in theirs}
            is_clear = len(inner) == len(theirs) == len(mine) and inner.keys() == {own_inner[name] for name in mine}
            if not is_clear:
                raise UserError(f"{place}: cannot tell which of {_listed(theirs)} is the model's {_listed(mine)}")
            pairs |= {name: inner[own_inner[name]] for name in mine}
    return pairs


def _bare(name: str) -> str:
    """Remove the components that wrappers added; the last component is the tensor's own name in any case."""
    *modules, tensor = name.split(".")
    return ".".join([*(module for module in modules if module not in _WRAPPERS), tensor])


def _without_outer_wrapper(names: Iterable[str]) -> dict[str, str]:
    """Map each name to itself without `_orig_mod`, and without a leading `module` if all names have one."""
    paths = {name: [module for module in name.split(".") if module != COMPILED_CHILD] for name in names}
    while paths and all(len(path) > 1 and path[0] == "module" for path in paths.values()):
        paths = {name: path[1:] for name, path in paths.items()}
    return {name: ".".join(path) for name, path in paths.items()}


def _without_compile_wrappers(names: Collection[str]) -> dict[str, str]:
    """Map each name to itself without `_orig_mod`, or to itself if two tensors would get the same name."""
    plain = {name: without_wrapper_names(name) for name in names}
    return plain if len(set(plain.values())) == len(names) else {name: name for name in names}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


def _write_whole(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write through a private folder beside the target: the libraries choose the file mode themselves."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        draft = Path(folder) / path.name
        if path.suffix == _SAFETENSORS:
            save_file(tensors, draft)
        else:
            torch.save(tensors, draft)
        draft.chmod(0o600)
        durable_files.flush(draft)
        durable_files.rename(draft, path)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _listed(names: Iterable[str]) -> str:
    return _counted([_printable(name) for name in names])


def _counted(words: Sequence[str]) -> str:
    """List the first few, and say how many more there are."""
    shown = ", ".join(words[:_MAX_LISTED])
    return f"{shown} and {len(words) - _MAX_LISTED} more" if len(words) > _MAX_LISTED else shown


def _printable(text: str) -> str:
    """Show text from an untrusted file on one line of bounded length."""
    short = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
    return short if short.isprintable() else ascii(short)


def _reason(error: Exception) -> str:
    """Return the message of a library or of the system, in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return _printable(text)
