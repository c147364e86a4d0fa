"""The page of a run has its plots, loads nothing, and nothing in a run folder can become code in it."""

from pathlib import Path

from lockstep.observe.run_record import read_record
from lockstep.observe.run_status import RunLock, RunStatus, run_status
from lockstep.observe.step_timing import PHASE_LABELS
from lockstep.report.page_contents import comparison_page, run_page
from lockstep.report.run_comparison import compare_runs
from tests.run_folders import append, event, finished_run, search_run, start, timed, write_run
from tests.unit.report.parsed_page import ParsedPage, png

ENDED = RunStatus("ended", "finished")


def test_the_page_has_the_plots_and_loads_nothing(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "mine")
    append(folder / "events.jsonl", [event("incident", 40, text="a disk is full")])
    page = ParsedPage(run_page(read_record(folder), ENDED))
    for caption in (
        "Loss",
        "Learning rate",
        "Test: accuracy",
        "Throughput",
        "Own work",
        "Time per step",
        *PHASE_LABELS.values(),
    ):
        assert caption in page.text
    assert page.count("figure") == page.count("figcaption") == 6
    assert sum("incident" in (attributes.get("class") or "") for _, attributes in page.elements) == 5
    assert "a disk is full" in page.text
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {"src", "href", "style"} & names
    policy = next(attributes["content"] for tag, attributes in page.elements if "http-equiv" in attributes)
    assert policy is not None and policy.startswith("default-src 'none'")


def test_names_and_texts_of_a_run_stay_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'\x1b[2J"
    events = [
        start(recipe=evil, device=evil, precision=evil, parallel=evil, backend=evil),
        event("step", 10, **{evil: 1.0}, loss=1.0, texts={evil: evil}, images={evil: "media/a.png"}),
        event("eval", 10, metrics={evil: 2.0}),
        event("incident", 10, text=evil),
        event("end", 20, digest=evil),
    ]
    folder = write_run(tmp_path / "run", events, {0: [timed(10)]}, config=evil)
    (folder / "media").mkdir()
    (folder / "media" / "a.png").write_bytes(png())
    record = read_record(folder)
    page = ParsedPage(run_page(record, run_status(record, RunLock(False, evil))))
    assert page.count("script") == 1
    assert [attributes["src"][:22] for tag, attributes in page.elements if tag == "img" and attributes["src"]] == [
        "data:image/png;base64,"
    ]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert ParsedPage(comparison_page(compare_runs([record, record]))).count("script") == 1


def test_wrong_values_in_a_start_event_are_ignored(tmp_path: Path) -> None:
    wrong = {"processes": "two", "effective_batch": -1, "lanes": [], "total_steps": "x", "parameters": None}
    page = ParsedPage(run_page(read_record(write_run(tmp_path, [start(**wrong)], {0: [timed(10)]})), ENDED))
    assert "1 process on cpu" in page.text


def test_the_page_of_a_search_has_its_generations_and_its_front(tmp_path: Path) -> None:
    page = ParsedPage(run_page(read_record(search_run(tmp_path / "run")), ENDED))
    for caption in ("mass over generations", "grip over generations", "Designs: grip over mass"):
        assert caption in page.text
    assert sum(attributes.get("class") == "dot fill c0" for _, attributes in page.elements) == 6


def test_the_page_of_several_runs_has_the_speed_up(tmp_path: Path) -> None:
    records = [read_record(finished_run(tmp_path / str(processes), processes)) for processes in (1, 4)]
    page = ParsedPage(comparison_page(compare_runs(records)))
    assert "2 runs compared" in page.text
    assert "Speed-up" in page.text
