"""Carrying a plan out: runs of one config, attacked until all kills are made, each then left to its end and checked.

A run that ends before the last attack is checked, and the next round begins in a fresh folder. When the launcher was
killed, or has given up, it is started again on the number of processes that the plan says: that is the resize.
"""

import json
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import environment
from lockstep.events.run_folder import RunFolder
from lockstep.observe.chaos.checks import Check, audit, check_run, check_saved, num_attempts, num_traced, read_end
from lockstep.observe.chaos.job import Job, Target, is_back, is_training, kill_all
from lockstep.observe.chaos.leftovers import Leftovers
from lockstep.observe.chaos.plan import Attack
from lockstep.observe.chaos.processes import Marked
from lockstep.observe.chaos.watch import View, Watch
from lockstep.supervision.failure import place_in_words
from lockstep.supervision.pulse import Phase, Reading

_POLL_S = 0.002
_PATIENCE_S = 20.0  # for a moment that may not come; then the attack is made as it is
_STUCK_S = 120.0
_MOST_RESTARTS = "1000000"
_LAST_WORDS = 2000  # characters


class Made(NamedTuple):
    """An attack as it happened; `attacks.jsonl` has one a line."""

    t: float
    number: int
    round: int
    launch: int
    processes: int
    victim: str
    pid: int
    act: str
    moment: str  # that was planned
    phase: str | None  # that was seen
    step: int | None
    is_saving: bool  # a checkpoint was being written, beside that phase
    is_hit: bool  # else it had ended by itself just then


@dataclass
class Tally:
    """Over all rounds."""

    made: list[Made] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    num_launches: int = 0
    num_attempts: int = 0
    num_repeated: int = 0  # steps that were made again
    gave_up: list[str] = field(default_factory=list)  # launchers that ended without our doing; their last words

    @property
    def kills(self) -> list[Made]:
        return [made for made in self.made if made.act != "stop, then let go on" and made.is_hit]

    @property
    def num_hits(self) -> int:
        """Kills, and stops that killed nobody."""
        return sum(made.is_hit for made in self.made)

    @property
    def num_kills(self) -> int:
        return len(self.kills)


class _Down(NamedTuple):
    """A kill from which the job has not come back yet."""

    words: str
    since: float


