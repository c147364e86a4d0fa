"""A run's report as a page of text: what it is, how it went, where the time went, what stands out."""

import time
from collections.abc import Iterator, Sequence

from lockstep.observe.curve import Point, count_in
from lockstep.observe.findings import verdict
from lockstep.observe.record import Incident, Record, Restart
from lockstep.observe.state import State
from lockstep.observe.timing import PHASES, RankTimes
from lockstep.observe.wording import duration, number, one_line, seconds, share, size, table, times

_MOST_LINES = 12  # of incidents, of restarts: the newest
_MOST_RANKS = 16  # in a table
_HEADS = {"data": "data", "compute": "compute", "exchange": "waiting", "update": "update", "rest": "rest"}


def page(record: Record, state: State) -> list[str]:
    lines = [f"{record.path}: {title(record)}", f"  {state.words}", *_indented(about(record))]
    for heading, part in (
        ("How it went", [*_numbers(record), *happenings(record)]),
        ("Where the time went", time_lines(record)),
        ("Verdict", verdict(record)),
    ):
        if part:
            lines += ["", heading, *_indented(part)]
    return lines


def title(record: Record) -> str:
    start, facts = record.start, []
    facts.append(one_line(start.get("recipe", "a search" if record.is_search else "a loop of one's own"), 60))
    if (parameters := count_in(start.get("parameters"))) is not None:
        facts.append(times(parameters, "parameter"))
    if record.is_search:
        facts.append(times(count_in(start.get("genes")) or 0, "gene"))
        facts.append(f"{times(count_in(start.get('population')) or 0, 'design')} a generation")
        facts.append("steered by a network" if start.get("guided") is True else "evolution alone")
    return ", ".join(facts)


def about(record: Record) -> Iterator[str]:
    """What it runs on, how it is cut, since when, what is saved."""
    start = record.start
    if start:
        yield ", ".join(_surroundings(record))
    if record.began_t is not None and record.last_t is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(record.began_t, 0.0), 4e9)))
        took = duration(max(0.0, record.last_t - record.began_t))
        yield f"began {began}, {took} from its first event to its last, {times(record.attempt, 'attempt')}"
    saves = record.saves
    if saves.num:
        best = "" if saves.best_step is None else f", the best: step {saves.best_step:,}"
        yield (
            f"{times(saves.num, 'checkpoint')}, the newest: step {saves.newest_step:,}{best}; {size(saves.num_bytes)}, "
            f"training held up for {seconds(saves.stall_s / saves.num)} by each"
        )
    if record.digest is not None:
        yield f"digest {one_line(record.digest, 64)}"


def _surroundings(record: Record) -> Iterator[str]:
    start = record.start
    backend = f" ({one_line(start['backend'], 20)})" if isinstance(start.get("backend"), str) else ""
    processes = times(count_in(start.get("processes")) or 1, "process")
    yield f"{processes} on {one_line(start.get('device', 'an unknown device'), 20)}{backend}"
    batch, lanes = count_in(start.get("effective_batch")), count_in(start.get("lanes"))
    if batch and lanes:
        yield f"batch of {batch:,} in {times(lanes, 'lane')}"
    if isinstance(start.get("precision"), str):
        yield one_line(start["precision"], 20)
    if isinstance(start.get("parallel"), str):
        yield f"parallel: {one_line(start['parallel'], 60)}"
    if (rate := throughput_words(record)) is not None:
        yield rate


def throughput_words(record: Record) -> str | None:
    rate = record.samples_per_s
    return None if rate is None else f"{number(rate)} samples/s"


def _numbers(record: Record) -> list[str]:
    """Each curve's last value and its extremes, with the steps."""
    rows = [("", "last", "lowest", "at", "highest", "at")]
    for name, curve in record.curves.items():
        last, lowest, highest = curve.last, curve.lowest(), curve.highest()
        if last is not None and lowest is not None and highest is not None:
            ends = (number(lowest.low), f"{lowest.step:,}", number(highest.high), f"{highest.step:,}")
            rows.append((one_line(name, 40), number(last.mean), *ends))
    return table(rows) if len(rows) > 1 else []


