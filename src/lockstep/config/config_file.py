"""Read a config: its YAML file, the `base:` files it builds on, and `key=value` overrides.

Loading takes two steps because the command line must see `recipe:` before it knows which schema to validate against:

    draft = read_config("run.yaml", ["optim.lr=1e-3"])
    config = draft.check(DigitsConfig)
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lockstep.config.config_errors import ONLY_PRIVATE, describe_problems, first_problems, located
from lockstep.config.field_types import private_values, references
from lockstep.config.located_value import KeyPath, LocatedValue, Plain, dotted, printable, shortened, show_value
from lockstep.config.optimizer_settings import DEFAULT_OPTIMIZER, OWN_SETTINGS, read_optimizer_name
from lockstep.config.yaml_document import MAX_DEPTH, parse_yaml, parse_yaml_mapping, read_yaml_text
from lockstep.errors import ConfigError

MAX_BASES = 8
BASE_SUFFIXES = (".yaml", ".yml", ".json")
COMMAND_LINE = "command line"

# Two keys for the same setting: one of them in a later layer removes the other from earlier layers.
ALTERNATIVES: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("epochs",), ("steps",)),
    (("batch", "global"), ("batch", "per_device")),
)

BuiltinLookup: TypeAlias = Callable[[str], Path | None]  # from the name of a built-in config to its file
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class ConfigDraft:
    """A config as written: file, bases and overrides merged, each value with its origin, not yet validated."""

    root: LocatedValue = field(repr=False)  # may contain private text

    @property
    def values(self) -> dict[str, Plain]:
        """The merged config as plain dicts, lists and scalars."""
        values = self.root.plain()
        assert isinstance(values, dict)
        return values

    def origin(self, key: str) -> str:
        """Where the value of a dotted key was written: `run.yaml:3` or `command line`."""
        return self.root.nearest(tuple(key.split("."))).origin

    def check(self, schema: type[Model]) -> Model:
        """Validate against `schema` and return the config; a ConfigError lists everything that is wrong with it."""
        errors: list[ErrorDetails] = []
        config: Model | None = None
        try:
            # Strict JSON mode turns lists into tuples and text into paths, but never text or booleans into numbers.
            # In a file a field is known by its alias only.
            config = schema.model_validate_json(json.dumps(self.values), strict=True, by_alias=True, by_name=False)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
        # Raised outside the handler: a ValidationError in the traceback would show the values of private fields.
        lines = describe_problems(errors, self.root, schema)
        if config is not None and not lines:
            faults = ((path, value.fault()) for path, value in private_values(config))
            lines = [located(self.root, path, fault) for path, fault in faults if fault]
        if config is None or lines:
            raise ConfigError(first_problems(lines))
        return config


def read_config(
    path: str | Path, overrides: Iterable[str] = (), *, builtin: BuiltinLookup | None = None
) -> ConfigDraft:
    """Read the file at `path` and its bases, and apply `key=value` overrides. A ConfigError lists all syntax errors.

    An override's value is YAML, as in the file: `tags=[a, b]` is a list, `name=` is null (as `name:` is), `name=""` is
    empty text, and a mapping is merged with the existing one. `steps=9` replaces a file's `epochs`.

    Args:
        path: the YAML file.
        overrides: `key=value` texts with dotted keys; later ones win.
        builtin: finds the file of a built-in config that `base:` names.
    """
    faults: list[str] = []
    file = LocatedValue({}, "")
    changes = LocatedValue({}, COMMAND_LINE)
    try:
        file = _read_with_bases(Path(path), builtin)
    except ConfigError as error:
        faults.extend(error.problems)
    for override in overrides:
        try:
            changes = changes.merge(_parse_override(override))
        except ConfigError as error:
            faults.extend(error.problems)
    if faults:
        raise ConfigError(first_problems(faults))
    return ConfigDraft(LocatedValue(_merge_layers(file, changes).content, file.origin))


def _merge_layers(earlier: LocatedValue, later: LocatedValue) -> LocatedValue:
    for pair in ALTERNATIVES:
        for given, other in (pair, pair[::-1]):
            if later.has_value_at(given) and not later.has_value_at(other):
                earlier = earlier.without(other)
    return _without_former_optimizer(earlier, later).merge(later)


def _without_former_optimizer(earlier: LocatedValue, later: LocatedValue) -> LocatedValue:
    """`earlier` without the arguments of its optimizer, if `later` chooses another one that cannot take them."""
    former, chosen = (layer.nearest(("optim", "name")).content for layer in (earlier, later))
    if not isinstance(former, str):
        former = DEFAULT_OPTIMIZER
    if not isinstance(chosen, str) or former.lower() == chosen.lower():
        return earlier
    earlier = earlier.without(("optim", "arguments"))
    if read_optimizer_name(chosen) in OWN_SETTINGS:
        return earlier  # a setting that is for another of these has no effect
    for setting in {setting for settings in OWN_SETTINGS.values() for setting in settings}:
        earlier = earlier.without(("optim", setting))
    return earlier


def _read_with_bases(path: Path, builtin: BuiltinLookup | None) -> LocatedValue:
    """The file merged over its base, that one over its own base, and so on."""
    layers: list[LocatedValue] = []
    chain: list[Path] = []
    place = ""  # where the file was named as a base
    while True:
        try:
            text = read_yaml_text(path)
        except ConfigError as error:
            raise ConfigError([place + problem for problem in error.problems]) from None
        chain.append(path.resolve())
        if chain[-1] in chain[:-1]:
            cycle = " → ".join(printable(each.name) for each in chain[chain.index(chain[-1]) :])
            raise ConfigError([f"{place}a config cannot build on itself: {cycle}"])
        if len(chain) > MAX_BASES + 1:
            raise ConfigError([f"{place}more than {MAX_BASES} bases in a chain"])
        document, base = _split_base(parse_yaml_mapping(text, printable(str(path))))
        layers.append(document)
        if base is None:
            return reduce(_merge_layers, reversed(layers))
        place = f"{base.origin}: base: "
        path = _base_path(base, path.parent, builtin)


def _split_base(document: LocatedValue) -> tuple[LocatedValue, LocatedValue | None]:
    """The document without its `base:`, and the value of that key if it has one."""
    assert isinstance(document.content, dict)
    base = document.content.get("base")
    rest = {key: value for key, value in document.content.items() if key != "base"}
    return LocatedValue(rest, document.origin), base if base and base.content is not None else None


def _base_path(base: LocatedValue, folder: Path, builtin: BuiltinLookup | None) -> Path:
    """The file of the built-in config that `base:` names; if there is none, a path relative to `folder`."""
    name = base.content
    names = references(name) if isinstance(name, str) else []
    if names:
        raise ConfigError([f"{base.origin}: base: ${{{names[0]}}} {ONLY_PRIVATE}"])
    if isinstance(name, str) and builtin is not None and (known := builtin(name)) is not None:
        return known
    # Messages about a config quote its keys: a base must not be any file, such as one with passwords.
    if not isinstance(name, str) or Path(name).suffix not in BASE_SUFFIXES:
        expected = f"the name of a built-in config, or a file that ends in {', '.join(BASE_SUFFIXES)}"
        raise ConfigError([f"{base.origin}: base: expected {expected}; got {show_value(base.plain())}"])
    return folder / name


def _parse_override(override: str) -> LocatedValue:
    key, equals, text = override.partition("=")
    path: KeyPath = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError([f"{COMMAND_LINE}: {_quoted(key, equals)}: expected key=value, as in optim.lr=1e-3"])
    if len(path) > MAX_DEPTH:
        raise ConfigError([f"{COMMAND_LINE}: {_quoted(key, equals)}: nested deeper than {MAX_DEPTH} levels"])
    if path == ("base",):
        raise ConfigError([f"{COMMAND_LINE}: base: can only be set in a file"])
    value = parse_yaml(text, lambda _: COMMAND_LINE, path)
    if value is None:
        if text.strip():
            problem = "YAML reads the value as a comment; put it in quotes"
            raise ConfigError([f"{COMMAND_LINE}: {dotted(path)}: {problem}"])
        value = LocatedValue(None, COMMAND_LINE)
    for step in reversed(path):
        value = LocatedValue({str(step): value}, COMMAND_LINE)
    return value


def _quoted(key: str, equals: str) -> str:
    """An override's key; its value may be a secret and is not shown."""
    return f"'{shortened(printable(key))}{'=…' if equals else ''}'"
