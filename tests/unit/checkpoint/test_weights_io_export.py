"""Weights are exported as one file: whole or not at all, private, and readable without lockstep."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lockstep
from lockstep.checkpoint.weights_io import export_weights
from tests.unit.checkpoint.models import Save, Tied, averaged, line_of, make_model, same


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_an_export_is_one_private_plain_state_dict(run_folder: Path, save: Save, tmp_path: Path, suffix: str) -> None:
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


def test_an_export_overwrites_only_on_request(save: Save, tmp_path: Path) -> None:
    saved, path = save(1, model=make_model(1).state_dict()), tmp_path / "model.pt"
    path.write_text("precious")
    assert "overwrite=True" in line_of(lambda: export_weights(saved, path))
    assert path.read_text() == "precious"
    export_weights(saved, path, overwrite=True)
    lockstep.load_checkpoint(make_model(), path, pickled=True)
    (tmp_path / "link.pt").symlink_to(tmp_path / "nowhere")
    assert "exists" in line_of(lambda: export_weights(saved, tmp_path / "link.pt"))


def test_invalid_export_targets_are_clear_lines(save: Save, tmp_path: Path) -> None:
    saved = save(1, model=make_model(1).state_dict())
    for name in ("model.onnx", "model", ".pt"):
        assert "ends in .safetensors or .pt" in line_of(lambda name=name: export_weights(saved, tmp_path / name))
    assert "No such file" in line_of(lambda: export_weights(saved, tmp_path / "missing" / "model.pt"))
    (tmp_path / "folder.pt").mkdir()
    assert "cannot write" in line_of(lambda: export_weights(saved, tmp_path / "folder.pt", overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.pt", "run"]


def test_a_view_is_exported_without_its_storage(tmp_path: Path) -> None:
    torch.save({"t": torch.ones(1000, 2)[:3].t()}, tmp_path / "theirs.pt")
    for name in ("mine.safetensors", "mine.pt"):
        path = export_weights(tmp_path / "theirs.pt", tmp_path / name, pickled=True)
        assert path.stat().st_size < 3000


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_full_disk_keeps_the_existing_file(save: Save, tmp_path: Path, suffix: str) -> None:
    saved, folder = save(1, model={"x": torch.ones(2**16)}), tmp_path / "out"
    folder.mkdir()
    (folder / f"model{suffix}").write_text("precious")
    limit = 2**16

    def without_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code = f"""
from lockstep.checkpoint.weights_io import export_weights
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


ROOT = Path(__file__).parents[3]


def test_the_python_examples_of_the_page_run(
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
