"""The report as plain values for `--json`."""

from collections.abc import Sequence
from typing import Any

from lockstep.events.event_log import json_safe
from lockstep.observe.curve import Curve
from lockstep.observe.run_findings import run_findings
from lockstep.observe.run_record import RunRecord
from lockstep.observe.run_status import RunStatus
from lockstep.observe.step_timing import RankTimes, find_straggler
from lockstep.report.run_comparison import ComparisonRow

_FROM_START = (
    "recipe",
    "parameters",
    "processes",
    "device",
    "backend",
    "effective_batch",
    "lanes",
    "precision",
    "parallel",
    "genes",
    "population",
    "objectives",
)


def report_values(
    records: Sequence[RunRecord], statuses: Sequence[RunStatus], rows: Sequence[ComparisonRow]
) -> dict[str, Any]:
    """Return the report as JSON-compatible values.

    Args:
        records: the runs.
        statuses: the status of each of them.
        rows: the comparison, included if there is more than one run.
    """
    runs = [_run(record, status) for record, status in zip(records, statuses, strict=True)]
    values: dict[str, Any] = {"runs": runs}
    if len(records) > 1:
        values["scaling"] = [_row(row) for row in rows]
    return dict(json_safe(values))


def _run(record: RunRecord, status: RunStatus) -> dict[str, Any]:
    ranks = record.ranks.times()
    straggler = find_straggler(ranks)
    return {
        "path": str(record.path),
        "run_id": record.run_info.get("run_id"),
        "state": status.state,
        "step": record.step,
        "total_steps": record.total_steps,
        "attempts": record.attempt,
        "num_restarts": record.num_restarts,
        **{name: _shown(record.start[name]) for name in _FROM_START if name in record.start},
        "samples_per_s": record.samples_per_s,
        "numbers": {name: values for name, curve in record.curves.items() if (values := _curve(curve)) is not None},
        "saves": vars(record.checkpoints),
        "restarts": [restart._asdict() for restart in record.restarts],
        "incidents": [incident._asdict() for incident in record.incidents],
        "times": [_times(each) for each in ranks],
        "straggler": None if straggler is None else straggler._asdict(),
        "findings": [finding._asdict() for finding in run_findings(record)],
        "digest": record.digest,
    }


def _shown(value: Any) -> Any:
    """Return a value of the start event as a run writes it: plain, or a mapping of plain values."""
    if isinstance(value, dict):
        return {name: element for name, element in value.items() if _is_plain(element)}
    return value if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _curve(curve: Curve) -> dict[str, Any] | None:
    last, lowest, highest = curve.last, curve.lowest(), curve.highest()
    if last is None or lowest is None or highest is None:
        return None
    return {"last": last.mean, "step": last.step, "lowest": lowest.low, "highest": highest.high}


def _times(rank: RankTimes) -> dict[str, Any]:
    derived = {"step_s": rank.step_s, "hidden": rank.hidden, "training_per_s": rank.training_per_s}
    return {**rank._asdict(), **derived}


def _row(row: ComparisonRow) -> dict[str, Any]:
    return {
        "path": str(row.record.path),
        "processes": row.processes,
        "per_s": None if row.throughput is None else row.throughput.per_s,
        "unit": None if row.throughput is None else row.throughput.unit,
        "speed_up": row.speed_up,
        "possible": row.max_speed_up,
        "efficiency": row.efficiency,
        "digest": row.record.digest,
    }
