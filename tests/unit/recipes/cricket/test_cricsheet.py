"""Reading Cricsheet's files: the outcome of each ball, and one clear line for every error."""

import copy
import json
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UserError
from lockstep.recipes.cricket import match_files
from lockstep.recipes.cricket.cricsheet import read_match, read_matches
from lockstep.recipes.cricket.match import OUTCOMES, outcome_of
from lockstep.recipes.cricket.match_files import MatchFile, read_match_files
from lockstep.recipes.cricket.synthetic import synthetic_contents

((NAME, CONTENT),) = synthetic_contents(1)


def read(content: Any) -> Any:
    return read_match(MatchFile("m", "m.json", json.dumps(content).encode()))


def write_zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> str:
    with zipfile.ZipFile(path, "w", method) as opened:
        for name, text in members.items():
            opened.writestr(name, text)
    return str(path)


def names_of(path: str) -> list[str]:
    return [file.name for file in read_match_files(path)]


@pytest.mark.parametrize(
    ("runs", "is_wicket", "outcome"),
    [
        *((runs, False, outcome) for runs, outcome in enumerate(("dot", "one", "two", "three", "four"))),
        *((5, False, "four"), (6, False, "six"), (7, False, "six"), (0, True, "wicket"), (1, True, "wicket")),
    ],
)
def test_the_outcome_is_runs_off_the_bat_or_a_wicket(runs: int, is_wicket: bool, outcome: str) -> None:
    assert OUTCOMES[outcome_of(runs, is_wicket)] == outcome


def test_a_match_is_read_as_it_was_written() -> None:
    match = read(CONTENT)
    assert (match.date, match.venue, len(match.innings)) == ("2020-01-01", "Synthetic Ground", 2)
    for innings, written in zip(match.innings, CONTENT["innings"], strict=True):
        balls = [ball for over in written["overs"] for ball in over["deliveries"]]
        assert [ball.total for ball in innings.deliveries] == [ball["runs"]["total"] for ball in balls]
        assert [ball.is_wide for ball in innings.deliveries] == ["wides" in ball.get("extras", {}) for ball in balls]
        assert [bool(ball.out) for ball in innings.deliveries] == ["wickets" in ball for ball in balls]
        assert [ball.batter for ball in innings.deliveries] == [f"id {ball['batter']}" for ball in balls]
        assert innings.opponent != innings.team
    assert match.innings[1].target == 1 + sum(ball.total for ball in match.innings[0].deliveries)


def set_field(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for part in path[:-1]:
            content = content[part]
        content[path[-1]] = to

    return change


def remove(*path: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for part in path[:-1]:
            content = content[part]
        del content[path[-1]]

    return change


BALL = ("innings", 1, "overs", 2, "deliveries", 3)
PLACE = "m.json: innings 2, over 2, delivery 4: "


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (remove("info"), "m.json: info: expected an object, but it is missing"),
        (remove("innings"), "m.json: innings: expected a list, but it is missing"),
        (set_field("info", "dates", to=["yesterday"]), "m.json: info: dates: expected dates such as 2016-06-20, got"),
        (set_field("info", "dates", to=[]), "m.json: info: dates: expected dates such as 2016-06-20, got []"),
        (set_field("info", "teams", to=["alone"]), "m.json: info: teams: expected two, got 1"),
        (set_field("info", "balls_per_over", to=0), "m.json: info: balls_per_over: expected 1 to 60, got 0"),
        (set_field("info", "registry", "people", to=[]), "m.json: info: people: expected an object, got []"),
        (set_field("innings", 1, "team", to="Nobody"), "m.json: innings 2: team 'Nobody' is not one of"),
        (remove("innings", 0, "overs"), "m.json: innings 1: overs: expected a list, but it is missing"),
        (set_field("innings", 1, "target", "overs", to=True), "m.json: innings 2: target: overs: expected a number"),
        (set_field("innings", 1, "powerplays", to=[{"from": 0.1}]), "m.json: innings 2: powerplays: from 0.1 to None"),
        (remove("innings", 1, "overs", 2, "over"), "m.json: innings 2, over entry 3: over: expected a whole number"),
        (set_field(*BALL, to="wide"), PLACE + "a delivery: expected an object, got 'wide'"),
        (remove(*BALL, "runs"), PLACE + "runs: expected an object, but it is missing"),
        (remove(*BALL, "runs", "total"), PLACE + "total: expected a whole number, but it is missing"),
        (set_field(*BALL, "runs", "batter", to="4"), PLACE + "batter: expected a whole number, got '4'"),
        (set_field(*BALL, "runs", "batter", to=True), PLACE + "batter: expected a whole number, got True"),
        (set_field(*BALL, "runs", "batter", to=-1), PLACE + "batter: expected 0 to 30, got -1"),
        (set_field(*BALL, "runs", to={"batter": 1, "extras": 1, "total": 3}), PLACE + "runs: 1 off the bat and 1"),
        (set_field(*BALL, "extras", to={"gifts": 1}), PLACE + "extras: 'gifts' is not one of byes, legbyes"),
        (set_field(*BALL, "wickets", to={}), PLACE + "wickets: expected a list, got {}"),
        (set_field(*BALL, "wickets", to=[]), PLACE + "wickets: expected the players out, got an empty list"),
        (
            set_field(*BALL, "wickets", to=[{"kind": "bowled"}]),
            PLACE + "player_out: expected a string, but it is missing",
        ),
        (set_field(*BALL, "bowler", to="A Stranger"), PLACE + "bowler: 'A Stranger' has no id in info.registry.people"),
    ],
)
def test_an_error_names_the_place(change: Callable[[Any], None], line: str) -> None:
    content = copy.deepcopy(CONTENT)
    change(content)
    with pytest.raises(UserError) as caught:
        read(content)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"{", "m.json: not JSON: "),
        (b"\xff\xfe\xfa", "m.json: not JSON: "),
        (b"[" * 100_000, "m.json: not a match file: nested too deeply"),
        (b"1" * 5_000, "m.json: not JSON: "),
        (b"[]", "m.json: the file: expected an object, got []"),
    ],
)
def test_a_file_that_is_no_match_is_refused(text: bytes, line: str) -> None:
    with pytest.raises(UserError) as caught:
        read_match(MatchFile("m", "m.json", text))
    assert str(caught.value).startswith(line)


