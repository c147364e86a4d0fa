"""TensorBoard: files under RUN/tensorboard, which `tensorboard --logdir` reads while they grow."""

from pathlib import Path
from typing import Any

from lockstep.events.event import Event
from lockstep.observe.loggers.shown import Shown

_FLUSH_S = 10  # what a kill may cost


class TensorBoardBackend:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def open(self, start: Event, config: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record  # type: ignore[import-untyped]
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from torch.utils.tensorboard import FileWriter

        self._writer = FileWriter(self._folder, flush_secs=_FLUSH_S)
        if start["attempt"] > 1:
            # What an earlier attempt wrote about steps that are now made again is dropped by the reader. The step that
            # training comes back to is complete, and stays.
            again = start["step"] + 1 if start["step"] else 0
            self._writer.add_event(Record(session_log=SessionLog(status=SessionLog.START)), again, start["t"])
        indented = "".join(f"    {line}\n" for line in config.splitlines())  # Markdown's sign for text as it stands
        self.show(Shown(start["step"], start["t"], {}, {}, {"run/config": indented}))

    def show(self, shown: Shown) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from torch.utils.tensorboard.summary import text

        values = [Summary.Value(tag=name, simple_value=value) for name, value in shown.scalars.items()]
        for name, path in shown.images.items():
            # The file is a PNG already: torch's own function would want the pixels, and encode them again.
            values.append(Summary.Value(tag=name, image=Summary.Image(encoded_image_string=path.read_bytes())))
        summary = Summary(value=values)
        for name, words in shown.texts.items():
            summary.MergeFrom(text(name, words))  # type: ignore[no-untyped-call]
        self._writer.add_summary(summary, shown.step, shown.t)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002  (TensorBoard knows no failed runs)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
