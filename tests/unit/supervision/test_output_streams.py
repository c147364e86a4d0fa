"""Standard streams that are missing are opened, and one that fails loses lines but ends nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PREPARE = "import os, sys; from lockstep.supervision.output_streams import keep_failing_streams as keep; keep(); "
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


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


def test_what_was_printed_before_to_a_full_disk_ends_nothing_either() -> None:
    with Path("/dev/full").open("w") as full:
        code = "print(1); " + PREPARE + "sys.exit(7)"
        assert subprocess.run([sys.executable, "-c", code], stdout=full, env=BUFFERED, timeout=30).returncode == 7


def test_holders_of_the_stream_write_to_it_too() -> None:
    """A logger that was made before and `sys.__stdout__`: their lines keep their order, and end nothing."""
    code = (
        "import logging, sys; logging.basicConfig(stream=sys.stdout, format='%(message)s'); print(1); "
        + PREPARE
        + "print(2); logging.warning(3); print(4, file=sys.__stdout__, flush=True); sys.exit(7)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=BUFFERED)
    assert result_of(process)[:2] == (7, b"1\n2\n3\n4\n")
    with Path("/dev/full").open("w") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, env=BUFFERED, timeout=30).returncode == 7


@pytest.mark.parametrize(
    "replace",
    [
        "sys.stdout = os.fdopen(1, 'w', 1)",
        "import io; sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')",
        "import codecs; sys.stdout = codecs.getwriter('utf-8')(sys.stdout.detach())",
    ],
)
def test_a_script_s_own_stream_for_standard_output_stays_open(replace: str) -> None:
    code = f"import os, sys; before = sys.stdout; {replace}; {PREPARE} print('→'); sys.stdout.flush(); os.fstat(1); "
    usable = "'detach' in sys.argv[1] or print(2, file=before, flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code + usable, replace], stdout=subprocess.PIPE)
    expected = "→\n" if "detach" in replace else "→\n2\n"
    assert result_of(process)[:2] == (0, expected.encode())


def test_a_detached_stream_is_left_alone() -> None:
    code = "import sys; mine = sys.stdout.detach(); " + PREPARE + "mine.write(b'1'); mine.flush(); sys.stdout = None"
    assert result_of(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))[:2] == (0, b"1")


def test_a_stream_s_own_way_with_other_characters_stays() -> None:
    process = python("print('→')", env=os.environ | {"PYTHONIOENCODING": "ascii:replace"})
    assert result_of(process) == (0, b"?\n", b"")


def test_two_threads_whose_streams_fail_at_once_do_not_wait_for_each_other() -> None:
    code = """
import threading
from lockstep.supervision import output_streams
both_hold_a_lock, report = threading.Barrier(2), output_streams._SteadyFile._report
output_streams._SteadyFile._report = lambda *given: (both_hold_a_lock.wait(), report(*given))
threads = [threading.Thread(target=print, args=(1,), kwargs={"file": stream, "flush": True}, daemon=True)
           for stream in (sys.stdout, sys.stderr)]
for thread in threads: thread.start()
for thread in threads: thread.join(5)
os._exit(7 if not any(thread.is_alive() for thread in threads) else 1)
"""
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen([sys.executable, "-c", PREPARE + code], stdout=full, stderr=full, env=BUFFERED)
        assert process.wait(30) == 7


def test_a_command_that_is_stopped_by_the_closed_terminal_ends_with_that_code() -> None:
    code = """
import os, signal
from lockstep import cli
cli.app = lambda **_: (print("half a line", end=""), os.kill(os.getpid(), signal.SIGHUP))
cli.main()
"""
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=full, stderr=full, env=BUFFERED)
        assert process.wait(30) == 128 + signal.SIGHUP
