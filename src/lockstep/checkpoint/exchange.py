"""Weights in and out: from a run, a checkpoint or a file into any model; and into one file, for use without lockstep.

A wrapper puts its own part into every name below it: `module` (DataParallel, DistributedDataParallel), `_orig_mod`
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

from lockstep.checkpoint import disk
from lockstep.checkpoint.manifest import MANIFEST, CheckpointError
from lockstep.checkpoint.store import best_checkpoint, latest_checkpoint, load_weights
from lockstep.errors import UserError

logger = logging.getLogger("lockstep")

Source = str | os.PathLike[str]

_SAFETENSORS = ".safetensors"
_PICKLES = (".pt", ".pth", ".bin")
_USUAL_KEYS = ("state_dict", "model_state_dict", "model", "module")
_WRAPPERS = ("module", "_orig_mod")

_MOST_SHOWN = 10
_MOST_CHARACTERS = 120


def load_checkpoint(
    model: nn.Module,
    source: Source,
    *,
    weights: str = "model",
    best: bool = False,
    strict: bool = True,
    pickled: bool = False,
    device: str | torch.device | None = None,
) -> None:
    """Copy saved weights into `model`, wrapped or not; if they do not fit, it stays as it was.

    `source`: a run folder (its latest checkpoint, or the `best`), a checkpoint's folder, a `.safetensors` file, or with
    `pickled=True` a `.pt`, `.pth` or `.bin` file. `weights="average"` takes the moving average. `strict=False` loads
    what fits and logs the rest. The model's tensors keep their device and type; `device` moves the model afterwards.
    """
    state = model.state_dict(keep_vars=True)  # the tensors themselves, so that tied ones can be told
    own = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    _check_ready(own.values(), device)
    place, found = _read(source, weights, best=best, pickled=pickled)
    fit = _fit(own, found, place)
    if fit.misfits and strict:
        told = "\n".join(f"  {line}" for line in fit.misfits)
        raise UserError(f"{place} does not fit the model; strict=False would load what does\n{told}")
    if fit.misfits:
        logger.warning("%s: loaded %d of %d; %s", place, len(fit.tensors), len(own), "; ".join(fit.misfits))
    # What is not loaded is given its own value again: modules see a whole state of their present version.
    state.update(fit.tensors)
    model.load_state_dict(state)
    if device is not None:
        model.to(device)


def export_weights(
    source: Source,
    target: Source,
    *,
    weights: str = "model",
    best: bool = False,
    pickled: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write weights as one `.safetensors` or `.pt` file, a plain state dict; the sources are `load_checkpoint`'s.

    The file is there whole or not at all, and for its owner's eyes only.
    """
    path = Path(target)
    if path.suffix not in (_SAFETENSORS, *_PICKLES):
        raise UserError(f"{path}: expected a file name that ends in {_SAFETENSORS} or {' or '.join(_PICKLES)}")
    if not overwrite and os.path.lexists(path):
        raise UserError(f"{path} exists: choose another name, or overwrite=True")
    _, found = _read(source, weights, best=best, pickled=pickled)
    # Copies: tied tensors share memory, which safetensors refuses, and a small view would drag its whole storage along.
    own = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}
    try:
        _write_whole(path, own)
    except (OSError, SafetensorError, RuntimeError) as error:  # each library reports a full disk in its own way
        raise UserError(f"cannot write {path}: {_reason(error)}") from None
    return path


def _check_ready(tensors: Iterable[Tensor], device: str | torch.device | None) -> None:
    for tensor in tensors:
        if is_lazy(tensor):
            raise UserError("the model has lazy modules without weights yet: run a batch through it first")
        if tensor.is_meta:
            raise UserError("the model is on the meta device: call model.to_empty(device=…) before loading weights")
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"device={str(device)[:40]!r} cannot be used: {_reason(error)}") from None


def _read(source: Source, weights: str, *, best: bool, pickled: bool) -> tuple[Path, dict[str, Tensor]]:
    """Where the weights really are, and the weights."""
    path = Path(source)
    try:
        facts = path.stat()
        if stat.S_ISDIR(facts.st_mode):
            checkpoint = _checkpoint_in(path, best=best)
            return checkpoint, _from_checkpoint(checkpoint, weights)
        if not stat.S_ISREG(facts.st_mode):  # reading a pipe would wait forever
            raise UserError(f"{path} is neither a file nor a folder")
        if best or weights != "model":
            raise UserError(f"{path} is a single file: best= and weights= choose within a run folder or a checkpoint")
        if path.suffix == _SAFETENSORS:
            return path, load_file(path)
        if path.suffix in _PICKLES:
            if not pickled:
                raise UserError(
                    f"{path} is a pickle, a format that can carry code: pickled=True reads it if it holds tensors alone"
                )
            return path, _from_pickle(path, facts.st_size)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {_reason(error)}") from None
    except (OSError, ValueError) as error:  # a ValueError is a path that cannot be one
        raise UserError(f"cannot read {_shown(str(path))}: {_reason(error)}") from None
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
    """An average's file holds averaged parameters alone: all else is as in its model's file."""
    tensors = load_weights(checkpoint, weights)
    if not weights.startswith("average"):
        return tensors
    tensors.pop("num_updates", None)
    model = load_weights(checkpoint, weights.replace("average", "model", 1))
    if strange := [name for name in tensors if name not in model]:
        raise CheckpointError(f"{checkpoint}: {weights} has names that its model has not: {_listed(strange)}")
    return model | {name: tensor.to(model[name].dtype) for name, tensor in tensors.items()}


