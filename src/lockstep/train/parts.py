"""What a run trains: models, optimizers, averages and the loss scale by name; their parameters, and all their state."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lockstep.engine.digest import state_of
from lockstep.train.average import MovingAverage
from lockstep.train.precision import LossScaler

Models = nn.Module | Sequence[nn.Module]


class Parts:
    def __init__(self) -> None:
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.averages: dict[str, MovingAverage] = {}
        self.scaler: LossScaler | None = None
        self._parameters: dict[Any, list[Parameter]] = {}  # by the models they are of

    def has_model(self, model: nn.Module) -> bool:
        return any(model is known for known in self.models.values())

    def has_average(self, average: MovingAverage) -> bool:
        return any(average is known for known in self.averages.values())

    def add_model(self, model: nn.Module) -> None:
        self.models[_next_name("model", self.models)] = model

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Once, however often it is said."""
        if not any(optimizer is known for known in self.optimizers.values()):
            self.optimizers[_next_name("optimizer", self.optimizers)] = optimizer

    def add_average(self, average: MovingAverage) -> None:
        self.averages[_next_name("average", self.averages)] = average

    @property
    def any_batch_norm(self) -> bool:
        return any(isinstance(m, _BatchNorm) for model in self.models.values() for m in model.modules())

    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for each in self.optimizers.values() for group in each.param_groups]

    def look_again(self) -> None:
        """Models may have changed since their parameters were last asked for."""
        self._parameters = {}

    def parameters_of(self, models: Models | None) -> list[Parameter]:
        """The trainable parameters, each once; of all models if none is named."""
        key = None if models is None else models if isinstance(models, nn.Module) else tuple(models)
        if key not in self._parameters:
            chosen = self.models.values() if models is None else as_list(models)
            # Walking the modules takes longer than a small model's forward pass.
            self._parameters[key] = list(dict.fromkeys(p for model in chosen for p in model.parameters()))
        return [parameter for parameter in self._parameters[key] if parameter.requires_grad]

    def parameter_names(self) -> dict[Parameter, str]:
        """Under which a parameter is spoken of; several models are told apart."""
        several = len(self.models) > 1
        return {
            parameter: f"{prefix}.{name}" if several else name
            for prefix, model in self.models.items()
            for name, parameter in model.named_parameters()
        }

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, under a name that says what it is."""
        averages = {name: average.state() for name, average in self.averages.items()}
        scaler = {} if self.scaler is None else {"loss_scaler": self.scaler.state()}
        return state_of(self.models, self.optimizers, averages | scaler)


def as_list(models: Models) -> list[nn.Module]:
    return [models] if isinstance(models, nn.Module) else list(models)


def _next_name(kind: str, named: dict[str, Any]) -> str:
    return f"{kind}{len(named) or ''}"
