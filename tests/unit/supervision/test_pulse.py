"""What a rank writes into its page is what its agent reads."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lockstep.supervision import pulse
from lockstep.supervision.pulse import MAX_DATA_WORKERS, Page, Phase


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    monkeypatch.setattr(pulse, "_page", None)
    monkeypatch.setattr(pulse, "_sample_at", pulse._sample_at)
    monkeypatch.setattr(pulse, "_taken", set())
    pulse.begin(tmp_path / "rank-0.pulse")
    yield Page(tmp_path / "rank-0.pulse")


def test_without_an_agent_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_page", None)
    pulse.enter(Phase.DATA)
    pulse.complete_step(3)
    pulse.read_sample(4)
    with pulse.data_workers(1) as places:
        pulse.begin_data_worker(0, places)
    with pulse.during(Phase.SAVING):
        pulse.promise_to_stop()
    assert pulse._page is None


def test_a_page_has_its_memory_from_the_beginning(tmp_path: Path) -> None:
    """Where there is none left, a hole would end whoever touches it first: the agent, with all its ranks."""
    Page(tmp_path / "new.pulse", create=True)
    with (tmp_path / "new.pulse").open("rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 4096


def test_step_phase_and_since_when(page: Page) -> None:
    before = time.monotonic()
    pulse.complete_step(41)
    pulse.enter(Phase.EXCHANGING)
    reading = page.read()
    assert reading is not None
    assert (reading.pid, reading.step, reading.phase) == (os.getpid(), 41, Phase.EXCHANGING)
    assert before <= reading.since <= time.monotonic()
    assert not reading.is_stopping
    pulse.promise_to_stop()
    assert page.read().is_stopping  # type: ignore[union-attr]


def test_the_longest_of_each_completed_phase(page: Page) -> None:
    for duration_s in (0.0, 0.03, 0.0):
        pulse.enter(Phase.DATA)
        time.sleep(duration_s)
        pulse.enter(Phase.COMPUTING)
    longest_s = page.read().longest_s  # type: ignore[union-attr]
    assert 0.03 <= longest_s[Phase.DATA] < 1.0
    assert Phase.EVALUATING not in longest_s


def test_a_phase_inside_another_gives_way_to_it_again(page: Page) -> None:
    pulse.enter(Phase.UPDATING)
    with pytest.raises(ValueError), pulse.during(Phase.EVALUATING):
        assert page.read().phase is Phase.EVALUATING  # type: ignore[union-attr]
        raise ValueError
    assert page.read().phase is Phase.UPDATING  # type: ignore[union-attr]


def test_foreign_steps_are_counted_outside_of_our_loop_only(page: Page) -> None:
    pulse.enter(Phase.SCRIPT)
    pulse.count_optimizer_step()
    pulse.enter(Phase.UPDATING)
    pulse.count_optimizer_step()
    assert page.read().step == 1  # type: ignore[union-attr]


def test_data_workers_say_which_sample_they_read(page: Page) -> None:
    pulse.read_sample(5)
    assert page.read().sample == 5  # type: ignore[union-attr]
    pulse.all_samples_read()
    assert page.read().sample is None  # type: ignore[union-attr]
    with pulse.data_workers(3) as training, pulse.data_workers(3) as evaluation:
        children = [fork_worker(2, places, sample) for places, sample in ((training, 77), (evaluation, 78))]
        reading = page.read()
        assert reading is not None
        told = [(worker.number, worker.pid, worker.sample) for worker in reading.data_workers]
        assert told == [(2, children[0], 77), (2, children[1], 78)], "each loader's workers have places of their own"
        assert reading.sample is None, "the rank's own place is not a worker's"
    assert len(page.read().data_workers) == 2, "what one that died was reading can still be seen"  # type: ignore[union-attr]
    with pulse.data_workers(6) as places:
        assert {*training, *evaluation} == set(places), "and their places are free again"


def fork_worker(number: int, places: Sequence[int], sample: int) -> int:
    if (child := os.fork()) == 0:
        pulse.begin_data_worker(number, places)
        pulse.read_sample(sample)
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_more_data_workers_than_there_is_room_for_go_unseen(page: Page) -> None:
    with pulse.data_workers(MAX_DATA_WORKERS + 1) as places:
        assert len(places) == MAX_DATA_WORKERS
        pulse.begin_data_worker(MAX_DATA_WORKERS, places)
    pulse.read_sample(1)
    assert page.read().data_workers == []  # type: ignore[union-attr]
    assert page.read().sample is None  # type: ignore[union-attr]


def test_a_page_that_says_nothing_or_nonsense_is_not_believed(page: Page, tmp_path: Path) -> None:
    assert Page(tmp_path / "new.pulse", create=True).read() is None
    page.ints[pulse._PHASE] = 1000
    assert page.read() is None
    page.ints[pulse._PHASE] = Phase.DATA
    page.ints[pulse._AT_VERSION] += 1
    assert page.read() is None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "else.txt").write_text("x" * 4096)
    (tmp_path / "rank-1.pulse").symlink_to(tmp_path / "else.txt")
    with pytest.raises(OSError):
        pulse.Page(tmp_path / "rank-1.pulse", create=True)
    assert (tmp_path / "else.txt").read_text() == "x" * 4096