def _from_pickle(path: Path, num_bytes: int) -> dict[str, Tensor]:
    """The state dict in a file that somebody else may have made; torch reads tensors and plain containers alone."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                # torch compresses nothing; a few bytes that unpack to very many are meant to fill the memory.
                if sum(entry.file_size for entry in archive.infolist()) > num_bytes:
                    raise CheckpointError(f"{path} is refused: it is compressed, as torch.save never does")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # whatever torch makes of bytes that are not a state dict; none of them were executed
        carried = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it carries {_shown(carried[1])}, no tensor" if carried else "it is damaged, or holds no weights"
        raise CheckpointError(f"{path} is refused: {why}") from None
    tensors = _state_dict_in(content, path)
    odd = [name for name, tensor in tensors.items() if not _is_plain(tensor) or tensor.nbytes > num_bytes]
    if odd:
        raise CheckpointError(f"{path} is refused: these are not ordinary tensors: {_listed(odd)}")
    return tensors


def _state_dict_in(content: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a state dict, got {type(content).__name__}")
    nested = [key for key in _USUAL_KEYS if isinstance(content.get(key), dict)]
    if len(nested) > 1:
        raise CheckpointError(f"{path} has several state dicts: {_listed(nested)}; save the one you mean alone")
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
    """What can be loaded, by the model's names; and a line for each kind of thing that cannot."""

    tensors: dict[str, Tensor]
    misfits: list[str]


def _fit(own: Mapping[str, Tensor], found: Mapping[str, Tensor], place: Path) -> _Fit:
    pairs = _paired(own, found, place)
    tensors: dict[str, Tensor] = {}
    first_names: dict[int, str] = {}  # of the model's tensors that are loaded: tied ones have several names
    different: list[str] = []
    torn: list[str] = []
    for name, their_name in pairs.items():
        mine, theirs = own[name], found[their_name]
        first = first_names.get(id(mine), name)
        if mine.shape != theirs.shape or not torch.can_cast(theirs.dtype, mine.dtype):
            different.append(f"{_shown(name)} is {_kind(theirs)} there, {_kind(mine)} here")
        elif first != name and not _same_bits(tensors[first], theirs):
            torn.append(f"{_shown(name)} and {_shown(first)}")
        else:
            first_names.setdefault(id(mine), name)
            tensors[name] = theirs
    missing = [name for name in own if name not in pairs and id(own[name]) not in first_names]
    taken = set(pairs.values())
    unexpected = [name for name in found if name not in taken]
    kinds = {
        "missing there": _listed(missing),
        "not in the model": _listed(unexpected),
        "of another shape or type": _counted(different),
        "one tensor in the model, two values there": _counted(torn),
    }
    return _Fit(tensors, [f"{kind}: {what}" for kind, what in kinds.items() if what])


def _paired(own: Collection[str], found: Collection[str], place: Path) -> dict[str, str]:
    """From the model's names to those that mean the same in the source."""
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
            # A model with an `x` and a `module.x` of its own. Only what wraps the whole can be told from that.
            inner = {found_inner[name]: name for name in theirs}
            is_clear = len(inner) == len(theirs) == len(mine) and inner.keys() == {own_inner[name] for name in mine}
            if not is_clear:
                raise UserError(f"{place}: cannot tell which of {_listed(theirs)} is the model's {_listed(mine)}")
            pairs |= {name: inner[own_inner[name]] for name in mine}
    return pairs


def _bare(name: str) -> str:
    """Without what wrappers put in; the last part is the tensor's own, whatever it is called."""
    *modules, tensor = name.split(".")
    return ".".join([*(part for part in modules if part not in _WRAPPERS), tensor])


def _without_outer_wrapper(names: Iterable[str]) -> dict[str, str]:
    """Each name without `_orig_mod`, which nothing else is called, and without a leading `module` that all have."""
    parts = {name: [part for part in name.split(".") if part != "_orig_mod"] for name in names}
    while parts and all(len(each) > 1 and each[0] == "module" for each in parts.values()):
        parts = {name: each[1:] for name, each in parts.items()}
    return {name: ".".join(each) for name, each in parts.items()}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


def _write_whole(path: Path, tensors: dict[str, Tensor]) -> None:
    """Through a private folder beside the target: both libraries write where they like, with the mode they like."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        draft = Path(folder) / path.name
        if path.suffix == _SAFETENSORS:
            save_file(tensors, draft)
        else:
            torch.save(tensors, draft)
        draft.chmod(0o600)
        disk.flush(draft)
        disk.rename(draft, path)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _listed(names: Iterable[str]) -> str:
    return _counted([_shown(name) for name in names])


def _counted(words: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    shown = ", ".join(words[:_MOST_SHOWN])
    return f"{shown} and {len(words) - _MOST_SHOWN} more" if len(words) > _MOST_SHOWN else shown


def _shown(text: str) -> str:
    """Text that may come from a file that somebody else made, on one line of bounded length."""
    short = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    return short if short.isprintable() else ascii(short)


def _reason(error: Exception) -> str:
    """What a library or the system says, in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return _shown(text)
