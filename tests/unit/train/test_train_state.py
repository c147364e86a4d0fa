"""Saved state that does not fit what a script prepared: the message says what differs, and how to correct it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.train import train_state
from lockstep.train.run import Run
from lockstep.world.world import World


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> int:
        return self.count

    def load_state_dict(self, state: int) -> None:
        self.count = state


def prepared(model: nn.Module | None = None, *names: str, in_digest: bool = False) -> Run:
    run = Run(None, World())
    model = run.prepare(nn.Linear(2, 3) if model is None else model)
    run.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for name in names:
        run.register_state(name, Counter(), in_digest=in_digest)
    return run


def refusal(saved: Run, run: Run) -> str:
    with pytest.raises(UserError) as caught:
        run.load_state_dict(saved.state_dict())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_registered_state_has_the_name_that_the_script_gave_it() -> None:
    text = refusal(prepared(), prepared(None, "curriculum"))
    assert text.startswith("the checkpoint has no registered state 'curriculum': before run.steps(…), make the same ")
    assert text.endswith(
        " calls of run.prepare, run.optimizer, run.ema and run.register_state as the run that was saved"
    )
    text = refusal(prepared(None, "walk", in_digest=True), prepared(None, "walk"))
    assert text.startswith(
        "the checkpoint has no registered state 'walk'; the checkpoint has registered state 'walk' (in_digest=True), "
        "which this run does not have: "
    )


@pytest.mark.parametrize(
    ("make_model", "problem"),
    [
        (lambda: nn.Linear(2, 4), "weight is float32 (4, 2) and was saved as float32 (3, 2)"),
        (lambda: nn.Linear(2, 3, bias=False), 'Unexpected key(s) in state_dict: "bias"'),
        (
            lambda: nn.Sequential(nn.Linear(2, 3)),
            'Missing key(s) in state_dict: "0.weight", "0.bias". Unexpected key(s) in state_dict: "weight", "bias"',
        ),
    ],
    ids=["a shape", "a parameter less", "other names"],
)
def test_another_model_is_refused_in_one_line(make_model: Callable[[], nn.Module], problem: str) -> None:
    assert refusal(prepared(), prepared(make_model())) == (
        f"the checkpoint does not fit model: {problem}: build the same model, or choose another folder"
    )


def test_running_out_of_memory_is_no_misfit(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    saved, run = prepared().state_dict(), prepared()
    monkeypatch.setattr(train_state, "load_optimizer", load)
    with pytest.raises(torch.OutOfMemoryError):
        run.load_state_dict(saved)


def test_a_long_list_of_names_is_cut() -> None:
    many = nn.Sequential(*(nn.Linear(1, 1) for _ in range(1000)))
    assert len(refusal(prepared(), prepared(many))) < 400
