"""Every sample is used once, whatever happens to a run; and whatever is done to its ledger is found and named."""

import copy
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep.ckpt.sample_audit import audit_samples
from lockstep.data.iterable_loader import IterableLaneLoader
from lockstep.data.loader_factory import TorchLoader
from lockstep.data.sample_order import SampleOrder
from lockstep.world.world import World
from tests.unit.ckpt.run_history import History, Line

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
    # What the loaders really returned, counted without the ledger.
    uses = Counter(history.seen)
    assert set(uses.values()) == {1}
    full = [epoch for epoch in range(99) if sum(e == epoch for e, _ in uses) == length - num_dropped]
    assert turn.num_finished == len(full) == history.num_batches // per_epoch
    assert turn.num_dropped == num_dropped
    assert [part.stop for part in turn.partial] == [
        batch * (history.num_batches % per_epoch) for _ in range(history.num_batches % per_epoch > 0)
    ]


def consumed_ranges(lines: list[Line]) -> Iterator[tuple[int, int, int]]:
    """Yield each consumed range: the line, the span in it, the range in that."""
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
        line, span, place = data.draw(st.sampled_from(list(consumed_ranges(lines))))
        ranges = lines[line]["spans"][span]["consumed"]
        epoch, start, stop = ranges[place]
        if kind == "duplicate":  # one of its positions is listed again
            position = data.draw(st.integers(start, stop - 1))
            ranges.insert(place + 1, [epoch, position, position + 1])
            positions = [position]
        elif kind == "hole":  # one of its positions is missing
            position = data.draw(st.integers(start, stop - 1))
            ranges[place : place + 1] = [[epoch, *p] for p in ((start, position), (position + 1, stop)) if p[0] < p[1]]
            positions = [position]
        elif kind == "gone":
            del ranges[place]
            positions = list(range(start, stop))
        else:
            ranges.append([epoch, start, stop])
            positions = list(range(start, stop))
        history.rewrite(lines)
        found = history.audit()
    assert found.faults
    problem = "never used or dropped" if kind in ("hole", "gone") else "more than once"
    order = SampleOrder(length, 7, epoch)
    of_epoch = [fault for fault in found.faults if fault.startswith(f"epoch {epoch + 1}:")]
    (fault,) = of_epoch
    assert f"{len(positions)} sample" in fault
    assert problem in fault
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


def test_missing_and_repeated_batches_between_commits(finished: History) -> None:
    lines = finished.lines()
    cut_out = copy.deepcopy(lines)
    cut_out[3]["parent"] = lines[1]["commit"]  # as if batches 4 and 5 had never been used
    finished.rewrite(cut_out)
    assert any("begins with batch 6: batches 4 to 5 are missing" in fault for fault in finished.audit().faults)
    again = copy.deepcopy(lines)
    again.append({**lines[5], "commit": "abcd", "parent": lines[5]["commit"], "step": 99})
    finished.rewrite(again)
    faults = finished.audit().faults
    assert any("begins with batch 10: batches 10 to 11 were used before" in fault for fault in faults)
    assert any(fault.startswith("epoch 3: 8 samples used or dropped more than once") for fault in faults)


def test_dropped_samples_must_be_listed(history: History) -> None:
    history.consume(history.loaders(22, 4), 5)
    history.commit()
    lines = history.lines()
    lines[0]["spans"][0]["dropped"] = []
    history.rewrite(lines)
    missing = ", ".join(str(SampleOrder(22, 7, 0)[position]) for position in (20, 21))
    assert f"epoch 1: 2 samples never used or dropped: {missing}" in history.audit().faults


def test_another_version_of_the_order_is_refused(finished: History) -> None:
    lines = finished.lines()
    for line in lines:
        line["spans"][0]["data"]["order_version"] = 99
    finished.rewrite(lines)
    (fault,) = finished.audit().faults
    assert "its sample order has version 99: this lockstep knows" in fault


def test_an_order_that_repeats_a_sample_is_found(finished: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleOrder, "at", lambda _order, positions: np.maximum(positions, 1))
    assert "epoch 1: 20 positions of its order are only 19 samples" in finished.audit().faults


def test_two_loaders_one_after_the_other(history: History) -> None:
    """The second one starts in the middle of an epoch: batches are counted over both."""
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
    history.consume([TorchLoader(DataLoader(TensorDataset(torch.arange(9)), 3), World())], 4)
    history.commit()
    found = history.audit()
    assert found.faults == ()
    assert str(found).startswith(
        "batches 0 to 6 of a stream, each once: its samples have no numbers to compare; then "
        "batches 7 to 10 of a loader that does not record its samples: nothing can be proven; 3 commits"
    )
    lines = history.lines()
    for ranges in ([[0, 0, 3]], [[0, 0, 3], [2, 3, 4]], [[0, 0, 3], [1, 2, 4]], [[0, 1, 4]]):
        lines[0]["spans"][0]["consumed"] = ranges
        history.rewrite(lines)
        assert len(history.audit().faults) == 1


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
                "data": history.loaders(4, 4)[0].describe() | {"length": length, "global_batch": 1000},
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


def test_progress_is_shown(finished: History) -> None:
    progress: list[str] = []
    audit_samples(finished.folder, progress.append)
    assert progress == ["epoch 1: position 0 of 20", "epoch 2: position 0 of 20", "epoch 3: position 0 of 8"]
