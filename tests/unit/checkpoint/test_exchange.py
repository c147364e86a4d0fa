"""Weights go from runs, checkpoints and files into any model, or the model stays as it was; and out into one file."""

import json
import logging
import os
import pickle
import re
import resource
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lockstep
from lockstep.checkpoint.exchange import export_weights
from lockstep.errors import LockstepError, UserError
from lockstep.train.average import MovingAverage
from tests import checkpoints

ROOT = Path(__file__).parents[3]

Save = Callable[..., Path]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def save(run_folder: Path) -> Save:
    """Commit a checkpoint of the run folder: `save(3, model=model.state_dict(), is_best=True)`."""

    def commit(step: int, *, is_best: bool = False, **tensors: Mapping[str, Tensor]) -> Path:
        run_folder.mkdir(exist_ok=True)
        return checkpoints.save(run_folder / "checkpoints", step, tensors, is_best=is_best)

    return commit


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].running_mean.normal_()  # type: ignore[union-attr,operator]
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def partly_compiled(model: nn.Module) -> nn.Module:
    model[0] = compiled(model[0])  # type: ignore[index,operator]
    return model


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda model: model,
    "data parallel": data_parallel,
    "compiled": compiled,
    "partly compiled": partly_compiled,
    "compiled inside": lambda model: data_parallel(compiled(model)),
    "compiled outside": lambda model: compiled(data_parallel(model)),
    "wrapped twice": lambda model: data_parallel(data_parallel(partly_compiled(model))),
}


def values(state: Mapping[str, Tensor]) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in state.values()]


def same(one: nn.Module, other: nn.Module) -> bool:
    return values(one.state_dict()) == values(other.state_dict())


def message_of(attempt: Callable[[], object]) -> str:
    with pytest.raises(LockstepError) as caught:
        attempt()
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


def line_of(attempt: Callable[[], object]) -> str:
    line = message_of(attempt)
    assert "\n" not in line and len(line) < 600
    return line


# Sources


def test_a_run_folder_means_its_latest_or_its_best_checkpoint(run_folder: Path, save: Save) -> None:
    best, latest = make_model(1), make_model(2)
    save(3, model=best.state_dict(), is_best=True)
    save(7, model=latest.state_dict())
    model = make_model()
    lockstep.load_checkpoint(model, str(run_folder))
    assert same(model, latest)
    lockstep.load_checkpoint(model, run_folder, best=True)
    assert same(model, best)
    lockstep.load_checkpoint(model, run_folder / "checkpoints" / "step-7")
    assert same(model, latest)
    lockstep.load_checkpoint(model, run_folder / "checkpoints" / "step-3" / "model.safetensors")
    assert same(model, best)


def test_what_a_source_lacks_is_said(run_folder: Path, save: Save, tmp_path: Path) -> None:
    model = make_model()
    (run_folder / "checkpoints").mkdir(parents=True)
    assert "has no checkpoint yet" in line_of(lambda: lockstep.load_checkpoint(model, run_folder))
    saved = save(1, model=model.state_dict())
    assert "has no best checkpoint" in line_of(lambda: lockstep.load_checkpoint(model, run_folder, best=True))
    assert "best=True" in line_of(lambda: lockstep.load_checkpoint(model, saved, best=True))
    assert "average.safetensors" in line_of(lambda: lockstep.load_checkpoint(model, saved, weights="average"))
    file = saved / "model.safetensors"
    assert "single file" in line_of(lambda: lockstep.load_checkpoint(model, file, weights="average"))
    assert "neither a run folder" in line_of(lambda: lockstep.load_checkpoint(model, tmp_path))


