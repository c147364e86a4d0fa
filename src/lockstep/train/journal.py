"""What a run leaves behind: its claim on the folder, events and images, every rank's log, and a trace if asked."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.engine.trace import DigestTrace
from lockstep.errors import UserError
from lockstep.events.event import Events, Sink, plain
from lockstep.events.jsonl import JsonLines, Mark
from lockstep.events.media import bounded, check_image, check_name, place_image
from lockstep.events.run_folder import Claim, RunFolder, Settings
from lockstep.events.whole_files import write_whole
from lockstep.supervision.rank_files import RankFiles
from lockstep.world.objects import broadcast_object
from lockstep.world.world import World

logger = logging.getLogger("lockstep")


class Journal:
    """Rank 0 alone writes what is shared; `sinks` (the terminal, loggers) are told there alone. No folder, no files."""

    def __init__(
        self, folder: Path | None, world: World, sinks: Sequence[Sink], *, trace: Path | None, force: bool = False
    ) -> None:
        """`trace`: the file for it, if there is to be one."""
        self.folder = None if folder is None else RunFolder(folder)
        self.events = Events()
        self.rank_log = Events()
        self._world = world
        self._sinks = list(sinks) if world.is_main else []
        self._trace_file = trace
        self.trace: DigestTrace | None = None  # on every rank, once it is open
        self._force = force
        self._claim: Claim | None = None
        self._events_file: JsonLines | None = None
        self.run_id = ""
        self.is_open = False

    def open(self, settings: Settings, facts: Mapping[str, Any]) -> None:
        """Claim the folder. Until then nothing is written: a mistake found earlier leaves no trace."""
        if self.is_open:
            return
        self.is_open = True
        if self.folder is None:
            self.events = Events(self._sinks)
            self._open_trace()
            return
        self.run_id, attempt = self._claim_together(self.folder, settings, facts)
        if (files := RankFiles.own()) is not None:  # our agent keeps its reports there too
            files.run_folder.write_text(str(self.folder.path.resolve()))
        if self._world.is_main:
            self._events_file = JsonLines(self.folder.events)
            self.events = Events([self._events_file, *self._sinks], attempt)
        else:
            self.events = Events(attempt=attempt)
        self.rank_log = Events([JsonLines(self.folder.rank_log(self._world.rank))], attempt)
        self._open_trace()

    def save_history(self, history: Sequence[Mapping[str, Any]]) -> None:
        """All evaluations so far, as one file that other programs read easily."""
        if self.folder is None or not self._world.is_main:
            return
        try:
            write_whole(self.folder.history, json.dumps(plain(history), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            logger.warning("%s could not be written: %s", self.folder.history, error.strerror or error)

    def tell_incident(self, step: int, text: str) -> None:
        """All ranks may call it; rank 0 says it, to the log where nobody else would."""
        self.events.emit("incident", step, text=text)
        if self._world.is_main and not self._sinks:
            logger.warning("%s", text)

    def keep_image(self, name: str, step: int, image: Any) -> None:
        """A PNG in the folder, and an event that says so; checked on every rank, so that a mistake ends all alike."""
        check_image(name, image)
        if self.folder is None or not self.is_open or not self._world.is_main:
            return
        try:
            path = place_image(self.folder.path, name, step, image)
        except OSError as error:
            logger.warning("image %r of step %d could not be written: %s", name, step, error)
            return
        self.events.emit("step", step, images={name: path})

    def keep_text(self, name: str, step: int, text: str) -> None:
        check_name(name)
        self.events.emit("step", step, texts={name: bounded(text)})

    def events_mark(self) -> Mark | None:
        """How far the event history has come; on rank 0."""
        return None if self._events_file is None else self._events_file.mark()

    def close(self) -> None:
        self.events.close()
        self.rank_log.close()
        if self.trace is not None:
            self.trace.close()
        if self._claim is not None:
            self._claim.release()
        self.is_open = False

    def _open_trace(self) -> None:
        if self._trace_file is not None:
            self.trace = DigestTrace(self._trace_file if self._world.is_main else None)

    def _claim_together(self, folder: RunFolder, settings: Settings, facts: Mapping[str, Any]) -> tuple[str, int]:
        """Rank 0 claims; all learn the run's id and the attempt's number, or fail alike."""
        answer: dict[str, Any] = {}
        if self._world.is_main:
            try:
                self._claim = folder.claim(settings, facts, force=self._force)
                answer = {"run_id": self._claim.run_id, "attempt": self._claim.attempt}
            except UserError as error:
                answer = {"refused": str(error)}
        answer = broadcast_object(answer)
        if "refused" in answer:
            raise UserError(answer["refused"])
        return answer["run_id"], answer["attempt"]
