"""A sink for tests, which keeps what it is told."""

from lockstep.events.event import Event


class Kept:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]