def test_a_damaged_checkpoint_is_not_loaded(save: Save) -> None:
    saved = save(1, model=make_model(1).state_dict())
    data = bytearray((saved / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (saved / "model.safetensors").write_bytes(data)
    model = make_model()
    assert "hash" in line_of(lambda: lockstep.load_checkpoint(model, saved))
    assert same(model, make_model())


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
@pytest.mark.parametrize("key", [None, "state_dict", "model_state_dict", "model", "module"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_state_dicts_in_pickles(tmp_path: Path, suffix: str, key: str | None, is_zip: bool) -> None:
    source = make_model(1)
    content = source.state_dict() if key is None else {"epoch": 3, "loss": torch.ones(()), key: source.state_dict()}
    path = tmp_path / f"theirs{suffix}"
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    model = make_model()
    assert "pickled=True" in line_of(lambda: lockstep.load_checkpoint(model, path))
    assert same(model, make_model())
    lockstep.load_checkpoint(model, path, pickled=True)
    assert same(model, source)


def test_pickled_parameters_that_want_gradients(tmp_path: Path) -> None:
    source, model = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.save(dict(source.named_parameters()), tmp_path / "theirs.pt")
    lockstep.load_checkpoint(model, tmp_path / "theirs.pt", pickled=True)
    assert same(model, source)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"weights": {"x": torch.ones(1)}, "epoch": 1}, "its keys: weights, epoch"),
        ({"model": {"x": torch.ones(1)}, "module": {"x": torch.ones(1)}}, "several state dicts: model, module"),
        ({"state_dict": {"x": [1.0]}}, "its keys: state_dict"),
        ({1: torch.ones(1)}, "its keys: 1"),
        ({f"key{number}": number for number in range(5000)}, "key9 and 4990 more"),
        ({"\x1b[31m\n" * 1000: 1}, "\\x1b[31m"),
        ([torch.ones(1)], "got list"),
        ({"x": torch.ones(4).to_sparse()}, "not ordinary tensors: x"),
        ({"x": torch.empty(4, device="meta")}, "not ordinary tensors: x"),
        ({"x": torch.ones(1).expand(2**50)}, "not ordinary tensors: x"),
    ],
)
def test_other_contents_of_a_pickle_are_refused(tmp_path: Path, content: object, expected: str) -> None:
    torch.save(content, tmp_path / "theirs.pt")
    load = lambda: lockstep.load_checkpoint(nn.Linear(1, 1), tmp_path / "theirs.pt", pickled=True)  # noqa: E731
    assert expected in message_of(load)
    assert "\n" not in message_of(load) and len(message_of(load)) < 600


# Names


@pytest.mark.parametrize(("inside", "outside"), list(product(WRAPPINGS, repeat=2)))
def test_wrapped_and_bare_models_take_each_others_weights(save: Save, inside: str, outside: str) -> None:
    source = WRAPPINGS[inside](make_model(1))
    save(1, model=source.state_dict())
    model = WRAPPINGS[outside](make_model())
    lockstep.load_checkpoint(model, save(1, model=source.state_dict()))
    assert same(model, source)


class Own(nn.Module):
    """Its own modules are called as wrappers call theirs."""

    def __init__(self, *, both: bool = False, only: bool = False) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        if not only:
            self.other = nn.Linear(2, 2)
        if both:
            self.weight = nn.Parameter(torch.randn(2, 2))


