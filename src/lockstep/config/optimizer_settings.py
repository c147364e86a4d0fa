"""Which optimizers have settings of their own under `optim:`; all others take theirs from `optim.arguments`."""

import re

OWN_SETTINGS: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum", "nesterov"),
    "adam": ("betas", "eps"),
    "adamw": ("betas", "eps"),
}
DEFAULT_OPTIMIZER = "adamw"

_NAME = re.compile(r"[A-Za-z_]\w*|[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def read_optimizer_name(name: str) -> str | None:
    """Return the name as configs hold it; None if it can name no class of torch.optim or of a module."""
    if name.lower() in OWN_SETTINGS:
        return name.lower()
    return name if _NAME.fullmatch(name) else None


def owners_of(setting: str) -> str:
    """Say which optimizers have this setting, as in `adam and adamw`."""
    return " and ".join(name for name, settings in OWN_SETTINGS.items() if setting in settings)
