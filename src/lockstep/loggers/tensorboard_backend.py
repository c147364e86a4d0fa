"""Write TensorBoard event files to RUN/tensorboard."""

from pathlib import Path
from typing import Any

from lockstep.events.event_log import Event
from lockstep.loggers.logger_sink import LoggedValues

_FLUSH_S = 10  # a killed process loses at most this much


class TensorBoardBackend:
    """Writes a run's values with torch's `FileWriter`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def open(self, start: Event, config: str) -> None:
        """Open a new file; a later attempt tells the reader which steps are repeated."""
        from tensorboard.compat.proto.event_pb2 import Event as EventProto  # type: ignore[import-untyped]
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from torch.utils.tensorboard import FileWriter

        self._writer = FileWriter(self._folder, flush_secs=_FLUSH_S)
        if start["attempt"] > 1:
            # The reader drops what an earlier attempt wrote from this step on. The step that training resumes from is
            # complete, so it is kept.
            first_repeated = start["step"] + 1 if start["step"] else 0
            session_start = EventProto(session_log=SessionLog(status=SessionLog.START))
            self._writer.add_event(session_start, first_repeated, start["t"])
        indented = "".join(f"    {line}\n" for line in config.splitlines())  # a code block in Markdown
        self.show(LoggedValues(start["step"], start["t"], {}, {}, {"run/config": indented}))

    def show(self, values: LoggedValues) -> None:
        """Write the values of one event as one summary."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from torch.utils.tensorboard.summary import text

        entries = [Summary.Value(tag=name, simple_value=value) for name, value in values.scalars.items()]
        for name, path in values.images.items():
            # The file is already a PNG; torch's function would need the pixels, and encode them again.
            entries.append(Summary.Value(tag=name, image=Summary.Image(encoded_image_string=path.read_bytes())))
        summary = Summary(value=entries)
        for name, string in values.texts.items():
            summary.MergeFrom(text(name, string))  # type: ignore[no-untyped-call]
        self._writer.add_summary(summary, values.step, values.t)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002  (TensorBoard has no failed runs)
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
