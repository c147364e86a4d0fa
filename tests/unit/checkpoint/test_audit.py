"""The audit: whatever happens to a run, it comes out clean; whatever is done to its ledger is found and named."""

import copy
import json
import re
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep.checkpoint.audit import Audit, audit
from lockstep.checkpoint.ledger import write_line
from lockstep.checkpoint.store import Store
from lockstep.data.foreign import ForeignLoader
from lockstep.data.iterable import IterableLaneLoader
from lockstep.data.loader import LaneLoader
from lockstep.data.order import Order
from lockstep.errors import UserError
from lockstep.events.jsonl import JsonLines, read_lines
from lockstep.train.consumption import Consumption, Loader
from lockstep.world.world import World
from tests.checkpoints import save

Line = dict[str, Any]


class History:
    """A run's life as far as the ledger sees it: real loaders, the real bookkeeping; training is left out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = folder / "ledger.jsonl"
        self.ledger.touch()
        self.attempt = 1
        self.processes = 1
        self.num_batches = 0
        self.saved = [(None, 0, 0)]  # what an attempt can begin from: commit, batches, samples seen until then
        self.seen: list[tuple[int, int]] = []  # epoch and sample, in the order of their use
        self._consumption = Consumption()

    def loaders(self, length: int, batch: int, tail: str = "drop") -> list[LaneLoader]:
        """One for each rank."""
        lanes = next(lanes for lanes in (4, 2, 1) if batch % lanes == 0)
        size = min(self.processes, lanes)
        worlds = [World(rank=rank, size=size) for rank in range(size)]
        dataset = TensorDataset(torch.arange(length))
        return [LaneLoader(dataset, batch, world, lanes=lanes, tail=tail, seed=7) for world in worlds]  # type: ignore[arg-type]

    def consume(self, loaders: Sequence[Loader], num_batches: int) -> None:
        stop = self.num_batches + num_batches
        for batches in zip(*(loader.batches(self.num_batches, stop) for loader in loaders), strict=True):
            self._consumption.take(loaders[0], batches[0])
            for lane in (lane for batch in batches for lane in batch.lanes if lane.data is not None):
                self.seen += [(batches[0].epoch, int(sample)) for sample in lane.data[0][: lane.size]]
            self.num_batches += 1

    def commit(self, *, checkpoint: bool = False, line: bool = True, **facts: Any) -> str:
        """`checkpoint`: one that stays; `line`: in the ledger, which a kill can prevent."""
        step = self.num_batches
        entry = {
            "parent": self.saved[-1][0],
            "attempt": self.attempt,
            "processes": self.processes,
            "spans": self._consumption.begin_commit(),
        }
        if checkpoint:
            store = Store(self.folder / "checkpoints")
            save(store.folder, step, {}, {"ledger": entry, "position": {"batches": self.num_batches}, **facts})
            name = store.manifest(step).commit
            if line:
                write_line(self.ledger, store.manifest(step))
        else:
            name = secrets.token_hex(8)
            lines = JsonLines(self.ledger)
            lines.emit({"commit": name, "step": step, **entry})
            lines.close()
        self._consumption.end_commit(is_made=True)
        self.saved.append((name, self.num_batches, len(self.seen)))
        return name

    def kill(self, *, back: int = 0, processes: int = 1) -> None:
        """Go on from the newest commit, or, if the newest `back` are damaged, from an earlier one."""
        del self.saved[max(len(self.saved) - back, 1) :]
        store = Store(self.folder / "checkpoints")
        for step in store.steps():
            if store.manifest(step).commit == self.saved[-1][0]:
                write_line(self.ledger, store.manifest(step))  # as a run does that takes it up
        _, self.num_batches, num_seen = self.saved[-1]
        del self.seen[num_seen:]
        self._consumption = Consumption()
        self.attempt += 1
        self.processes = processes

    def audit(self) -> Audit:
        return audit(self.folder)

    def lines(self) -> list[Line]:
        return list(read_lines(self.ledger))

    def rewrite(self, lines: list[Line]) -> None:
        self.ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path)


@pytest.fixture
def finished(history: History) -> History:
    """Two and a half epochs of 20 samples in batches of 4, in a commit each 2 batches."""
    loaders = history.loaders(20, 4)
    for _ in range(6):
        history.consume(loaders, 2)
        history.commit()
    return history


EVENTS = st.one_of(
    st.tuples(st.just("consume"), st.integers(1, 9)),
    st.tuples(st.just("commit"), st.booleans()),
    st.tuples(st.just("kill"), st.integers(0, 2), st.integers(1, 4), st.booleans()),
)


@given(st.integers(1, 30), st.integers(1, 8), st.sampled_from(["drop", "short", "pad"]), st.lists(EVENTS, max_size=25))
@settings(max_examples=60, deadline=None)
def test_commits_kills_and_resizes_audit_clean(length: int, batch: int, tail: str, events: list[Any]) -> None:
    batch = min(batch, length)
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder))
        for kind, *how in events:
            if kind == "consume":
                history.consume(history.loaders(length, batch, tail), how[0])
            elif kind == "commit":
                history.commit(checkpoint=how[0])
            else:
                if how[2]:  # in the middle of a save
                    history.commit(checkpoint=True, line=False)
                history.kill(back=how[0], processes=how[1])
        history.consume(history.loaders(length, batch, tail), 1)
        history.commit(checkpoint=True, line=False)
        found = history.audit()
    assert found.faults == ()
    assert found.num_commits == len(history.saved) - 1
    (turn,) = found.turns
    per_epoch = length // batch if tail == "drop" else -(-length // batch)
    num_dropped = length % batch if tail == "drop" else 0
    # What the loader really gave, counted without the ledger.
    uses = Counter(history.seen)
    assert set(uses.values()) == {1}
    full = [epoch for epoch in range(99) if sum(e == epoch for e, _ in uses) == length - num_dropped]
    assert turn.num_finished == len(full) == history.num_batches // per_epoch
    assert turn.num_dropped == num_dropped
    assert [part.stop for part in turn.partial] == [
        batch * (history.num_batches % per_epoch) for _ in range(history.num_batches % per_epoch > 0)
    ]


def places_of_stretches(lines: list[Line]) -> Iterator[tuple[int, int, int]]:
    """The line, the span in it, the stretch in that."""
    for number, line in enumerate(lines):
        for place, span in enumerate(line["spans"]):
            yield from ((number, place, index) for index in range(len(span["consumed"])))


@given(st.data(), st.integers(6, 30), st.integers(1, 6), st.sampled_from(["duplicate", "hole", "gone", "again"]))
@settings(max_examples=80, deadline=None)
def test_a_planted_duplicate_or_hole_is_named(data: st.DataObject, length: int, batch: int, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder))
        loaders = history.loaders(length, batch)
        for _ in range(data.draw(st.integers(1, 4))):
            history.consume(loaders, data.draw(st.integers(1, 2 * len(loaders[0]))))
            history.commit()
        lines = history.lines()
        line, span, place = data.draw(st.sampled_from(list(places_of_stretches(lines))))
        stretches = lines[line]["spans"][span]["consumed"]
        epoch, start, stop = stretches[place]
        if kind == "duplicate":  # one position of it once more
            position = data.draw(st.integers(start, stop - 1))
            stretches.insert(place + 1, [epoch, position, position + 1])
            positions = [position]
        elif kind == "hole":  # one position of it left out
            position = data.draw(st.integers(start, stop - 1))
            stretches[place : place + 1] = [
                [epoch, *p] for p in ((start, position), (position + 1, stop)) if p[0] < p[1]
            ]
            positions = [position]
        elif kind == "gone":
            del stretches[place]
            positions = list(range(start, stop))
        else:
            stretches.append([epoch, start, stop])
            positions = list(range(start, stop))
        history.rewrite(lines)
        found = history.audit()
    assert found.faults
    told = "never used or dropped" if kind in ("hole", "gone") else "more than once"
    order = Order(length, 7, epoch)
    of_epoch = [fault for fault in found.faults if fault.startswith(f"epoch {epoch + 1}:")]
    (fault,) = of_epoch
    assert f"{len(positions)} sample" in fault
    assert told in fault
    named = re.findall(r"\d+", fault.rpartition(": ")[2].partition(" and ")[0])
    assert [int(sample) for sample in named] == [order[position] for position in positions[:10]]


@given(st.data(), st.integers(12, 30), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_planted_swap_is_found(data: st.DataObject, length: int, batch: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder))
        loaders = history.loaders(length, batch)
        for _ in range(4):
            history.consume(loaders, data.draw(st.integers(1, len(loaders[0]))))
            history.commit()
        lines = history.lines()
        one, other = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True))
        what = data.draw(st.sampled_from(["spans", "consumed"]))
        if what == "spans":
            lines[one]["spans"], lines[other]["spans"] = lines[other]["spans"], lines[one]["spans"]
        else:
            first, second = lines[one]["spans"][0], lines[other]["spans"][0]
            first["consumed"], second["consumed"] = second["consumed"], first["consumed"]
        history.rewrite(lines)
        assert history.audit().faults


def test_the_sentence(history: History) -> None:
    for processes, num_batches in ((4, 7), (1, 8), (2, 3)):
        history.processes = processes
        history.consume(history.loaders(22, 4), num_batches)
        history.commit()
        history.kill()
    assert str(history.audit()) == (
        "3 finished epochs: each of 22 samples exactly once or dropped (2 per epoch); 54% of epoch 4; "
        "3 commits over 3 attempts on 4, 1 and 2 processes"
    )


def test_commits_that_were_undone_are_left_out_and_counted(history: History) -> None:
    loaders = history.loaders(20, 4)
    for _ in range(3):
        history.consume(loaders, 2)
        history.commit()
    history.kill(back=2)
    history.consume(loaders, 3)
    history.commit()
    found = history.audit()
    assert found.faults == ()
    assert (found.num_commits, found.num_undone) == (2, 2)
    assert str(found).endswith("2 commits over 2 attempts on 1 process (2 more were undone)")


def test_a_line_is_taken_from_the_manifest_where_the_ledger_lacks_it(history: History) -> None:
    loaders = history.loaders(20, 4)
    for number in range(3):
        history.consume(loaders, 2)
        history.commit(checkpoint=True, line=number == 1)
    found = history.audit()
    assert (found.faults, found.num_commits) == ((), 3)


def test_a_commit_that_is_in_neither_is_a_fault(finished: History) -> None:
    lines = finished.lines()
    finished.rewrite(lines[:2] + lines[3:])
    (fault,) = finished.audit().faults
    assert f"goes on from {lines[2]['commit']}, which is neither in the ledger nor a checkpoint" in fault


def test_batches_between_commits_that_are_missing_or_repeated(finished: History) -> None:
    lines = finished.lines()
    cut_out = copy.deepcopy(lines)
    cut_out[3]["parent"] = lines[1]["commit"]  # as if batches 4 and 5 had never been
    finished.rewrite(cut_out)
    assert any("begins with batch 6: batches 4 to 5 are missing" in fault for fault in finished.audit().faults)
    again = copy.deepcopy(lines)
    again.append({**lines[5], "commit": "abcd", "parent": lines[5]["commit"], "step": 99})
    finished.rewrite(again)
    faults = finished.audit().faults
    assert any("begins with batch 10: batches 10 to 11 were used before" in fault for fault in faults)
    assert any(fault.startswith("epoch 3: 8 samples used or dropped more than once") for fault in faults)


def test_what_should_have_been_dropped_and_was_not_listed(history: History) -> None:
    history.consume(history.loaders(22, 4), 5)
    history.commit()
    lines = history.lines()
    lines[0]["spans"][0]["dropped"] = []
    history.rewrite(lines)
    missing = ", ".join(str(Order(22, 7, 0)[position]) for position in (20, 21))
    assert f"epoch 1: 2 samples never used or dropped: {missing}" in history.audit().faults


def test_another_seed_or_order_is_not_taken_for_ours(finished: History) -> None:
    lines = finished.lines()
    for line in lines:
        line["spans"][0]["data"]["order_version"] = 99
    finished.rewrite(lines)
    (fault,) = finished.audit().faults
    assert "its order is of version 99: this lockstep knows" in fault


def test_an_order_that_repeats_a_sample_is_found(finished: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Order, "at", lambda _order, positions: np.maximum(positions, 1))
    assert "epoch 1: 20 positions of its order are only 19 samples" in finished.audit().faults


def test_two_loaders_in_turn(history: History) -> None:
    """The second begins in the middle of an epoch: batches are counted over both."""
    history.consume(history.loaders(20, 4), 7)
    history.commit()
    history.consume(history.loaders(12, 4), 2)
    history.commit()
    history.consume(history.loaders(12, 4), 4)
    history.commit()
    found = history.audit()
    assert found.faults == ()
    assert str(found).startswith(
        "1 finished epoch: each of 20 samples exactly once; 40% of epoch 2; then "
        "1 finished epoch: each of 12 samples exactly once; 66% of epoch 3, from position 4 on; 33% of epoch 5; "
    )


class Numbers(IterableDataset[tuple[int]]):
    def __iter__(self) -> Iterator[tuple[int]]:
        return ((number,) for number in range(12))


def test_streams_and_foreign_loaders(history: History) -> None:
    stream = IterableLaneLoader(Numbers(), 4, World(), lanes=1)
    history.consume([stream], 4)
    history.commit()
    history.consume([stream], 3)
    history.commit()
    history.consume([ForeignLoader(DataLoader(TensorDataset(torch.arange(9)), 3), World())], 4)
    history.commit()
    found = history.audit()
    assert found.faults == ()
    assert str(found).startswith(
        "batches 0 to 6 of a stream, each once: its samples have no numbers that could be compared; then "
        "batches 7 to 10 of a loader that does not say which samples it took: nothing can be proven; 3 commits"
    )
    lines = history.lines()
    for stretches in ([[0, 0, 3]], [[0, 0, 3], [2, 3, 4]], [[0, 0, 3], [1, 2, 4]], [[0, 1, 4]]):
        lines[0]["spans"][0]["consumed"] = stretches
        history.rewrite(lines)
        assert len(history.audit().faults) == 1


def test_a_ledger_that_is_not_what_the_checkpoint_says(history: History) -> None:
    history.consume(history.loaders(20, 4), 2)
    history.commit(checkpoint=True)
    lines = history.lines()
    lines[0]["spans"][0]["batches"] = [0, 3]
    lines[0]["spans"][0]["consumed"] = [[0, 0, 12]]
    history.rewrite(lines)
    (fault,) = history.audit().faults
    assert "its line of commit" in fault
    assert "is not what that checkpoint's manifest says" in fault


def test_a_checkpoint_that_is_further_than_its_ledger(history: History) -> None:
    history.consume(history.loaders(20, 4), 2)
    history.commit(checkpoint=True, position={"batches": 3})
    (fault,) = history.audit().faults
    assert "its checkpoint has consumed 3 batches, and the ledger lists 2" in fault


def test_the_history_of_events_is_compared(history: History) -> None:
    events, loaders = history.folder / "events.jsonl", history.loaders(20, 4)
    lines = JsonLines(events)
    for step in range(4):
        lines.emit({"kind": "step", "step": step})
        history.consume(loaders, 1)
        history.commit(checkpoint=True, events=lines.mark()._asdict())
    lines.emit({"kind": "end"})
    lines.close()
    assert history.audit().faults == ()
    whole = events.read_bytes()
    size = len(whole) // 5
    events.write_bytes(whole.replace(b'"step": 2', b'"step": 9'))
    (fault,) = history.audit().faults
    assert re.fullmatch(r"events.jsonl was altered between bytes \d+ and \d+, after step 3 was saved", fault)
    events.write_bytes(whole[: 2 * size])
    assert "shorter than when step" in history.audit().faults[0]
    events.unlink()
    assert "events.jsonl is gone" in history.audit().faults[0]


def hostile(change: Callable[[Line], Any]) -> Callable[[list[Line]], None]:
    return lambda lines: change(lines[2])


def set_data(name: str, value: Any) -> Callable[[list[Line]], None]:
    return lambda lines: [line["spans"][0]["data"].__setitem__(name, value) for line in lines] and None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (set_data("length", 2**31 + 1), "2147483649 samples: expected 1 to 2,147,483,648"),
        (set_data("length", -1), "-1 samples"),
        (set_data("length", True), "True samples"),
        (set_data("length", {"a": 1}), "dict samples"),
        (set_data("global_batch", 0), "global batch is said to be 0"),
        (set_data("global_batch", 21), "more than the data set's 20"),
        (set_data("tail", ["drop"]), "tail is said to be list"),
        (set_data("tail", "\x1b[2J"), "tail is said to be '\\x1b[2J'"),
        (set_data("seed", 1.5), "no seed"),
        (set_data("shuffle", "yes"), "no seed, or does not say whether it is shuffled"),
        (hostile(lambda line: line.update(commit="../x")), "does not name its commit in hex"),
        (hostile(lambda line: line.update(commit=None)), "does not name its commit in hex"),
        (hostile(lambda line: line.update(parent=7)), "goes on from 7, which is no commit"),
        (hostile(lambda line: line.update(step=-1)), "-1 in step"),
        (hostile(lambda line: line.update(attempt=2**61)), "in attempt"),
        (hostile(lambda line: line.update(processes=0)), "0 in processes"),
        (hostile(lambda line: line.update(processes="2")), "2 in processes"),
        (hostile(lambda line: line.update(spans={})), "no list of spans"),
        (hostile(lambda line: line.update(spans=[7])), "does not say of which data"),
        (hostile(lambda line: line["spans"][0].update(data=[])), "does not say of which data"),
        (hostile(lambda line: line["spans"][0].update(batches=[4])), "1 numbers for a span's batches"),
        (hostile(lambda line: line["spans"][0].update(batches=[4, 4])), "4 in batches: expected a whole number from 5"),
        (hostile(lambda line: line["spans"][0].update(batches=[4.0, 6.0])), "4.0 in batches"),
        (hostile(lambda line: line["spans"][0].update(consumed=[[0, 1]])), "not [epoch, first, past the last]"),
        (hostile(lambda line: line["spans"][0].update(consumed=[[0, 8, 2**40]])), f"{2**40} in consumed"),
        (hostile(lambda line: line["spans"][0].update(consumed=[[-1, 0, 8]])), "-1 in consumed"),
        (hostile(lambda line: line["spans"][0].update(consumed=[[0, 0, 2**31]])), "positions were used that no batch"),
        (hostile(lambda line: line["spans"][0].update(consumed=[[2**59, 0, 8]])), "no batch reaches it"),
        (hostile(lambda line: line["spans"][0].update(batches=[4, 2**59])), "more epochs: no sample was used"),
        (hostile(lambda line: line.update(parent=line["commit"])), "circle"),
        (lambda lines: lines[0].update(parent=lines[3]["commit"]), "circle"),
        (lambda lines: lines[0].update(parent=lines[-1]["commit"]), "none of them is the newest"),
        (lambda lines: lines.append({**lines[1], "processes": 5}), "twice, with different contents"),
        (lambda lines: lines[1].update(attempt=9), "of attempt 1 goes on from"),
        (lambda lines: lines[:] and lines.__setitem__(0, {"commit": "0", "x": [[]] * 100}), "no list of spans"),
    ],
)
def test_a_made_up_ledger_is_a_clear_line(finished: History, change: Callable[[list[Line]], None], told: str) -> None:
    lines = finished.lines()
    change(lines)
    finished.rewrite(lines)
    faults = finished.audit().faults
    assert any(told in fault for fault in faults), faults
    assert all(len(fault) < 600 and fault.isprintable() for fault in faults)


def test_the_faults_of_a_long_ledger_are_counted(finished: History) -> None:
    finished.rewrite([{"commit": "?"}] * 1000)
    faults = finished.audit().faults
    assert len(faults) == 51
    assert faults[-1] == "950 more faults are not listed"


def test_a_ledger_too_long_to_read(finished: History) -> None:
    with finished.ledger.open("ab") as file:
        file.truncate(2**28 + 1)  # sparse
    assert "and no more than 268,435,456 are read" in finished.audit().faults[0]


def test_a_very_long_data_set_needs_little_memory(history: History) -> None:
    length = 2**31
    line = {
        "commit": "aa",
        "parent": None,
        "step": 1,
        "attempt": 1,
        "processes": 1,
        "spans": [
            {
                "data": history.loaders(4, 4)[0].facts() | {"length": length, "global_batch": 1000},
                "batches": [0, 100],
                "consumed": [[0, 0, 100_000]],
                "dropped": [],
            }
        ],
    }
    history.rewrite([line])
    found = history.audit()
    assert (found.faults, found.turns[0].partial[0].stop) == ((), 100_000)
    assert "less than 1% of epoch 1" in str(found)


def test_it_tells_how_far_it_is(finished: History) -> None:
    told: list[str] = []
    audit(finished.folder, told.append)
    assert told == ["epoch 1: position 0 of 20", "epoch 2: position 0 of 20", "epoch 3: position 0 of 8"]


def test_nothing_to_audit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        audit(tmp_path)
    (tmp_path / "ledger.jsonl").write_text('{"torn')
    with pytest.raises(UserError, match="no checkpoint was committed yet"):
        audit(tmp_path)


def test_a_damaged_manifest_is_a_note(history: History) -> None:
    history.consume(history.loaders(20, 4), 2)
    history.commit(checkpoint=True)
    (history.folder / "checkpoints" / "step-2" / "manifest.json").write_text("{}")
    found = history.audit()
    assert found.faults == ()
    assert "manifest.json has format None" in found.notes[0]
