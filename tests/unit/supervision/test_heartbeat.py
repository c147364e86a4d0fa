"""What a rank writes into its heartbeat page is what its agent reads."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.supervision import heartbeat
from lockstep.supervision.heartbeat import MAX_DATA_WORKERS, HeartbeatPage, HeartbeatWriter, Phase


@pytest.fixture
def writer(tmp_path: Path) -> HeartbeatWriter:
    writer = HeartbeatWriter()
    writer.begin(tmp_path / "rank-0.heartbeat")
    return writer


@pytest.fixture
def page(tmp_path: Path, writer: HeartbeatWriter) -> HeartbeatPage:
    return HeartbeatPage(tmp_path / "rank-0.heartbeat")


def test_without_an_agent_nothing_happens() -> None:
    writer = HeartbeatWriter()
    writer.enter(Phase.DATA)
    writer.complete_step(3)
    writer.enter_sample(4)
    with writer.data_worker_slots(1) as slots:
        writer.begin_data_worker(0, slots)
    with writer.during(Phase.SAVING):
        writer.mark_stopping()
    writer.count_optimizer_step()
    writer.acknowledge_request()


def test_the_functions_of_the_module_write_the_heartbeat_of_this_process(tmp_path: Path) -> None:
    heartbeat.begin(tmp_path / "rank-0.heartbeat")
    try:
        with heartbeat.during(Phase.EVALUATING):
            assert HeartbeatPage(tmp_path / "rank-0.heartbeat").read().phase is Phase.EVALUATING  # type: ignore[union-attr]
    finally:
        heartbeat.end()


def test_a_new_page_has_no_hole(tmp_path: Path) -> None:
    """If memory is full, a hole would kill the first process that touches it, perhaps the agent with all its ranks."""
    HeartbeatPage(tmp_path / "new.heartbeat", create=True)
    with (tmp_path / "new.heartbeat").open("rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 4096


def test_a_step_lasts_from_its_data_until_it_is_counted(writer: HeartbeatWriter, page: HeartbeatPage) -> None:
    seen = []
    for phase in (Phase.RESUMING, Phase.DATA, Phase.COMPUTING, Phase.UPDATING):
        writer.enter(phase)
        seen.append(page.read().is_in_step)  # type: ignore[union-attr]
    with writer.during(Phase.EVALUATING):
        seen.append(page.read().is_in_step)  # type: ignore[union-attr]
    writer.complete_step(5)
    with writer.during(Phase.SAVING):
        seen.append(page.read().is_in_step)  # type: ignore[union-attr]
    writer.enter(Phase.DATA)
    writer.enter(Phase.SCRIPT)  # there was no batch left
    seen.append(page.read().is_in_step)  # type: ignore[union-attr]
    assert seen == [False, True, True, True, True, False, False]


def test_the_step_and_the_phase_and_its_start_are_read(writer: HeartbeatWriter, page: HeartbeatPage) -> None:
    before = time.monotonic()
    writer.complete_step(41)
    writer.enter(Phase.EXCHANGING)
    reading = page.read()
    assert reading is not None
    assert (reading.pid, reading.step, reading.phase) == (os.getpid(), 41, Phase.EXCHANGING)
    assert before <= reading.since <= time.monotonic()
    assert not reading.is_stopping
    writer.mark_stopping()
    assert page.read().is_stopping  # type: ignore[union-attr]


def test_the_longest_duration_of_each_completed_phase_is_kept(writer: HeartbeatWriter, page: HeartbeatPage) -> None:
    for duration_s in (0.0, 0.03, 0.0):
        writer.enter(Phase.DATA)
        time.sleep(duration_s)
        writer.enter(Phase.COMPUTING)
    longest_s = page.read().longest_s  # type: ignore[union-attr]
    assert 0.03 <= longest_s[Phase.DATA] < 1.0
    assert Phase.EVALUATING not in longest_s


def test_after_a_nested_phase_the_outer_one_continues(writer: HeartbeatWriter, page: HeartbeatPage) -> None:
    writer.enter(Phase.UPDATING)
    with pytest.raises(ValueError), writer.during(Phase.EVALUATING):
        assert page.read().phase is Phase.EVALUATING  # type: ignore[union-attr]
        raise ValueError
    assert page.read().phase is Phase.UPDATING  # type: ignore[union-attr]


def test_optimizer_steps_count_outside_of_a_lockstep_loop_only(writer: HeartbeatWriter, page: HeartbeatPage) -> None:
    writer.enter(Phase.SCRIPT)
    writer.count_optimizer_step()
    writer.enter(Phase.UPDATING)
    writer.count_optimizer_step()
    assert page.read().step == 1  # type: ignore[union-attr]


def test_data_workers_write_which_sample_they_read(writer: HeartbeatWriter, page: HeartbeatPage) -> None:
    writer.enter_sample(5)
    assert page.read().sample == 5  # type: ignore[union-attr]
    writer.leave_samples()
    assert page.read().sample is None  # type: ignore[union-attr]
    with writer.data_worker_slots(3) as training, writer.data_worker_slots(3) as evaluation:
        children = [fork_worker(writer, 2, slots, sample) for slots, sample in ((training, 77), (evaluation, 78))]
        reading = page.read()
        assert reading is not None
        found = [(worker.number, worker.pid, worker.sample) for worker in reading.data_workers]
        assert found == [(2, children[0], 77), (2, children[1], 78)], "each loader's workers have their own slots"
        assert reading.sample is None, "a worker does not write into the rank's own sample"
    assert len(page.read().data_workers) == 2, "what a dead worker was reading can still be seen"  # type: ignore[union-attr]
    with writer.data_worker_slots(6) as slots:
        assert {*training, *evaluation} == set(slots), "and their slots are free again"


def fork_worker(writer: HeartbeatWriter, number: int, slots: Sequence[int], sample: int) -> int:
    if (child := os.fork()) == 0:
        writer.begin_data_worker(number, slots)
        writer.enter_sample(sample)
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_data_workers_beyond_the_last_slot_are_not_seen(writer: HeartbeatWriter, page: HeartbeatPage) -> None:
    with writer.data_worker_slots(MAX_DATA_WORKERS + 1) as slots:
        assert len(slots) == MAX_DATA_WORKERS
        writer.begin_data_worker(MAX_DATA_WORKERS, slots)
    writer.enter_sample(1)
    assert page.read().data_workers == []  # type: ignore[union-attr]
    assert page.read().sample is None  # type: ignore[union-attr]


def test_an_empty_or_invalid_page_is_not_read(page: HeartbeatPage, tmp_path: Path) -> None:
    assert HeartbeatPage(tmp_path / "new.heartbeat", create=True).read() is None
    page.ints[heartbeat._PHASE] = 1000
    assert page.read() is None
    page.ints[heartbeat._PHASE] = Phase.DATA
    page.ints[heartbeat._AT_VERSION] += 1
    assert page.read() is None


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "else.txt").write_text("x" * 4096)
    (tmp_path / "rank-1.heartbeat").symlink_to(tmp_path / "else.txt")
    with pytest.raises(OSError):
        heartbeat.HeartbeatPage(tmp_path / "rank-1.heartbeat", create=True)
    assert (tmp_path / "else.txt").read_text() == "x" * 4096
