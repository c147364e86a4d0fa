"""Untrusted and damaged weight files execute nothing, and are refused with one clear line."""

import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import lockstep
from lockstep.checkpoint.weights_io import export_weights
from tests.unit.checkpoint.models import line_of, message_of, values


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


class Planted:
    """Runs a shell command when it is unpickled."""

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
    with warnings.catch_warnings():  # without protection the trap works
        warnings.simplefilter("ignore")
        if kind == "bare pickle":
            pickle.loads(path.read_bytes())
        else:
            torch.load(path, weights_only=False)
    assert trap.exists()


def test_a_compressed_pickle_is_refused(tmp_path: Path) -> None:
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
    assert "\n" not in message or "giant and empty" in kind  # a valid file that does not fit, with a line per misfit
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
def test_sources_that_are_not_files_are_clear_lines(tmp_path: Path, suffix: str) -> None:
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


def test_an_unknown_suffix_is_a_clear_line(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("?")
    line = line_of(lambda: lockstep.load_checkpoint(nn.Linear(1, 1), tmp_path / "model.onnx", pickled=True))
    assert "ends in .safetensors or .pt" in line
