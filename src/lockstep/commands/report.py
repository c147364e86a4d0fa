"""`lockstep report`: how a run went and where its time went; how several runs scale. It never changes a run."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import UserError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN …", help="A run folder; or several, to compare.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.html", help="The page; default RUN/report.html, of one run."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; a page only with -o.")] = False,
) -> None:
    """Tell how a run went and where its time went, rank by rank; and write a page with plots.

    \b
    lockstep report runs/digits
    lockstep report runs/digits -o digits.html
    lockstep report runs/one runs/two runs/four

    The page is one file that needs nothing else. Of several runs: samples per second, speed-up, efficiency, and whether
    they ended with the same bits. Reads the run folders and nothing else; a run may still be going on.
    """
    from lockstep.observe.presence import presence
    from lockstep.observe.record import read_record
    from lockstep.observe.report.comparison import compare, comparison_lines
    from lockstep.observe.report.page import comparison_page, run_page, write_page
    from lockstep.observe.report.values import as_values
    from lockstep.observe.report.words import page
    from lockstep.observe.state import state_of

    if output is not None and output.suffix not in (".html", ".htm"):
        raise UserError(f"-o {output}: expected a name that ends in .html")
    records = [read_record(path) for path in runs]
    states = [state_of(record, presence(record.path)) for record in records]
    rows = compare(records)
    if as_json:
        print(json.dumps(as_values(records, states, rows), indent=1, allow_nan=False))
    else:
        lines = page(records[0], states[0]) if len(records) == 1 else comparison_lines(rows)
        print("\n".join(lines))
    if as_json and output is None:
        return
    target = output or (records[0].path / "report.html" if len(records) == 1 else None)
    if target is None:
        return
    text = run_page(records[0], states[0]) if len(records) == 1 else comparison_page(rows)
    try:
        write_page(target, text)
    except OSError as error:
        problem = f"{target} cannot be written: {error.strerror or error}"
        if output is not None:
            raise UserError(problem) from None
        print(f"lockstep: {problem}; -o FILE.html chooses another place", file=sys.stderr)
        return
    if not as_json:
        print(f"\npage: {target}")