def happenings(record: Record) -> list[str]:
    """Restarts and incidents, a line each, in order of time."""
    all_of_them: list[Restart | Incident] = [*record.restarts, *record.incidents]
    all_of_them.sort(key=lambda each: each.t)
    left_out = max(0, record.num_restarts + len(record.incidents) - _MOST_LINES)
    lines = [f"… {left_out} earlier"] if left_out else []
    return lines + [in_words(each) for each in all_of_them[-_MOST_LINES:]]


def in_words(happening: Restart | Incident) -> str:
    clock = time.strftime("%H:%M:%S", time.gmtime(min(max(happening.t, 0.0), 4e9)))
    if isinstance(happening, Incident):
        return f"{clock}  {one_line(happening.text, 200)}"
    after = f"after {one_line(happening.cause, 120)}" if happening.cause else "started again"
    processes = "" if happening.num_processes is None else f" on {happening.num_processes}"
    lost = f", at least {times(happening.num_lost, 'step')} made again" if happening.num_lost else ""
    return f"{clock}  attempt {happening.attempt}{processes}, {after}: from step {happening.step:,}{lost}"


def time_lines(record: Record) -> list[str]:
    ranks = record.ranks.times()
    if not ranks:
        return _search_times(record) if record.is_search else []
    return [
        f"medians over {times(ranks[0].num_timed, 'timed step')}; waiting: for gradients that were not there yet",
        *time_table(ranks),
        *gradient_lines(ranks),
    ]


def time_table(ranks: Sequence[RankTimes]) -> list[str]:
    rows = [("rank", "lanes", *_HEADS.values(), "step", "saving", "evaluating", "peak memory")]
    shown = slowest(ranks, _MOST_RANKS)
    for each in shown:
        phases = (f"{seconds(each.phases[phase])}" for phase in PHASES)
        peak = each.peak_device_bytes or each.peak_host_bytes
        memory = "" if peak is None else size(peak)
        asides = (share(each.saving), share(each.evaluating))
        rows.append((str(each.rank), str(each.num_lanes), *phases, seconds(each.step_s), *asides, memory))
    left_out = len(ranks) - len(shown)
    return table(rows) + ([f"… and {left_out} ranks that are quicker than these"] if left_out else [])


def slowest(ranks: Sequence[RankTimes], most: int) -> list[RankTimes]:
    """Those that work longest before they wait, in order of rank."""
    chosen = sorted(ranks, key=lambda each: each.own_s, reverse=True)[:most]
    return sorted(chosen, key=lambda each: each.rank)


def gradient_lines(ranks: Sequence[RankTimes]) -> list[str]:
    """What travels, and how much of that is hidden behind the backward pass."""
    lines = []
    for each in slowest(ranks, _MOST_RANKS):
        if each.travel_s and each.hidden is not None:
            lines.append(
                f"gradients, rank {each.rank}: {size(each.sent_bytes)} sent in a step, {seconds(each.travel_s)} under "
                f"way, {share(each.hidden)} of that hidden behind the backward pass"
            )
    return lines


def _search_times(record: Record) -> list[str]:
    """Of a generation, on the average."""
    parts = []
    for name, words in (("evaluate_s", "evaluating"), ("evolve_s", "evolving"), ("train_s", "training the network")):
        if name in record.curves and (points := record.curves[name].points()):
            parts.append(f"{words} {seconds(mean(points))}")
    processes = times(count_in(record.start.get("processes")) or 1, "process")
    return [f"a generation on {processes}: {', '.join(parts)}"] if parts else []


def mean(points: Sequence[Point]) -> float:
    return sum(point.mean for point in points) / len(points)


def _indented(lines: Iterator[str] | Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
