"""A manifest reads back as it was written, and a change of any byte is detected."""

from pathlib import Path

import pytest

from lockstep.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    ShardedTensor,
    ShardPiece,
    StoredFile,
    check_part_name,
    printable_line,
    read_manifest,
)

MANIFEST = Manifest(
    step=12,
    run_id="0123456789abcdef",
    commit="fedcba9876543210",
    is_best=True,
    files={"model.safetensors": StoredFile(104, "0" * 64), "m.rank-0.safetensors": StoredFile(8, "1" * 64)},
    forms={"model": {"weight": {"$tensor": "weight"}}, "m": {"n": 0.1, "é\n": None}},
    shards={"m": {"w": ShardedTensor((4, 2), (ShardPiece("m.rank-0.safetensors", (0, 0)),))}},
    facts={"position": {"step": 12}, "saved_at": "2026-01-01"},
)


def test_it_reads_back_unchanged(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(MANIFEST.text())
    assert read_manifest(tmp_path) == MANIFEST


def test_a_change_of_any_byte_is_detected(tmp_path: Path) -> None:
    text = MANIFEST.text()
    for place in range(len(text)):
        change = (1, 0x20)[place % 2]
        (tmp_path / "manifest.json").write_bytes(text[:place] + bytes([text[place] ^ change]) + text[place + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json (is damaged|has)"):
            read_manifest(tmp_path)
    for size in range(0, len(text), 5):
        (tmp_path / "manifest.json").write_bytes(text[:size])
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
            read_manifest(tmp_path)


def test_values_cannot_forge_the_hash(tmp_path: Path) -> None:
    seal = ',\n "sha256": "' + "0" * 64 + '"\n}\n'
    forged = Manifest(1, "0" * 16, "0" * 16, False, {}, {"words": {seal: seal}}, {}, {seal: seal})
    (tmp_path / "manifest.json").write_bytes(forged.text())
    assert read_manifest(tmp_path) == forged


def test_a_manifest_that_is_too_large_is_refused_when_saving() -> None:
    large = Manifest(1, "0" * 16, "0" * 16, False, {}, {"words": "x" * 2**26})
    with pytest.raises(CheckpointError, match="over 67,108,864"):
        large.text()


@pytest.mark.parametrize("name", ["", ".x", "a/b", "../a", "a b", "é", "x" * 65, "a\n"])
def test_invalid_part_names_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot name a part"):
        check_part_name(name)


def test_foreign_text_becomes_one_printable_line() -> None:
    assert printable_line("a\nb\x1b[2J\tc") == "a b [2J c"
    assert len(printable_line("x" * 10_000)) == 200
