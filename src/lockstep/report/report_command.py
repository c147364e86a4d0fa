"""`lockstep report`: how a run went and where its time went, or how several runs scale."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import UserError
from lockstep.terminal_text import print_line


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="A run folder, or several to compare.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.html", help="Where to write the page; default: RUN/report.html."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; write a page only if -o is given.")] = False,
) -> None:
    """Report how a run went and where its time went, rank by rank, and write a page with plots.

    \b
    lockstep report runs/digits
    lockstep report runs/digits -o digits.html
    lockstep report runs/one runs/two runs/four

    The page is one self-contained file. Several runs are compared by samples per second, speed-up, efficiency, and
    whether they ended with the same bits; their page is written only if -o is given. A run may still be in progress;
    the report does not disturb it.
    """
    from lockstep.observe.run_record import read_record
    from lockstep.observe.run_status import read_run_lock, run_status
    from lockstep.report.html_page import write_page
    from lockstep.report.json_report import report_values
    from lockstep.report.page_contents import comparison_page, run_page
    from lockstep.report.run_comparison import compare_runs, comparison_lines
    from lockstep.report.text_report import report_lines

    if output is not None and output.suffix not in (".html", ".htm"):
        raise UserError(f"-o {output}: expected a file name that ends in .html")
    records = [read_record(path) for path in runs]
    for record in records:
        if not record.run_info:
            raise UserError(f"{record.path} holds no run yet: `lockstep watch {record.path}` waits for one")
    statuses = [run_status(record, read_run_lock(record.path)) for record in records]
    rows = compare_runs(records)
    is_single = len(records) == 1
    if as_json:
        print(json.dumps(report_values(records, statuses, rows), indent=1, allow_nan=False))
    else:
        print_line("\n".join(report_lines(records[0], statuses[0]) if is_single else comparison_lines(rows)))
    target = output
    if target is None and is_single and not as_json:
        target = records[0].path / "report.html"
    if target is None:
        return
    page = run_page(records[0], statuses[0]) if is_single else comparison_page(rows)
    try:
        write_page(target, page)
    except OSError as error:
        problem = f"cannot write {target}: {error.strerror or error}"
        if output is not None:
            raise UserError(problem) from None
        print_line(f"lockstep: {problem}; choose another file with -o FILE.html", file=sys.stderr)
        return
    if not as_json:
        print_line(f"\npage: {target}")