class NamedModule(nn.Module):
    """A parameter, not a module, that is called `module`; another called `_orig_mod`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Parameter(torch.randn(3))
        self._orig_mod = nn.Parameter(torch.randn(3))


OWN_NAMES: dict[str, Callable[[], nn.Module]] = {
    "beside another": Own,
    "alone": lambda: Own(only=True),
    "beside the same name": lambda: Own(both=True),
    "a parameter": NamedModule,
}


@pytest.mark.parametrize("kind", OWN_NAMES)
@pytest.mark.parametrize(("inside", "outside"), list(product(["bare", "data parallel", "compiled inside"], repeat=2)))
def test_a_model_with_modules_called_module(save: Save, kind: str, inside: str, outside: str) -> None:
    source, model = WRAPPINGS[inside](OWN_NAMES[kind]()), WRAPPINGS[outside](OWN_NAMES[kind]())
    assert not same(model, source)
    lockstep.load_checkpoint(model, save(1, model=source.state_dict()))
    assert same(model, source)


def model_of(names: list[str]) -> nn.Module:
    model = nn.Module()
    for name in names:
        *path, last = name.split(".")
        module = model
        for part in path:
            module.add_module(part, getattr(module, part, nn.Module()))
            module = getattr(module, part)
        module.register_buffer(last, torch.zeros(1))
    return model


def test_equal_names_are_equal_also_where_others_are_missing(save: Save) -> None:
    model = model_of(["module.x", "module.module.x", "y"])
    saved = save(1, model={"module.x": torch.ones(1), "module.module.x": torch.full((1,), 2.0)})
    assert "missing there: y" in message_of(lambda: lockstep.load_checkpoint(model, saved))
    lockstep.load_checkpoint(model, saved, strict=False)
    assert {name: tensor.item() for name, tensor in model.state_dict().items()} == {
        "module.x": 1.0,
        "module.module.x": 2.0,
        "y": 0.0,
    }


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (["x"], ["x", "module.x"]),
        (["x"], ["x", "_orig_mod.x"]),
        (["x", "module.x"], ["module.x"]),
        (["a.x", "a.module.x", "y"], ["a.module.module.x", "a.module.x", "y"]),
    ],
)
def test_two_readings_are_an_error_and_no_guess(save: Save, strict: bool, own: list[str], theirs: list[str]) -> None:
    model = model_of(own)
    saved = save(1, model={name: torch.ones(1) for name in theirs})
    assert "cannot tell which of" in line_of(lambda: lockstep.load_checkpoint(model, saved, strict=strict))
    assert not any(tensor.any() for tensor in model.state_dict().values())


# Fit


def test_all_misfits_are_said_at_once_and_the_model_stays(save: Save) -> None:
    state = make_model(1).state_dict()
    del state["0.bias"]
    state["2.weight"] = torch.ones(5, 2)
    state["1.num_batches_tracked"] = torch.ones(())  # a count would lose its fraction
    state["2.bias"] = torch.ones(2, dtype=torch.complex64)
    saved = save(1, model=state | {"extra": torch.ones(1)})
    model = make_model()
    with pytest.raises(UserError) as caught:
        lockstep.load_checkpoint(model, saved)
    assert str(caught.value).splitlines() == [
        f"{saved} does not fit the model; strict=False would load what does",
        "  missing there: 0.bias",
        "  not in the model: extra",
        "  of another shape or type: 1.num_batches_tracked is float32 [] there, int64 [] here, 2.weight is float32 "
        "[5, 2] there, float32 [2, 2] here, 2.bias is complex64 [2] there, float32 [2] here",
    ]
    assert same(model, make_model())


def test_very_many_misfits_are_counted(save: Save) -> None:
    saved = save(1, model={f"extra{number}": torch.ones(1) for number in range(1000)} | {"\n\x1b" * 500: torch.ones(1)})
    message = message_of(lambda: lockstep.load_checkpoint(make_model(), saved))
    assert "and 991 more" in message and len(message) < 3000
    assert all(line.isprintable() for line in message.splitlines())


def test_not_strict_loads_what_fits_and_logs_the_rest(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    source = make_model(1)
    state = source.state_dict()
    del state["0.bias"]
    state["2.weight"] = torch.ones(5, 2)
    model = make_model()
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        lockstep.load_checkpoint(model, save(1, model=state), strict=False)
    (record,) = caplog.records
    assert record.name == "lockstep"
    assert "loaded 7 of 9; missing there: 0.bias; of another shape or type: 2.weight" in record.message
    loaded, before, after = source.state_dict(), make_model().state_dict(), model.state_dict()
    for name in after:
        assert torch.equal(after[name], (before if name in ("0.bias", "2.weight") else loaded)[name])


def test_tensors_keep_their_identity_type_and_gradient(save: Save) -> None:
    source = make_model(1)
    model = make_model().to(torch.float64)
    model[0].requires_grad_(False)
    tensors = [*model.parameters(), *model.buffers()]
    pointers = [tensor.data_ptr() for tensor in tensors]
    lockstep.load_checkpoint(model, save(1, model=source.state_dict()), device="cpu")
    assert all(one is other for one, other in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
    assert [tensor.data_ptr() for tensor in tensors] == pointers
    assert [p.dtype for p in model.parameters()] == [torch.float64] * 6
    assert [p.requires_grad for p in model.parameters()] == [False] * 2 + [True] * 4
    assert same(model, source.to(torch.float64))


def test_the_model_is_moved_to_the_device_once_it_is_loaded(save: Save) -> None:
    model = make_model()
    lockstep.load_checkpoint(model, save(1, model=make_model(1).state_dict()), device="meta")
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_models_that_cannot_be_loaded_into(save: Save) -> None:
    saved = save(1, model=nn.Linear(3, 2).state_dict())
    assert "run a batch" in line_of(lambda: lockstep.load_checkpoint(nn.LazyLinear(2), saved))
    assert "to_empty" in line_of(lambda: lockstep.load_checkpoint(nn.Linear(3, 2, device="meta"), saved))


def test_a_device_that_is_not_there_changes_nothing(save: Save) -> None:
    saved = save(1, model=make_model(1).state_dict())
    model = make_model()
    assert "cuda:99" in line_of(lambda: lockstep.load_checkpoint(model, saved, device="cuda:99"))
    assert "toaster" in line_of(lambda: lockstep.load_checkpoint(model, saved, device="toaster"))
    assert same(model, make_model())


class Versioned(nn.Module):
    """Upgrades what an earlier version saved, and has state that is no tensor."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(2))

    def get_extra_state(self) -> dict[str, int]:
        return {"mine": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"mine": 1}

    def _load_from_state_dict(self, state, prefix, metadata, *args):  # type: ignore[no-untyped-def]
        if metadata.get("version", 1) < 2:
            state[prefix + "x"] = state[prefix + "x"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_modules_take_weights_as_their_present_version(save: Save) -> None:
    source, model = Versioned(), Versioned()
    lockstep.load_checkpoint(model, save(1, model={"x": source.x}))
    assert torch.equal(model.x, source.x)


# Tied weights


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_one_name_is_enough_for_a_tied_tensor(save: Save) -> None:
    for name in ("embedding.weight", "head.weight"):
        source, model = Tied(1), Tied()
        state = source.state_dict()
        del state[name]
        lockstep.load_checkpoint(model, save(1, model=state))
        assert same(model, source)
        assert model.head.weight is model.embedding.weight


def test_two_values_for_a_tied_tensor_are_a_misfit(save: Save) -> None:
    state = Tied(1).state_dict()
    state["head.weight"] = state["head.weight"] + 1
    saved, model = save(1, model=state), Tied()
    expected = "one tensor in the model, two values there: head.weight and embedding.weight"
    assert expected in message_of(lambda: lockstep.load_checkpoint(model, saved))
    assert same(model, Tied())
    lockstep.load_checkpoint(model, saved, strict=False)
    assert torch.equal(model.head.weight, state["embedding.weight"])


# The moving average


def averaged(model: nn.Module) -> MovingAverage:
    average = MovingAverage(model, 0.5)
    with torch.no_grad():
        for _ in range(3):
            for number, parameter in enumerate(model.parameters(), start=1):
                parameter += number
            average.update()
    return average


@pytest.mark.parametrize("make", [make_model, Tied])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [None, "average.safetensors", "average.pt"])
def test_the_average_comes_with_the_models_buffers(
    save: Save, tmp_path: Path, make: Callable[[int], nn.Module], dtype: torch.dtype, target: str | None
) -> None:
    source, model = make(1).to(dtype), make(0).to(dtype)
    average = averaged(source)
    saved = save(1, model=source.state_dict(), average=average.state())
    if target is None:
        lockstep.load_checkpoint(model, saved, weights="average")
    else:
        path = export_weights(saved, tmp_path / target, weights="average")
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        assert {name: tensor.dtype for name, tensor in state.items()} == {
            name: tensor.dtype for name, tensor in source.state_dict().items()
        }
        model.load_state_dict(state)
    assert not same(model, source)
    with average.applied():
        assert same(model, source)


