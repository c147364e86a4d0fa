"""Standard streams that are missing are opened, and one that fails loses lines but ends nothing."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PREPARE = "import os, sys; from lockstep.supervision.output_streams import keep_failing_streams as keep; keep(); "


def python(code: str, *options: str, **streams: object) -> "subprocess.Popen[bytes]":
    arguments = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen([sys.executable, *options, "-c", PREPARE + code], **arguments)  # type: ignore[call-overload,no-any-return]


def result_of(process: "subprocess.Popen[bytes]") -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_full_disk_loses_lines_and_is_reported_once(options: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        process = python("[print(i, flush=True) for i in range(3)]; sys.exit(7)", *options, stdout=full)
        code, _, err = result_of(process)
    assert (code, err) == (7, b"lockstep: standard output: lines are being lost: No space left on device\n")


def test_a_full_disk_for_both_streams_ends_nothing() -> None:
    with Path("/dev/full").open("w") as full:
        process = python("print(1, flush=True); print(2, file=sys.stderr); sys.exit(7)", stdout=full, stderr=full)
        assert result_of(process)[0] == 7


def test_a_reader_that_has_read_enough_is_not_worth_a_line() -> None:
    process = python("sys.stdin.readline(); print(1, flush=True); print(2); sys.exit(7)", stdin=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(b"\n", timeout=30)
    assert (process.returncode, err) == (7, b"")


def test_a_pipe_that_another_process_has_made_non_blocking_loses_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = python("[print('x' * 99) for _ in range(2000)]", stdout=writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert len(file.read()) == 200_000
    assert result_of(process)[0] == 0


def test_missing_streams_are_opened_with_their_descriptors(tmp_path: Path) -> None:
    code = f"print(1); print(2, file=sys.stderr); f = open({str(tmp_path / 'file')!r}, 'w'); f.write(str(f.fileno()))"
    close: Callable[[], None] = lambda: os.closerange(0, 3)  # noqa: E731
    process = python(code, stdout=None, stderr=None, preexec_fn=close)
    assert process.wait(30) == 0
    assert int((tmp_path / "file").read_text()) > 2


def test_characters_that_the_encoding_lacks_are_escaped() -> None:
    process = python("print('→ \\ud800')", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert result_of(process) == (0, b"\\u2192 \\ud800\n", b"")


def test_a_stream_of_the_script_is_left_alone() -> None:
    code = "import io; sys.stdout = mine = io.StringIO(); keep(); print(1); sys.exit(sys.stdout is mine and 7)"
    assert result_of(python(code))[0] == 7


def test_a_second_call_changes_nothing_and_buffering_stays() -> None:
    process = python(
        "assert sys.stdout.line_buffering is False; first = sys.stdout; keep(); assert sys.stdout is first"
    )
    assert result_of(process) == (0, b"", b"")
