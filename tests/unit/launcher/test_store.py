"""Over which interface the processes of a job talk; a name that is waited for. More: recipes/test_two_machines.py."""

import pytest

from lockstep.config.environment import pin_to
from lockstep.launcher import store
from lockstep.launcher.store import await_name, interface_towards


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_one_machine_stays_on_loopback() -> None:
    assert interface_towards("127.0.0.1") == interface_towards("localhost") == "lo"


def test_what_cannot_be_told_is_left_to_gloo() -> None:
    assert interface_towards("2001:db8::1") is None


def test_between_machines_only_gloo_needs_to_be_told() -> None:
    assert pin_to("eth0", one_machine=False) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert pin_to("lo", one_machine=True) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert pin_to(None, one_machine=False) == {}


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert pin_to("eth0", one_machine=False) == {}


def test_a_name_that_is_not_known_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(store, "_is_known", lambda _: next(answers))
    monkeypatch.setattr(store, "_ASK_FOR_NAME_EVERY_S", 0.0)
    await_name("mine-0.mine", timeout_s=20)
    assert not list(answers)
    assert capsys.readouterr().err == (
        "lockstep: mine-0.mine is not a known host yet: waiting for that, 20 s at most\n"
    )


def test_a_name_that_stays_unknown_is_not_waited_for_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    await_name("no.such.name.invalid", timeout_s=0)
    assert "no.such.name.invalid is not a known host yet" in capsys.readouterr().err
    await_name("127.0.0.1", timeout_s=0)
    assert not capsys.readouterr().err