def test_an_average_of_another_model_is_refused(save: Save) -> None:
    saved = save(1, model={"x": torch.ones(1)}, average={"y": torch.ones(1), "num_updates": torch.tensor(1)})
    assert "not: y" in line_of(lambda: lockstep.load_checkpoint(nn.Linear(1, 1), saved, weights="average"))


def test_the_second_model_has_the_second_average(save: Save) -> None:
    source, model = make_model(1), make_model()
    average = averaged(source)
    saved = save(1, model={}, model1=source.state_dict(), average1=average.state())
    lockstep.load_checkpoint(model, saved, weights="average1")
    with average.applied():
        assert same(model, source)


# Export


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_an_export_is_one_private_file_that_others_can_read(
    run_folder: Path, save: Save, tmp_path: Path, suffix: str
) -> None:
    best = Tied(1)
    save(1, model=best.state_dict(), is_best=True)
    save(2, model=Tied(2).state_dict())
    folder = tmp_path / "out"
    folder.mkdir()
    before = os.umask(0)
    try:
        path = export_weights(run_folder, folder / f"best_model{suffix}", best=True)
    finally:
        os.umask(before)
    assert list(folder.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600
    state = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert type(state) is dict and {"embedding.weight", "head.weight"} <= state.keys()
    model = Tied()
    model.load_state_dict(state)
    assert same(model, best)
    lockstep.load_checkpoint(model, path, pickled=suffix == ".pt")


def test_an_export_overwrites_only_when_told(save: Save, tmp_path: Path) -> None:
    saved, path = save(1, model=make_model(1).state_dict()), tmp_path / "model.pt"
    path.write_text("precious")
    assert "overwrite=True" in line_of(lambda: export_weights(saved, path))
    assert path.read_text() == "precious"
    export_weights(saved, path, overwrite=True)
    lockstep.load_checkpoint(make_model(), path, pickled=True)
    (tmp_path / "link.pt").symlink_to(tmp_path / "nowhere")
    assert "exists" in line_of(lambda: export_weights(saved, tmp_path / "link.pt"))


def test_where_an_export_cannot_go(save: Save, tmp_path: Path) -> None:
    saved = save(1, model=make_model(1).state_dict())
    for name in ("model.onnx", "model", ".pt"):
        assert "ends in .safetensors or .pt" in line_of(lambda name=name: export_weights(saved, tmp_path / name))
    assert "No such file" in line_of(lambda: export_weights(saved, tmp_path / "missing" / "model.pt"))
    (tmp_path / "folder.pt").mkdir()
    assert "cannot write" in line_of(lambda: export_weights(saved, tmp_path / "folder.pt", overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.pt", "run"]


def test_a_strided_and_a_small_view_are_exported_alone(tmp_path: Path) -> None:
    torch.save({"t": torch.ones(1000, 2)[:3].t()}, tmp_path / "theirs.pt")
    for name in ("mine.safetensors", "mine.pt"):
        path = export_weights(tmp_path / "theirs.pt", tmp_path / name, pickled=True)
        assert path.stat().st_size < 3000


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_full_disk_leaves_what_was_there(save: Save, tmp_path: Path, suffix: str) -> None:
    saved, folder = save(1, model={"x": torch.ones(2**16)}), tmp_path / "out"
    folder.mkdir()
    (folder / f"model{suffix}").write_text("precious")
    limit = 2**16

    def without_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code = f"""
from lockstep.checkpoint.exchange import export_weights
from lockstep.errors import UserError
try:
    export_weights({str(saved)!r}, {str(folder / f"model{suffix}")!r}, overwrite=True)
except UserError as error:
    print(error)
"""
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, preexec_fn=without_room
    )
    assert "cannot write" in finished.stdout and len(finished.stdout.splitlines()) == 1, finished.stderr
    assert [path.read_text() for path in folder.iterdir()] == ["precious"]


# What others may have planted


class Planted:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def planted(path: Path, trap: Path, kind: str) -> None:
    content = {"state_dict": {"weight": Planted(f"touch {trap}")}}
    if kind == "bare pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")


@pytest.mark.parametrize("kind", ["zip", "legacy", "bare pickle"])
@pytest.mark.parametrize("pickled", [False, True])
def test_a_planted_pickle_executes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, pickled: bool
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path, trap = tmp_path / "theirs.pt", tmp_path / "trap"
    planted(path, trap, kind)
    line = line_of(lambda: lockstep.load_checkpoint(nn.Linear(1, 1), path, pickled=pickled))
    assert ("posix.system" in line or kind == "bare pickle") if pickled else "pickled=True" in line
    assert line_of(lambda: export_weights(path, tmp_path / "mine.pt", pickled=pickled))
    assert [each.name for each in tmp_path.iterdir()] == ["theirs.pt"]
    with warnings.catch_warnings():  # and it is a working trap
        warnings.simplefilter("ignore")
        if kind == "zip":
            torch.load(path, weights_only=False)
            assert trap.exists()


def test_a_pickle_that_unpacks_to_far_more_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2**16)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for entry in plain.namelist():
            bomb.writestr(entry, plain.read(entry), zipfile.ZIP_DEFLATED)
    load = lambda name: lockstep.load_checkpoint(nn.Linear(1, 1), tmp_path / name, pickled=True)  # noqa: E731
    assert "compressed" in line_of(lambda: load("bomb.pt"))
    assert "does not fit" in message_of(lambda: load("plain.pt"))


