"""Weights from runs, checkpoints and files load into any model; if they do not fit, the model stays unchanged."""

import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lockstep
from lockstep.checkpoint.weights_io import export_weights
from lockstep.errors import UserError
from tests.unit.checkpoint.models import Save, Tied, averaged, line_of, make_model, message_of, same


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


def test_a_source_without_the_weights_is_a_clear_line(run_folder: Path, save: Save, tmp_path: Path) -> None:
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
def test_state_dicts_in_pickles_are_found(tmp_path: Path, suffix: str, key: str | None, is_zip: bool) -> None:
    source = make_model(1)
    content = source.state_dict() if key is None else {"epoch": 3, "loss": torch.ones(()), key: source.state_dict()}
    path = tmp_path / f"theirs{suffix}"
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    model = make_model()
    assert "pickled=True" in line_of(lambda: lockstep.load_checkpoint(model, path))
    assert same(model, make_model())
    lockstep.load_checkpoint(model, path, pickled=True)
    assert same(model, source)


def test_pickled_parameters_that_require_gradients(tmp_path: Path) -> None:
    source, model = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.save(dict(source.named_parameters()), tmp_path / "theirs.pt")
    lockstep.load_checkpoint(model, tmp_path / "theirs.pt", pickled=True)
    assert same(model, source)


@pytest.mark.parametrize(("inside", "outside"), list(product(WRAPPINGS, repeat=2)))
def test_wrapped_and_bare_models_take_each_others_weights(save: Save, inside: str, outside: str) -> None:
    source = WRAPPINGS[inside](make_model(1))
    model = WRAPPINGS[outside](make_model())
    lockstep.load_checkpoint(model, save(1, model=source.state_dict()))
    assert same(model, source)


class Own(nn.Module):
    """Has modules with the names that wrappers use."""

    def __init__(self, *, both: bool = False, only: bool = False) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        if not only:
            self.other = nn.Linear(2, 2)
        if both:
            self.weight = nn.Parameter(torch.randn(2, 2))


class NamedModule(nn.Module):
    """Has parameters, not modules, called `module` and `_orig_mod`."""

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


def test_equal_names_match_even_if_others_are_missing(save: Save) -> None:
    model = model_of(["module.x", "module.module.x", "y"])
    saved = save(1, model={"module.x": torch.ones(1), "module.module.x": torch.full((1,), 2.0)})
    assert "missing: y" in message_of(lambda: lockstep.load_checkpoint(model, saved))
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
def test_ambiguous_names_are_an_error(save: Save, strict: bool, own: list[str], theirs: list[str]) -> None:
    model = model_of(own)
    saved = save(1, model={name: torch.ones(1) for name in theirs})
    assert "cannot tell which of" in line_of(lambda: lockstep.load_checkpoint(model, saved, strict=strict))
    assert not any(tensor.any() for tensor in model.state_dict().values())


def test_all_misfits_are_listed_at_once_and_the_model_is_unchanged(save: Save) -> None:
    state = make_model(1).state_dict()
    del state["0.bias"]
    state["2.weight"] = torch.ones(5, 2)
    state["1.num_batches_tracked"] = torch.ones(())  # a float cannot become an integer
    state["2.bias"] = torch.ones(2, dtype=torch.complex64)
    saved = save(1, model=state | {"extra": torch.ones(1)})
    model = make_model()
    with pytest.raises(UserError) as caught:
        lockstep.load_checkpoint(model, saved)
    assert str(caught.value).splitlines() == [
        f"{saved} does not fit the model; pass strict=False to load what does",
        "  missing: 0.bias",
        "  unexpected: extra",
        "  shape or dtype differs: 1.num_batches_tracked is float32 [] in the source, int64 [] in the model, 2.weight "
        "is float32 [5, 2] in the source, float32 [2, 2] in the model, 2.bias is complex64 [2] in the source, "
        "float32 [2] in the model",
    ]
    assert same(model, make_model())


def test_only_the_first_of_many_misfits_are_listed(save: Save) -> None:
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
    assert "loaded 7 of 9; missing: 0.bias; shape or dtype differs: 2.weight" in record.message
    loaded, before, after = source.state_dict(), make_model().state_dict(), model.state_dict()
    for name in after:
        assert torch.equal(after[name], (before if name in ("0.bias", "2.weight") else loaded)[name])


def test_tensors_keep_their_identity_dtype_and_requires_grad(save: Save) -> None:
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


def test_the_model_is_moved_to_the_device_after_loading(save: Save) -> None:
    model = make_model()
    lockstep.load_checkpoint(model, save(1, model=make_model(1).state_dict()), device="meta")
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_models_that_cannot_be_loaded_into(save: Save) -> None:
    saved = save(1, model=nn.Linear(3, 2).state_dict())
    assert "run a batch" in line_of(lambda: lockstep.load_checkpoint(nn.LazyLinear(2), saved))
    assert "to_empty" in line_of(lambda: lockstep.load_checkpoint(nn.Linear(3, 2, device="meta"), saved))


def test_an_unavailable_device_changes_nothing(save: Save) -> None:
    saved = save(1, model=make_model(1).state_dict())
    model = make_model()
    assert "cuda:99" in line_of(lambda: lockstep.load_checkpoint(model, saved, device="cuda:99"))
    assert "toaster" in line_of(lambda: lockstep.load_checkpoint(model, saved, device="toaster"))
    assert same(model, make_model())


class Versioned(nn.Module):
    """Upgrades the state of an earlier version, and has state that is not a tensor."""

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


def test_modules_load_weights_as_their_current_version(save: Save) -> None:
    source, model = Versioned(), Versioned()
    lockstep.load_checkpoint(model, save(1, model={"x": source.x}))
    assert torch.equal(model.x, source.x)


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
    expected = "tied in the model, but not in the source: head.weight and embedding.weight"
    assert expected in message_of(lambda: lockstep.load_checkpoint(model, saved))
    assert same(model, Tied())
    lockstep.load_checkpoint(model, saved, strict=False)
    assert torch.equal(model.head.weight, state["embedding.weight"])


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
    assert "does not have: y" in line_of(lambda: lockstep.load_checkpoint(nn.Linear(1, 1), saved, weights="average"))


def test_the_second_model_has_the_second_average(save: Save) -> None:
    source, model = make_model(1), make_model()
    average = averaged(source)
    saved = save(1, model={}, model1=source.state_dict(), average1=average.state())
    lockstep.load_checkpoint(model, saved, weights="average1")
    with average.applied():
        assert same(model, source)
