"""Nothing in a checkpoint is trusted: nothing is executed, no path is followed, and a refusal is one clear line."""

import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.checkpoint.manifest import CheckpointError
from lockstep.world.serialization import Shard
from tests.checkpoints import RUN_ID, save
from tests.forged import forge_file, forge_manifest, forge_text, tensor_file

MOST_MEMORY_BYTES = 400 * 2**20  # a manifest may have 64 MiB, and takes several times that as Python objects

Forge = Callable[[Path], object]


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._path),))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    parts = {
        "model": {"weight": torch.ones(4, 2)},
        "kept.rows": {"rows": Shard(torch.ones(4, 2), (0, 0), (4, 2))},
    }
    save(tmp_path / "checkpoints", 1, parts)
    return save(tmp_path / "checkpoints", 2, parts)


@pytest.fixture(autouse=True)
def memory_stays_bounded() -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _memory_bytes("VmRSS")
    yield
    assert _memory_bytes("VmHWM") - before < MOST_MEMORY_BYTES


def _memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def refusal(checkpoint: Path) -> str:
    """Return why step 2 is refused; step 1 is used instead."""
    store = CheckpointStore(checkpoint.parent)
    problems: list[str] = []
    newest = store.newest_intact(RUN_ID, problems.append)
    assert newest is not None
    assert newest.manifest.step == 1
    (line,) = problems
    assert line.startswith(f"{checkpoint}: ")
    assert line.isprintable()
    assert len(line) < len(str(checkpoint)) + 400
    with pytest.raises(CheckpointError) as caught:
        store.load(2)
    assert str(caught.value) == line
    return line


def pickled(path: Path) -> bytes:
    return pickle.dumps(Payload(path))


def test_a_pickle_in_a_files_place_is_not_unpickled(checkpoint: Path) -> None:
    planted = checkpoint.parent.parent / "planted"
    forge_file(checkpoint, "model.safetensors", pickled(planted))
    assert "model.safetensors is not a valid safetensors file" in refusal(checkpoint)
    torch.save(Payload(planted), checkpoint / "model.safetensors")
    forge_file(checkpoint, "model.safetensors", (checkpoint / "model.safetensors").read_bytes())
    assert "model.safetensors is not a valid safetensors file" in refusal(checkpoint)
    (checkpoint / "manifest.json").write_bytes(pickled(planted))
    assert "manifest.json is damaged" in refusal(checkpoint)
    assert not planted.exists()


def test_files_that_the_manifest_does_not_list_are_not_looked_at(checkpoint: Path) -> None:
    planted = checkpoint.parent.parent / "planted"
    for name in ("model.pt", "best_model.pt", ".metadata", "__0_0.distcp", "optimizer.safetensors", "model.pkl"):
        (checkpoint / name).write_bytes(pickled(planted))
    for name in ("LATEST", "BEST", ".metadata", "rng_state.pth"):
        (checkpoint.parent / name).write_bytes(pickled(planted))
    values = CheckpointStore(checkpoint.parent).load(2).values
    assert torch.equal(values["model"]["weight"], torch.ones(4, 2))
    assert CheckpointStore(checkpoint.parent).best() is None
    assert not planted.exists()


