"""What a run writes into its folder: events, images, each rank's timing, and a trace of digests if asked."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.config import environment
from lockstep.engine.state_digest import DigestTrace
from lockstep.errors import UserError
from lockstep.events.atomic_files import write_atomic
from lockstep.events.event_log import RESERVED_FIELDS, EventLog, Sink, json_safe
from lockstep.events.jsonl import FileMark, JsonlWriter
from lockstep.events.media import check_image, check_media_name, truncate_text, write_image
from lockstep.events.run_folder import Claim, RunFolder, RunSettings
from lockstep.supervision.agent_folder import RankFiles
from lockstep.supervision.process_title import title_rank
from lockstep.world.object_collectives import broadcast_object
from lockstep.world.world import World

logger = logging.getLogger("lockstep")


class RunLog:
    """Writes the run folder during training. Only rank 0 writes shared files. Without a folder, nothing is written."""

    def __init__(
        self, folder: RunFolder | None, world: World, sinks: Sequence[Sink], *, trace: Path | None, force: bool = False
    ) -> None:
        """`sinks` (the terminal, loggers) receive rank 0's events. `trace`: the file to write a trace to, or None."""
        self.folder = folder
        self.events = EventLog()
        self.rank_log = EventLog()
        self.settings: RunSettings | None = None  # None: the script's, known when the run starts
        self.start_info: dict[str, Any] = {}  # what else the run's start event says
        self.trace: DigestTrace | None = None  # on every rank, once it is open
        self.run_id = ""
        self.is_open = False
        self._world = world
        self._sinks = list(sinks) if world.is_main else []
        self._trace_file = trace
        self._force = force
        self._claim: Claim | None = None
        self._events_file: JsonlWriter | None = None

    def open(self, settings: RunSettings, fingerprint: Mapping[str, Any]) -> None:
        """Claim the folder. Nothing is written before: a mistake found earlier leaves no files behind."""
        if self.is_open:
            return
        self.is_open = True
        if self.folder is None:
            self.events = EventLog(self._sinks)
            self._open_trace()
            return
        self.run_id, attempt = self._claim_together(self.folder, settings, fingerprint)
        if (files := RankFiles.own()) is not None:  # the agent writes its reports there too
            files.run_folder.write_bytes(os.fsencode(self.folder.path.resolve()))
            title_rank(environment.read_placement(), str(self.folder.path))
        if self._world.is_main:
            self._events_file = JsonlWriter(self.folder.events)
            self.events = EventLog([self._events_file, *self._sinks], attempt)
        else:
            self.events = EventLog(attempt=attempt)
        self.rank_log = EventLog([JsonlWriter(self.folder.rank_log(self._world.rank))], attempt)
        self._open_trace()

    def save_history(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Write all evaluations so far into one file that other programs read easily."""
        if self.folder is None or not self._world.is_main:
            return
        try:
            write_atomic(self.folder.history, json.dumps(json_safe(history), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            logger.warning("%s could not be written: %s", self.folder.history, error.strerror or error)

    def log_incident(self, step: int, text: str) -> None:
        """Report an incident, on rank 0; all ranks may call it. Without sinks, it goes to Python's logging."""
        self.events.emit("incident", step, text=text)
        if self._world.is_main and not self._sinks:
            logger.warning("%s", text)

    def log_values(self, step: int, values: Mapping[str, Any]) -> None:
        """Write an event with these values. They are checked on every rank, so that all fail alike."""
        for name in values:
            if name in RESERVED_FIELDS:
                raise UserError(f"run.log({name}=…): every event has a {name} of its own: choose another name")
        self.events.emit("step", step, **{name: _plain(name, value) for name, value in values.items()})

    def log_image(self, name: str, step: int, image: Any) -> None:
        """Write a PNG into the folder, and an event that names it. Checked on every rank, so that all fail alike."""
        check_image(name, image)
        if self.folder is None or not self.is_open or not self._world.is_main:
            return
        try:
            path = write_image(self.folder.path, name, step, image)
        except OSError as error:
            logger.warning("image %r of step %d could not be written: %s", name, step, error)
            return
        self.events.emit("step", step, images={name: path})

    def log_text(self, name: str, step: int, text: str) -> None:
        check_media_name(name)
        self.events.emit("step", step, texts={name: truncate_text(text)})

    def events_mark(self) -> FileMark | None:
        """Return the current end of the event history; on rank 0."""
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

    def _claim_together(
        self, folder: RunFolder, settings: RunSettings, fingerprint: Mapping[str, Any]
    ) -> tuple[str, int]:
        """Claim the folder on rank 0. Returns the run's id and the attempt's number on all ranks, or all fail alike."""
        answer: dict[str, Any] = {}
        if self._world.is_main:
            try:
                self._claim = folder.claim(settings, fingerprint, force=self._force)
                answer = {"run_id": self._claim.run_id, "attempt": self._claim.attempt}
            except UserError as error:
                answer = {"refused": str(error)}
        answer = broadcast_object(answer)
        if "refused" in answer:
            raise UserError(answer["refused"])
        return answer["run_id"], answer["attempt"]


def _plain(name: str, value: Any) -> Any:
    """Return a value to log as JSON knows it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(name, element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, element) for element in value]
    if isinstance(value, Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
        return value.item()
    kind = f"{type(value).__name__} of shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
    raise UserError(f"run.log({name}=…): expected a number, a text, or a list or dictionary of them, not a {kind}")