def header(fields: object) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text


WHOLE = safetensors.torch.save({"weight": torch.ones(1, 1), "bias": torch.ones(1)})

DAMAGED = {
    "empty": b"",
    "giant header": struct.pack("<Q", 2**62) + b"{}",
    "header of 99 MB that is not there": struct.pack("<Q", 99 * 10**6) + b"{}",
    "giant shapes": header({"weight": {"dtype": "F32", "shape": [2**60, 2**60], "data_offsets": [0, 4]}}) + b"1234",
    "giant offsets": header({"weight": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}}) + b"1234",
    "giant and empty": header({"weight": {"dtype": "F32", "shape": [2**60, 2**60, 0], "data_offsets": [0, 0]}}),
    "negative": header({"weight": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}) + b"1234",
    "unknown type": header({"weight": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}) + b"123",
    "no header": b"\x02\0\0\0\0\0\0\0[]",
    "truncated": WHOLE[:-1],
    "truncated header": WHOLE[:20],
    "a pickle": pickle.dumps({"weight": 1}),
}


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_damaged_files_are_one_line(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"theirs{suffix}"
    path.write_bytes(DAMAGED[kind])
    model = nn.Linear(1, 1)
    before = values(model.state_dict())
    message = message_of(lambda: lockstep.load_checkpoint(model, path, pickled=True))
    assert str(path) in message and len(message) < 600
    assert "\n" not in message or "giant and empty" in kind  # a well-formed file that does not fit
    assert values(model.state_dict()) == before


def test_every_truncation_of_a_pickle_is_one_line(tmp_path: Path) -> None:
    for is_zip in (True, False):
        state = nn.Linear(1, 1).state_dict()
        torch.save(state, tmp_path / "whole.pt", _use_new_zipfile_serialization=is_zip)
        data = (tmp_path / "whole.pt").read_bytes()
        for size in range(0, len(data) - 1, 7):
            (tmp_path / "cut.pt").write_bytes(data[:size])
            assert line_of(lambda: lockstep.load_checkpoint(nn.Linear(1, 1), tmp_path / "cut.pt", pickled=True))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ""])
