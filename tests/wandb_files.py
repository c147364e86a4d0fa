"""Reading back what W&B wrote: a log of records in LevelDB's format, inside W&B's own seven bytes of header."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK = 7, 32768
_WHOLE, _LAST = 1, 4  # kinds of fragments that end a record


def offline_runs(folder: Path) -> list[Path]:
    """The .wandb files of a run folder, oldest first."""
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, record = _HEADER, b""
    while at + _HEADER <= len(data):
        rest = _BLOCK - at % _BLOCK
        if rest < _HEADER:  # too little for another fragment
            at += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(record)
            record = b""


def history(path: Path) -> dict[int, dict[str, Any]]:
    """What was logged at each step. Media are flattened: `images/a.path`."""
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
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")


def config(path: Path) -> dict[str, Any]:
    return {update.key: json.loads(update.value_json) for update in run_record(path).config.update}


def exit_code(path: Path) -> int:
    return next(record.exit.exit_code for record in records(path) if record.WhichOneof("record_type") == "exit")
