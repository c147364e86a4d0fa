"""A rank that fails is told by its own error, whatever leaving the others has to say."""

import pytest

from lockstep.world import setup


def test_the_error_stays_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_contact() -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(setup, "cleanup_distributed", lose_contact)
    with pytest.raises(ValueError, match="planted") as caught, setup.leaving_at_the_end():
        raise ValueError("planted")
    assert caught.value.__context__ is None
    with pytest.raises(RuntimeError, match="closed by peer"), setup.leaving_at_the_end():
        pass