def test_an_archive_a_folder_and_a_file_give_the_same_match_and_other_files_are_passed_over(tmp_path: Path) -> None:
    text = json.dumps(CONTENT).encode()
    inner = tmp_path / "inner.zip"
    write_zip(inner, {"2.json": b"{"})
    others = {"README.txt": b"no match", "inner.zip": inner.read_bytes(), "folder/": b""}
    zipped = write_zip(tmp_path / "all.zip", {"1.json": text, **others})
    (tmp_path / "1.json").write_bytes(text)
    found = [read_matches(path) for path in (zipped, str(tmp_path), str(tmp_path / "1.json"))]
    assert found[0] == found[1] == found[2]
    assert [match.name for match in found[0]] == ["1"]


@pytest.mark.parametrize("name", ["../x.json", "a/../../x.json", "/x.json", "C:x.json", "..\\x.json", "\\x.json"])
def test_a_name_that_leads_out_of_the_archive_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write_zip(tmp_path / "bad.zip", {"good.json": b"{}", name: b"{}"})
    with pytest.raises(UserError) as caught:
        names_of(path)
    assert f"{name}: the name leads out of the archive" in str(caught.value)


def test_a_link_is_refused_by_name(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as opened:
        opened.writestr(link, "/etc/passwd")
    with pytest.raises(UserError, match=r"link\.json: a link: expected plain files only"):
        names_of(str(tmp_path / "bad.zip"))


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "bomb.zip", {"1.json": b" " * 2_000_000})
    with pytest.raises(UserError, match=r"1\.json: unpacks to more than 200 times its size"):
        names_of(path)


def test_data_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"1.json": b"x" * 50, "2.json": b"y" * 60}
    path = write_zip(tmp_path / "a.zip", members, zipfile.ZIP_STORED)
    monkeypatch.setattr(match_files, "_MAX_TOTAL_BYTES", 100)
    with pytest.raises(UserError, match=r"a\.zip: 110 bytes when unpacked, more than 100"):
        names_of(path)
    monkeypatch.setattr(match_files, "_MAX_BYTES", 55)
    with pytest.raises(UserError, match=r"2\.json: 60 bytes when unpacked, more than 55"):
        names_of(path)
    monkeypatch.setattr(match_files, "_MAX_FILES", 1)
    with pytest.raises(UserError, match=r"a\.zip: 2 match files, more than 1"):
        names_of(path)
    (tmp_path / "long.json").write_bytes(b"x" * 56)
    with pytest.raises(UserError, match="longer than 55 bytes"):
        names_of(str(tmp_path / "long.json"))


def test_an_archive_with_false_sizes_is_refused(tmp_path: Path) -> None:
    path = Path(write_zip(tmp_path / "lie.zip", {"1.json": b"{}" + b" " * 98}, zipfile.ZIP_STORED))
    data = path.read_bytes()
    directory = data.rindex(b"PK\x01\x02")
    size = directory + 24  # of the unpacked member, in the central directory
    path.write_bytes(data[:size] + (10).to_bytes(4, "little") + data[size + 4 :])
    with pytest.raises(UserError, match=r"1\.json: "):
        names_of(str(path))


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = Path(write_zip(tmp_path / "a.zip", {"1.json": json.dumps(CONTENT).encode()}))
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"1\.json: cannot be unpacked: "):
        names_of(str(path))
    path.write_bytes(data[:300])
    with pytest.raises(UserError, match=r"a\.zip: not a valid zip archive: "):
        names_of(str(path))


def test_empty_and_missing_data_is_refused(tmp_path: Path) -> None:
    empty = write_zip(tmp_path / "empty.zip", {"README.txt": b""})
    with pytest.raises(UserError, match=r"empty\.zip: no \.json file in this archive"):
        names_of(empty)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"folder: no \.json file in this folder"):
        names_of(str(tmp_path / "folder"))
    with pytest.raises(UserError, match=r"data\.path=nowhere\.zip: no such file"):
        names_of("nowhere.zip")
    with pytest.raises(UserError, match=r"data\.path=/dev/zero: not a file"):
        names_of("/dev/zero")
    content = copy.deepcopy(CONTENT)
    for innings in content["innings"]:
        innings["overs"] = []
    (tmp_path / "1.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="no ball was bowled in any of the 1 matches"):
        read_matches(str(tmp_path / "1.json"))


def test_the_same_match_under_two_names_is_refused(tmp_path: Path) -> None:
    text = json.dumps(CONTENT).encode()
    path = write_zip(tmp_path / "a.zip", {"a/1.json": text, "b/1.json": text})
    with pytest.raises(UserError, match="the match 1 occurs twice"):
        read_matches(path)