def test_things_that_are_no_file(tmp_path: Path, suffix: str) -> None:
    def load(path: Path | str) -> str:
        return line_of(lambda: lockstep.load_checkpoint(nn.Linear(1, 1), path, pickled=True))

    path = tmp_path / f"theirs{suffix}"
    assert "No such file" in load(path)
    assert "null" in load(f"{path}\0")
    assert "too long" in load("x" * 5000 + suffix)
    path.mkdir()
    assert "neither a run folder" in load(path)
    path.rmdir()
    path.symlink_to(path)
    assert "symbolic links" in load(path)
    path.unlink()
    os.mkfifo(path)
    assert "neither a file nor a folder" in load(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "neither a file nor a folder" in load(path)


def test_an_unknown_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("?")
    line = line_of(lambda: lockstep.load_checkpoint(nn.Linear(1, 1), tmp_path / "model.onnx", pickled=True))
    assert "ends in .safetensors or .pt" in line


# The page


def test_the_pages_python_runs_as_it_stands(
    save: Save, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 6
    source = make_model(1)
    average = averaged(source)
    save(40, model=source.state_dict(), average=average.state(), is_best=True)
    (tmp_path / "runs").mkdir()
    run_folder.rename(tmp_path / "runs" / "mine")
    theirs = make_model(2)
    torch.save({"state_dict": nn.DataParallel(theirs).state_dict()}, tmp_path / "theirs.pt")
    monkeypatch.chdir(tmp_path)
    names = {"lockstep": lockstep, "torch": torch, "make_model": make_model}
    exec("".join(blocks), names)
    assert same(names["model"], theirs)  # type: ignore[arg-type]
    with average.applied():
        assert same(names["averaged"], source) and same(names["plain"], source)  # type: ignore[arg-type]
    save_file(theirs.state_dict(), tmp_path / "expected.safetensors")
    assert set(load_file("theirs.safetensors")) == {f"module.{name}" for name in load_file("expected.safetensors")}
