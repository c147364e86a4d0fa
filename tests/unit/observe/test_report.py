"""A report as text, as JSON and as a page; several runs compared; nothing in a folder can become code."""

import json
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lockstep.observe.designs import front
from lockstep.observe.presence import Presence
from lockstep.observe.record import Record, read_record
from lockstep.observe.report.axis import step_axis, value_axis
from lockstep.observe.report.comparison import Rate, compare, comparison_lines
from lockstep.observe.report.markup import Markup, element
from lockstep.observe.report.page import comparison_page, run_page, write_page
from lockstep.observe.report.pictures import pictures
from lockstep.observe.report.values import as_values
from lockstep.observe.report.words import page
from lockstep.observe.state import State, state_of
from tests.run_folders import append, event, finished_run, start, timed, write_run

ENDED = State("ended", "at its end")


class Page(HTMLParser):
    """All elements of a page with their attributes, and what is not markup."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, "elements are closed in order"

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    @property
    def captions(self) -> str:
        return " ".join(self.words)


def png(width: int = 2, height: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + header + zlib.compress(b"\0\1\2" * height)


def test_the_text_says_what_how_and_where(tmp_path: Path) -> None:
    record = read_record(finished_run(tmp_path / "mine"))
    text = "\n".join(page(record, state_of(record, Presence(False, ""))))
    for part in (
        "digits, 1,234 parameters",
        "at its end, after step 40 of 40",
        "2 processes on cpu (gloo), batch of 64 in 4 lanes, fp32, parallel: ddp, 400 samples/s",
        "1 checkpoint, the newest: step 40, the best: step 40; 5.0 kB",
        f"digest {'ab' * 32}",
        "test/accuracy",
        "gradients, rank 1: 4.0 kB sent in a step, 50.0 ms under way, 60 % of that hidden behind the backward pass",
        "nothing stands out",
    ):
        assert part in text
    assert [line.split()[:8] for line in text.splitlines() if line.startswith("  1    ")] == [
        ["1", "2", "10.0", "ms", "100.0", "ms", "20.0", "ms"]
    ]


def test_the_page_has_the_plots_and_needs_nothing_else(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "mine")
    append(folder / "events.jsonl", [event("incident", 40, text="a disk is full")])
    seen = Page(run_page(read_record(folder), ENDED))
    for caption in ("Loss", "Learning rate", "Test: accuracy", "Throughput", "Own work", "Time of a step"):
        assert caption in seen.captions
    assert seen.count("figure") == seen.count("figcaption") == 6
    assert sum("incident" in (attributes.get("class") or "") for _, attributes in seen.elements) == 5
    assert "a disk is full" in seen.captions
    names = {name for _, attributes in seen.elements for name in attributes}
    assert not {"src", "href", "style"} & names
    policy = next(attributes["content"] for tag, attributes in seen.elements if "http-equiv" in attributes)
    assert policy is not None and policy.startswith("default-src 'none'")


def test_a_strangers_names_and_texts_stay_text(tmp_path: Path) -> None:
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
    seen = Page(run_page(record, state_of(record, Presence(False, evil))))
    assert seen.count("script") == 1
    assert [attributes["src"][:22] for tag, attributes in seen.elements if tag == "img" and attributes["src"]] == [
        "data:image/png;base64,"
    ]
    assert not [name for _, attributes in seen.elements for name in attributes if name.startswith("on")]
    assert "\x1b" not in "\n".join(page(record, ENDED))
    seen = Page(comparison_page(compare([record, record])))
    assert seen.count("script") == 1


def test_wrong_values_in_a_start_are_not_believed(tmp_path: Path) -> None:
    facts = {"processes": "two", "effective_batch": -1, "lanes": [], "total_steps": "x", "parameters": None}
    record = read_record(write_run(tmp_path, [start(**facts)], {0: [timed(10)]}))
    assert "1 process on cpu" in "\n".join(page(record, ENDED))
    run_page(record, ENDED)
    json.dumps(as_values([record], [ENDED], []), allow_nan=False)


def test_numbers_of_any_size_can_be_drawn(tmp_path: Path) -> None:
    values = [0.0, -1e308, 1e308, 1e-320, 5.0, 5.0]
    events = [event("step", step, loss=value) for step, value in enumerate(values)]
    seen = Page(run_page(read_record(write_run(tmp_path, [start(), *events])), ENDED))
    assert "Loss" in seen.captions
    assert not [a for _, a in seen.elements if "nan" in (a.get("points") or "") or "inf" in (a.get("points") or "")]


def test_images_are_taken_from_the_media_folder_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (tmp_path / "outside.png").write_bytes(png())
    (folder / "media").mkdir()
    (folder / "media" / "good.png").write_bytes(png())
    (folder / "media" / "text.png").write_text("not an image, though it is called one")
    (folder / "media" / "huge.png").write_bytes(png(100_000, 1))
    (folder / "media" / "large.png").write_bytes(png() + b"x" * 2**21)
    (folder / "media" / "link.png").symlink_to(tmp_path / "outside.png")
    paths = ["good", "text", "huge", "large", "link", "missing", "../../outside", "../media/good"]
    images = {path: f"media/{path}.png" for path in paths} | {"far": str(tmp_path / "outside.png")}
    append(folder / "events.jsonl", [event("step", 1, images=images)])
    assert [picture.name for picture in pictures(read_record(folder))] == ["good"]


def test_a_media_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.png").write_bytes(png())
    folder = write_run(tmp_path / "run", [event("step", 1, images={"a": "media/a.png"})])
    (folder / "media").symlink_to(tmp_path / "elsewhere")
    assert pictures(read_record(folder)) == []


def test_the_page_replaces_a_link_and_is_whole_or_not_there(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "report.html").symlink_to(precious)
    write_page(tmp_path / "report.html", "<p>new")
    assert precious.read_text() == "mine"
    assert (tmp_path / "report.html").read_text() == "<p>new"
    with pytest.raises(OSError):
        write_page(tmp_path / "nowhere" / "report.html", "<p>new")
    with pytest.raises(UnicodeEncodeError):
        write_page(tmp_path / "other.html", "\ud800")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "report.html"]


def test_a_scaling_report(tmp_path: Path) -> None:
    one = finished_run(tmp_path / "one", 1)
    four = finished_run(tmp_path / "four", 4, quickness=3.0)
    rows = compare([read_record(four), read_record(one)])
    assert [(row.processes, row.speed_up, row.possible) for row in rows] == [
        (1, 1.0, 1.0),
        (4, pytest.approx(3.0), 4.0),
    ]
    assert rows[1].efficiency == pytest.approx(0.75)
    text = "\n".join(comparison_lines(rows))
    assert "×3.00" in text and "75 %" in text
    assert "digests: equal, 2 runs ended with the same bits" in text
    assert "Speed-up" in Page(comparison_page(rows)).captions
    scaling = as_values([read_record(one)] * 2, [ENDED] * 2, rows)["scaling"]
    assert [row["processes"] for row in scaling] == [1, 4]


def test_different_bits_and_different_work_are_said(tmp_path: Path) -> None:
    one = finished_run(tmp_path / "one", 1)
    two = finished_run(tmp_path / "two", 2, digest="cd" * 32)
    half = write_run(tmp_path / "half", [start(processes=4, effective_batch=128)])
    text = "\n".join(comparison_lines(compare([read_record(path) for path in (one, two, half)])))
    assert "digests: 2 different ones at the end of 2 runs" in text
    assert "not the same work: batches 128, 64" in text
    assert "no step was timed in half" in text


def test_json_has_times_straggler_and_findings(tmp_path: Path) -> None:
    waits = [timed(step, exchange_s=0.13) for step in (10, 20, 30, 40)]
    slow = [timed(step, compute_s=0.21) for step in (10, 20, 30, 40)]
    record = read_record(write_run(tmp_path, [start()], {0: waits, 1: slow}))
    (run,) = as_values([record], [State("left", "")], [])["runs"]
    assert run["straggler"]["rank"] == 1
    assert [times["rank"] for times in run["times"]] == [0, 1]
    assert [finding["about"] for finding in run["findings"]] == ["straggler"]
    assert run["state"] == "left"


def test_a_searchs_page_has_its_generations_and_its_front(tmp_path: Path) -> None:
    facts = {
        "total_rounds": 2,
        "objectives": {"mass": "min", "grip": "max"},
        "genes": 3,
        "population": 4,
        "guided": True,
    }
    generations = [
        event(
            "step", number, generation=number, best={"mass": 1.0, "grip": 5.0}, evaluated=4, evaluate_s=0.5, found=None
        )
        for number in (1, 2)
    ]
    folder = write_run(tmp_path / "run", [event("start", 0, processes=2, **facts), *generations])
    (folder / "evaluations").mkdir()
    for number in (0, 1):
        found = [[1.0 + number, 2.0], [3.0, 5.0 - number], "it failed", [2.0, 1.0]]
        append(folder / "evaluations" / "0.jsonl", [{"generation": number, "key": f"{number}", "evaluations": found}])
    record = read_record(folder)
    text = "\n".join(page(record, ENDED))
    assert "3 genes, 4 designs a generation, steered by a network" in text
    assert "a generation on 2 processes: evaluating 500.0 ms" in text
    assert "2 of 8 designs could not be evaluated; most often: it failed" in text
    seen = Page(run_page(record, ENDED))
    for caption in ("mass over generations", "grip over generations", "Designs: grip over mass"):
        assert caption in seen.captions
    assert sum(attributes.get("class") == "dot fill c0" for _, attributes in seen.elements) == 6
    (row, other) = compare([record, record])
    assert (row.rate, other.speed_up) == (Rate(8.0, "designs/s"), 1.0)


def test_the_front_of_two_objectives() -> None:
    points = [(1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (2.0, 2.0), (4.0, 3.0), (0.5,)]
    assert front(points, (False, True)) == [(1.0, 1.0), (2.0, 3.0)]
    assert front(points, (True, True)) == [(4.0, 3.0)]


def test_axes_have_round_numbers() -> None:
    assert value_axis(0.0, 1.0, 0, 100).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert step_axis(1, 3, 0, 100).ticks() == [1, 2, 3]
    assert value_axis(1000.0, 1000.5, 0, 100).labels() == [
        "1,000.0",
        "1,000.1",
        "1,000.2",
        "1,000.3",
        "1,000.4",
        "1,000.5",
    ]
    assert value_axis(0.0, 0.12, 0, 100).labels() == ["0.000", "0.025", "0.050", "0.075", "0.100", "0.125"]
    logarithmic = value_axis(0.01, 10.0, 0, 100, may_be_log=True)
    assert logarithmic.is_log
    assert logarithmic.ticks() == pytest.approx([0.01, 0.1, 1, 10])
    assert value_axis(5.0, 5.0, 0, 100).place(5.0) == pytest.approx(50)


def test_markup_is_escaped_unless_it_was_made_here() -> None:
    assert element("p", "<b>", Markup("<i></i>"), class_='"') == '<p class="&quot;">&lt;b&gt;<i></i></p>'


def test_how_a_run_stands(tmp_path: Path) -> None:
    assert state_of(Record(tmp_path), Presence(False, "")).standing == "waiting"
    going = read_record(write_run(tmp_path / "a", [start(), event("checkpoint", 20)]))
    assert state_of(going, Presence(True, "process 7 on x")).words == "running, process 7 on x: step 20 of 40"
    left = state_of(going, Presence(False, ""))
    assert left.standing == "left"
    assert left.words.endswith("started again, it goes on from step 20")
    assert state_of(going, Presence(None, "")).standing == "unknown"
    assert state_of(read_record(finished_run(tmp_path / "b")), Presence(True, "")).standing == "ended"
