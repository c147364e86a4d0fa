"""Read what W&B wrote offline: a log of protobuf records in LevelDB's format, after W&B's header of seven bytes."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK = 7, 32768
_FULL, _LAST = 1, 4  # fragment types that end a record


def offline_runs(folder: Path) -> list[Path]:
    """Return the .wandb files of a run folder, oldest first."""
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a file."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, record = _HEADER, b""
    while at + _HEADER <= len(data):
        rest = _BLOCK - at % _BLOCK
        if rest < _HEADER:  # too small for another fragment: padding
            at += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_FULL, _LAST):
            yield Record.FromString(record)
            record = b""


def history(path: Path) -> dict[int, dict[str, Any]]:
    """Return what was logged at each step. Media are flattened: `images/a.path`."""
    return {
        record.history.step.num: {
            ".".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
            if not item.nested_key[0].startswith("_")
        }
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    }


def run_record(path: Path) -> Any:
    """Return the record that describes the run."""
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")


def config(path: Path) -> dict[str, Any]:
    """Return the config that W&B was given."""
    return {update.key: json.loads(update.value_json) for update in run_record(path).config.update}


def exit_code(path: Path) -> int:
    """Return the exit code that the run ended with."""
    return next(record.exit.exit_code for record in records(path) if record.WhichOneof("record_type") == "exit")
