"""What is printed for people cannot act on the terminal, whoever chose its words."""

import ast
import io
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import ConfigError, UserError, print_error
from lockstep.events.event_log import PrintSink
from lockstep.observe.console import ProgressConsole, describe_event
from lockstep.terminal_text import escape_controls, print_line

PACKAGE = Path(lockstep.__file__).parent
HOSTILE = "a\x1b[2J\x07\x9b1m\r\u202eb\u2066\udce9[red]c[/red]"
SHOWN = "a\\x1b[2J\\x07\\x9b1m\\x0d\\u202eb\\u2066\\udce9[red]c[/red]"

# What these print is no text for people: JSON, in which control characters are escaped, a job script, and the output
# of a user's own script.
PRINTS_AS_IT_IS = {"submit/submit_command.py": 1, "plan/plan_command.py": 1, "launcher/worker_main.py": 1}


def test_control_characters_are_shown_and_the_rest_stays() -> None:
    assert escape_controls(HOSTILE) == SHOWN
    assert escape_controls(SHOWN) == SHOWN
    usual = "two\nlines\tand → ×2 é 日本 🙂 👩‍🔬 שלום می‌خواهم \\x1b, lines\r\nof Windows\r\n"
    assert escape_controls(usual) == usual


def test_a_line_is_one_write_and_needs_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            return super().write(text)

    stream = Stream()
    print_line(HOSTILE, file=stream)
    assert (stream.getvalue(), stream.writes) == (f"{SHOWN}\n", 1)
    monkeypatch.setattr(sys, "stdout", None)
    print_line("nobody reads it")


def test_errors_show_names_safely(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_error(UserError(f"{HOSTILE}: wrong")) == 2
    print_error(ConfigError([HOSTILE, "line\x85two"]))
    assert capsys.readouterr().err.splitlines() == [
        f"lockstep: {SHOWN}: wrong",
        f"lockstep: {SHOWN}",
        "lockstep: line\\x85two",
    ]


def test_events_show_names_and_texts_safely(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"kind": "step", "step": 1, "texts": {HOSTILE: f"one\n{HOSTILE}"}, "stopped": HOSTILE}
    assert describe_event(event) == [f"{SHOWN}:", "    one", *_lines_of(HOSTILE), f"stopped: {SHOWN}"]
    PrintSink().emit({"kind": "step", "step": 1, HOSTILE: HOSTILE})
    assert capsys.readouterr().out == f"step 1: {SHOWN} {escape_controls(HOSTILE.replace(chr(13), ' '))}\n"


def _lines_of(text: str) -> list[str]:
    return [f"    {escape_controls(line)}" for line in text.splitlines()]


def test_a_progress_bar_obeys_no_markup_in_names() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    console = ProgressConsole(terminal)
    console.emit({"kind": "incident", "step": 0, "text": "[red]\x1b[8mtext[/red]"})
    found = {"generation": 1, "found": {"[bold]\x1b[8mmass[/bold]": 1.0}, "design": None, "reasons": {}}
    console.emit({"kind": "start", "step": 0, "total_rounds": 3, **SEARCH})
    console.emit({"kind": "step", "step": 1, **found})
    console.close()
    shown = terminal.getvalue()
    assert "\x1b[8m" not in shown
    assert "[red]\\x1b[8mtext[/red]" in shown
    assert "[bold]\\x1b[8mmass[/bold]" in "".join(shown.split("\n"))


SEARCH = {"backend": None, "launcher": "none", "resumed": None, "attempt": 1, "objectives": {"mass": "min"}} | {
    "guided": False, "genes": 1, "population": 1, "folder": "runs/a",
}  # fmt: skip


def test_nothing_is_printed_but_through_print_line() -> None:
    found: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        count = sum(_prints_as_it_is(node) for node in ast.walk(ast.parse(path.read_text())))
        if count and not name.startswith(("recipes/", "testing/", "init/script_template.py", "observe/console.py")):
            found[name] = count
    assert found == PRINTS_AS_IT_IS


def _prints_as_it_is(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "typer.echo")):
        return False
    return not ast.unparse(node).startswith("print(json.dumps(")