class Siege:
    def __init__(
        self,
        settings: Sequence[str],
        folder: Path,
        memory: Path,
        plan: Sequence[Attack],
        first_processes: int,
        tell: Callable[[str], None],
    ) -> None:
        self.tally = Tally()
        self._settings = list(settings)
        self._folder = folder
        self._memory = memory
        self._marked = Marked(environment.MEMORY_FOLDER, str(memory))
        self._pending = deque(plan)
        self._num_kills = sum(attack.is_kill for attack in plan)
        self._processes = first_processes
        self._tell = tell
        self._round = 0
        self._job: Job | None = None
        self._watch = Watch()
        self._last_blow_at = 0.0
        self._was_disturbed = False  # since the launcher's start
        self._down: _Down | None = None
        self._halts: list[str] = []  # of this round: why it went no further
        self._leftovers = Leftovers(self._marked, memory)
        self._reference = RunFolder(folder / "reference")
        self._stuck_s = _STUCK_S

    def lay(self, reference_s: float) -> list[list[Check]]:
        """Round after round, until all kills are made; each round's checks. The reference has been made before."""
        self._stuck_s = max(_STUCK_S, 3 * reference_s)
        rounds: list[list[Check]] = []
        is_possible = True
        try:
            while not rounds or (self._pending and is_possible and all(check.is_passed for check in rounds[-1])):
                self._round += 1
                num_hits = self.tally.num_hits
                rounds.append(self._make_round(RunFolder(self._folder / f"round-{self._round}")))
                if self._pending and self.tally.num_hits == num_hits:
                    is_possible = self._relax()
        finally:
            if self._job is not None:
                self._job.end()
            kill_all(self._marked)
        return rounds

    def _relax(self) -> bool:
        """A whole run had no moment for the next attack: it is made as soon as there are steps. Was it not so yet?"""
        relaxed = replace(self._pending[0], victim="launcher", moment="step", after_steps=0, delay_s=0.0)
        was_relaxed, self._pending[0] = self._pending[0] == relaxed, relaxed
        return not was_relaxed

    def _make_round(self, run: RunFolder) -> list[Check]:
        self._halts = []
        self._start(run)
        while not self._halts:
            attack = self._pending[0] if self._pending else None
            if attack is not None and (target := self._await_moment(attack, run)) is not None:
                self._pending.popleft()
                self._strike(attack, target, run)
            elif self._await_end_of_launcher(is_over=attack is None, run=run):
                break
        return self._check(run)

    def _start(self, run: RunFolder) -> None:
        self.tally.num_launches += 1
        arguments = ["train", *self._settings, "--run", str(run.path), "--quiet"]
        arguments += ["-n", str(self._processes), "--max-restarts", _MOST_RESTARTS]
        self._job = Job(arguments, self._memory, self._marked, self._log(run))
        self._last_blow_at = self._job.started_at
        self._was_disturbed = False

    def _await_moment(self, attack: Attack, run: RunFolder) -> Target | None:
        """Whom to hit, when the moment has come; None if the launcher has ended first."""
        assert self._job is not None
        deadline = time.monotonic() + _PATIENCE_S
        begun_at = self._last_blow_at if attack.victim in ("launcher", "nursery", "everything") else None
        while self._job.exit_code() is None:
            view, now = self._look(), time.monotonic()
            if view.first_step is None:  # it has its own limit for coming back
                deadline = now + _PATIENCE_S
            if begun_at is None and (view.pulses or attack.victim == "data worker"):
                begun_at = now
            if attack.moment == "start":
                is_over = view.first_step is not None  # the start: it was quicker than we
                has_come = begun_at is not None and (is_over or now >= begun_at + attack.delay_s)
            else:
                has_come = _has_come(attack, view, run)
            if has_come or now > deadline:
                if attack.moment != "start":
                    time.sleep(attack.delay_s)
                target = self._job.find(attack)
                if target is None and now > deadline:  # the launcher: there always is one
                    target = self._job.find(replace(attack, victim="launcher"))
                if target is not None:
                    return target
            time.sleep(_POLL_S)
        return None

    def _strike(self, attack: Attack, target: Target, run: RunFolder) -> None:
        assert self._job is not None
        pulse, act, is_saving, at = target.pulse, attack.act, _is_saving(run, target.pulse), time.monotonic()
        if act == "kill":
            is_hit = self._send(target, signal.SIGKILL)
        else:
            self._send(target, signal.SIGSTOP)
            try:
                time.sleep(attack.stop_s)
            finally:
                later = self._job.find(attack)  # in the case of a launcher or nursery its ranks have gone on
                if later is not None and later.pid == target.pid:
                    pulse = later.pulse
                is_saving, at = _is_saving(run, pulse), time.monotonic()
                is_hit = self._send(target, signal.SIGKILL if attack.is_kill else signal.SIGCONT)
        made = Made(
            t=round(time.time(), 3),
            number=attack.number,
            round=self._round,
            launch=self.tally.num_launches,
            processes=self._processes,
            victim=target.name,
            pid=target.pid,
            act=act,
            moment=attack.moment,
            phase=None if pulse is None else pulse.phase.name.lower(),
            step=None if pulse is None else pulse.step,
            is_saving=is_saving,
            is_hit=is_hit,
        )
        self.tally.made.append(made)
        append(self._folder / "attacks.jsonl", made._asdict())
        if not is_hit:  # it has ended meanwhile: another like it, so that the kills are as many as were asked for
            if attack.is_kill:
                self._pending.appendleft(attack)
            return
        self._was_disturbed = True
        words = f"{target.name}{place_in_words(pulse) or ' at its start'}{', saving' if is_saving else ''}"
        if not attack.is_kill:
            self._tell(f"stopped for {attack.stop_s:.1f} s: {words}")
            return
        self._end_of_down("killed again before it was back")
        self._down = _Down(f"kill {self.tally.num_kills} of {self._num_kills}: {words}", at)
        self._last_blow_at = at
        self._watch.doom(self._job)
        if target.name in ("launcher", "everything"):
            self._job.wait()
            self._leftovers.await_processes("was killed")
            self._job.remove_folder()
            self._processes = attack.processes
            self._start(run)

    def _send(self, target: Target, number: signal.Signals) -> bool:
        """Was the target still there?"""
        is_hit = self._marked.send(target.pid, number)
        if target.name == "everything":
            for process in self._marked.find():
                self._marked.send(process.pid, number)
        return is_hit

    def _await_end_of_launcher(self, *, is_over: bool, run: RunFolder) -> bool:
        """Is the run done? If its launcher gave up, there is another now. `is_over`: there is nothing else to do."""
        assert self._job is not None
        while is_over and self._job.exit_code() is None and not self._halts:
            self._look()
            time.sleep(_POLL_S)
        code = self._job.exit_code()
        if self._halts:
            return True
        if code is None:
            return False
        self._leftovers.await_processes(f"ended with exit code {code}")
        if code == 0:
            self._leftovers.look_into_memory()
            self._end_of_down("the run was over")
            return True
        words = self._log(run).read_text(errors="replace").rstrip()[-_LAST_WORDS:]
        self.tally.gave_up.append(words)
        append(self._folder / "attacks.jsonl", {"t": round(time.time(), 3), "gave_up": code, "words": words})
        if not self._was_disturbed:
            self._halts.append(f"a launcher that nobody had disturbed ended with exit code {code}: {words}")
            return True
        self._processes = self._pending[0].processes if self._pending else self._processes
        self._start(run)
        return False

    def _look(self) -> View:
        """Is it back, or stuck?"""
        assert self._job is not None
        view = self._watch.look(self._job)
        if view.is_new:
            self._leftovers.note_listeners()
            if self._down is not None:
                took_s = time.monotonic() - self._down.since
                self.tally.recovered_s.append(took_s)
                self._end_of_down(f"back after step {view.first_step} in {took_s:.1f} s")
        if self._watch.still_s > self._stuck_s:
            self._halts.append(f"nothing has moved for {self._stuck_s:.0f} s: {self._marked.find()}")
            self._job.end()
        return view

    def _end_of_down(self, how: str) -> None:
        if self._down is not None:
            self._tell(f"{self._down.words}; {how}")
            self._down = None

    def _check(self, run: RunFolder) -> list[Check]:
        if self._job is not None and self._job.exit_code() is None:
            self._job.end()
        self.tally.num_attempts += num_attempts(run)
        end = read_end(self._reference)
        self.tally.num_repeated += max(0, num_traced(run) - (end["step"] if end else 0))
        return [
            Check("after every attack the run went on, to its end", tuple(self._halts)),
            *check_run(self._reference, run),
            audit(run, self._marked.variables),
            check_saved(self._reference, run, self._marked.variables),
            self._leftovers.check(),
        ]

    def _log(self, run: RunFolder) -> Path:
        return run.path.with_suffix(".log")


def append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _has_come(attack: Attack, view: View, run: RunFolder) -> bool:
    if view.first_step is None or view.num_steps < attack.after_steps:
        return False
    phases = {pulse.phase for pulse in view.pulses.values()}
    if attack.moment == "save":
        return Phase.SAVING in phases or _has_draft(run)
    if attack.moment == "evaluation":
        return Phase.EVALUATING in phases
    return any(map(is_training, view.pulses.values()))


def _is_saving(run: RunFolder, pulse: Reading | None) -> bool:
    """Before an attempt is back, what is there was left by one before it."""
    return pulse is not None and is_back(pulse) and _has_draft(run)


def _has_draft(run: RunFolder) -> bool:
    return any(run.checkpoints.glob(".draft-*"))