NAMES = [
    "../step-1/model.safetensors", "/etc/passwd", "/etc/x.safetensors", "..safetensors", ".hidden.safetensors",
    "a/b.safetensors", "a\\b.safetensors", "a\0.safetensors", "a\n.safetensors", "model.pt", "",
    "x" * 200 + ".safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_only_plain_file_names_are_accepted(checkpoint: Path, name: str) -> None:
    forge_manifest(checkpoint, lambda m: m["files"].update({name: m["files"]["model.safetensors"]}))
    assert "expected a plain name.safetensors" in refusal(checkpoint)


@pytest.mark.parametrize("name", ["../model", "/model", "", ".", "a/b", "a\nb", "x" * 65, "$model"])
def test_only_plain_part_names_are_accepted(checkpoint: Path, name: str) -> None:
    forge_manifest(checkpoint, lambda m: m["forms"].update({name: 1}))
    assert "has a part called" in refusal(checkpoint)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_links_and_pipes_are_not_followed(checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    size = path.stat().st_size
    path.rename(checkpoint.parent / "twin")
    link = "a symbolic link, which is not followed here"
    for put, kind in (
        (lambda: path.symlink_to("../twin"), link),
        (lambda: path.symlink_to(f"..{'/' * (size - 6)}twin"), link),  # a link of the file's own size
        (lambda: path.symlink_to("/dev/zero"), link),
        (lambda: os.mkfifo(path), "not a regular file"),
        (path.mkdir, "Is a directory"),
    ):
        put()
        line = refusal(checkpoint)
        found = path.lstat().st_size
        is_compared = name != "manifest.json" and found != size  # the manifest has the size of every other file
        problem = f"has {found:,} bytes instead of {size:,}" if is_compared else f"cannot be read: {kind}"
        assert line == f"{checkpoint}: {name} {problem}"
        path.rmdir() if path.is_dir() else path.unlink()


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


FILES = {
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 2**30) + b"{}",
    "no header": b"",
    "2^60 elements": tensor_file({"weight": entry("F32", [2**60], 0, 2**62)}),
    "2^60 elements in eight bytes": tensor_file({"weight": entry("F32", [2**60], 0, 8)}, bytes(8)),
    "a product that overflows": tensor_file({"weight": entry("F32", [2**40, 2**40, 2**40], 0, 8)}, bytes(8)),
    "a size beyond 2^63": tensor_file({"weight": entry("F32", [0, 2**63], 0, 0)}),
    "overlapping tensors": tensor_file({"weight": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12)),
    "offsets outside": tensor_file({"weight": entry("F32", [2], 2**40, 2**40 + 8)}, bytes(8)),
    "offsets backwards": tensor_file({"weight": entry("F32", [2], 8, 0)}, bytes(8)),
    "a hole": tensor_file({"weight": entry("F32", [2], 8, 16)}, bytes(16)),
    "an unknown type": tensor_file({"weight": entry("PICKLE", [2], 0, 8)}, bytes(8)),
    "a type that torch lacks": tensor_file({"weight": entry("F6_E2M3", [4], 0, 3)}, bytes(3)),
    "a header that is not UTF-8": tensor_file(b"\xff\xfe\xfd"),
    "a header that is not JSON": tensor_file(b"not JSON"),
    "a header nested deeply": tensor_file(b"[" * 100_000),
    "a name with line breaks": tensor_file({"\n\x1b[2Jx": entry("F32", [2], 4, 12)}, bytes(12)),
}


@pytest.mark.parametrize("data", FILES.values(), ids=list(FILES))
def test_a_file_that_is_no_tensor_file_is_refused(checkpoint: Path, data: bytes) -> None:
    forge_file(checkpoint, "model.safetensors", data)
    assert "model.safetensors is not a valid safetensors file" in refusal(checkpoint)


def test_a_file_with_other_tensors_is_refused(checkpoint: Path) -> None:
    forge_file(checkpoint, "model.safetensors", tensor_file({"other": entry("F32", [2], 0, 8)}, bytes(8)))
    assert "does not describe the saved values: KeyError('weight')" in refusal(checkpoint)


TEXTS = {
    "over 64 MiB": (b'{"format": 2, "x": "' + b"x" * (100 * 2**20), "is over"),
    "nested deeply": (b'{"format": 2, "x": ' + b"[" * 10_000_000, "not JSON"),
    "nested deeply and well-formed": (b'{"format": 2, "x": ' + b"[" * 500_000 + b"]" * 500_000, "not JSON"),
    "a name twice": (b'{"format": 2, "step": 2, "step": 1', "the same name twice"),
    "an int of many digits": (b'{"format": 2, "step": ' + b"9" * 1_000_000, "not JSON"),
    "an int of some digits": (b'{"format": ' + b"9" * 4000, "has format 99"),
    "a format that is nested": (b'{"format": ' + b"[" * 300 + b"]" * 300, "has format a list"),
    "a format of many letters": (b'{"format": "' + b"x" * 1_000_000 + b'"', "has format 'xxx"),
    "no format": (b'{"step": 2', "has format None"),
    "a later format": (b'{"format": 3, "step": 2', "has format 3; this version of lockstep reads format 2"),
    "a list": (b'[{"format": 2}', "not JSON"),
    "not UTF-8": (b'{"format": 2, "x": "\xff\xfe"', "not JSON"),
    "nothing": (b"", "not JSON"),
}


@pytest.mark.parametrize(("body", "problem"), TEXTS.values(), ids=list(TEXTS))
def test_a_text_that_is_no_manifest_is_refused(checkpoint: Path, body: bytes, problem: str) -> None:
    forge_text(checkpoint, body)
    assert problem in refusal(checkpoint)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def setting(*place: str | int, to: Any) -> Forge:
    def forge(checkpoint: Path) -> None:
        def change(content: Any) -> None:
            for key in place[:-1]:
                content = content[key]
            content[place[-1]] = to

        forge_manifest(checkpoint, change)

    return forge


ROWS = ("shards", "kept.rows", "rows")
PIECE = {"file": "kept.rows.rank-0.safetensors", "offsets": [0, 0]}
FORM = ("forms", "model", "weight")

CLAIMS: dict[str, tuple[Forge, str]] = {
    "a step below zero": (setting("step", to=-1), "has the step -1"),
    "a step that is true": (setting("step", to=True), "has no step"),
    "a step of 2^70": (setting("step", to=2**70), "has the step"),
    "another step": (setting("step", to=1), "holds step 1, so the folder was renamed or replaced"),
    "a run id with a path": (setting("run_id", to="../../etc"), "not in hex"),
    "a commit that is a list": (setting("commit", to=[]), "has no commit"),
    "files that are a list": (setting("files", to=[]), "has no files"),
    "a file without a size": (setting("files", "model.safetensors", to={}), "the size None"),
    "a file of 2^60 bytes": (setting("files", "model.safetensors", "size", to=2**60), "the size 11529"),
    "a size that is nested": (setting("files", "model.safetensors", "size", to=nested(300)), "the size a list"),
    "a file without a hash": (setting("files", "model.safetensors", "sha256", to=5), "no hash"),
    "shards that are a list": (setting("shards", to=[]), "has no shards"),
    "a part's shards that are a number": (setting("shards", "kept.rows", to=5), "nothing about the shards"),
    "shards without pieces": (setting(*ROWS, to={"shape": [4, 2]}), "lacks the pieces"),
    "no pieces": (setting(*ROWS, "pieces", to=[]), "do not form a tensor"),
    "a piece in no file": (setting(*ROWS, "pieces", to=[{**PIECE, "file": "/etc/passwd"}]), "in no known file"),
    "a piece in a list": (setting(*ROWS, "pieces", to=[{**PIECE, "file": []}]), "in no known file"),
    "a piece outside": (setting(*ROWS, "pieces", to=[{**PIECE, "offsets": [1, 0]}]), "do not form a tensor"),
    "a piece below zero": (setting(*ROWS, "pieces", to=[{**PIECE, "offsets": [-1, 0]}]), "has the size -1"),
    "a piece of other dimensions": (
        setting(*ROWS, "pieces", to=[{**PIECE, "offsets": [0] * 3}]),
        "of another number of dimensions",
    ),
    "a piece as a stretch": (setting(*ROWS, "pieces", to=[{**PIECE, "offsets": [0]}]), "lacks its piece"),
    "the same piece twice": (setting(*ROWS, to={"shape": [8, 2], "pieces": [PIECE, PIECE]}), "do not form a tensor"),
    "a whole of 2^50 elements": (setting(*ROWS, "shape", to=[2**49, 2]), "do not form a tensor"),
    "a whole of 2^60 elements": (setting(*ROWS, "shape", to=[2**30, 2**30]), "elements for"),
    "a whole of 100 dimensions": (setting(*ROWS, "shape", to=[1] * 100), "has no sizes"),
    "a whole that is too small": (setting(*ROWS, "shape", to=[1, 2]), "do not form a tensor"),
    "an unknown mark": (setting(*FORM, to={"$import": "os"}), "does not describe the saved values"),
    "a mark among names": (setting(*FORM, to={"$tensor": "weight", "x": 1}), "does not describe the saved values"),
    "a tensor that is not there": (setting(*FORM, to={"$tensor": "../x"}), "does not describe the saved values"),
    "a tensor that is a list": (setting(*FORM, to={"$tensor": []}), "does not describe the saved values"),
    "keys that are lists": (setting(*FORM, to={"$pairs": [[[1], 2]]}), "does not describe the saved values"),
    "keys twice": (setting(*FORM, to={"$pairs": [[1, 2], [1, 3]]}), "does not describe the saved values"),
    "pairs of three": (setting(*FORM, to={"$pairs": [[1, 2, 3]]}), "does not describe the saved values"),
    "pairs that are text": (setting(*FORM, to={"$pairs": "ab"}), "does not describe the saved values"),
    "a tuple that is text": (setting(*FORM, to={"$tuple": "ab"}), "does not describe the saved values"),
    "a float that is none": (setting(*FORM, to={"$float": "x" * 10_000}), "does not describe the saved values"),
    "bytes that are none": (setting(*FORM, to={"$bytes": "\n"}), "does not describe the saved values"),
    "a form nested deeply": (setting(*FORM, to=nested(400)), "does not describe the saved values"),
}


@pytest.mark.parametrize(("forge", "problem"), CLAIMS.values(), ids=list(CLAIMS))
def test_a_manifest_is_not_trusted(checkpoint: Path, forge: Forge, problem: str) -> None:
    forge(checkpoint)
    assert problem in refusal(checkpoint)


def test_the_pointers_are_not_followed_out_of_the_folder(checkpoint: Path) -> None:
    best = save(checkpoint.parent, 3, {"model": {}}, is_best=True)
    (best / "manifest.json").unlink()
    outside = save(checkpoint.parent.parent / "outside", 5, {"model": {}}, is_best=True)
    commit = CheckpointStore(outside.parent).manifest(5).commit
    for text in (
        f"../outside/step-5 {commit}",
        f"{outside} {commit}",
        "step-2 x",
        "step-99999999999999999999 0",
        "\xff",
    ):
        (checkpoint.parent / "BEST").write_text(text)
        with pytest.raises(CheckpointError, match=r"step-3: manifest\.json cannot be read"):
            CheckpointStore(checkpoint.parent).best()
    (checkpoint.parent / "BEST").unlink()
    (checkpoint.parent / "BEST").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"step-3: manifest\.json cannot be read"):
        CheckpointStore(checkpoint.parent).best()
