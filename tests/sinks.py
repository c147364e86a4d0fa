"""A sink for tests that keeps every event."""

from lockstep.events.event_log import Event


class RecordingSink:
    """Keeps the events that it receives."""

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
        """Return the events of one kind."""
        return [event for event in self.events if event["kind"] == kind]
