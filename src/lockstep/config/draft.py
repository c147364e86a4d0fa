"""A config as written, before a schema has been chosen for it: its file, the files it builds on, and overrides.

Loading takes two steps because the command line must see `recipe:` before it knows which schema to check against:

    draft = read("run.yaml", ["optim.lr=1e-3"])
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

from lockstep.config.document import MAX_DEPTH, parse, read_mapping, read_text
from lockstep.config.outline import Outline
from lockstep.config.private import private_values, references
from lockstep.config.problems import ONLY_PRIVATE, located, problems
from lockstep.config.value import KeyPath, Plain, Value, dotted, printable, shortened, shown
from lockstep.errors import ConfigError

MAX_BASES = 8
MAX_PROBLEMS = 50  # what a person will read; the wrong file altogether may have a hundred thousand
COMMAND_LINE = "command line"

# Two ways to say one thing: said one way in a file, it can be said the other way on top of it.
ALTERNATIVES: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("epochs",), ("steps",)),
    (("batch", "global"), ("batch", "per_device")),
)

Builtin: TypeAlias = Callable[[str], Path | None]  # from the name of a built-in config to its file
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Draft:
    """What the user wrote, merged, every value with its origin."""

    root: Value = field(repr=False)  # may hold private text

    @property
    def values(self) -> dict[str, Plain]:
        values = self.root.plain()
        assert isinstance(values, dict)
        return values

    def origin(self, key: str) -> str:
        """Where the value of a dotted key was written: `run.yaml:3` or `command line`."""
        return self.root.nearest(tuple(key.split("."))).origin

    def check(self, schema: type[Model]) -> Model:
        """The validated config, or all that is wrong with it at once."""
        errors: list[ErrorDetails] = []
        config: Model | None = None
        try:
            # Strict JSON mode turns lists into tuples and text into paths, but never text or booleans into numbers.
            # A file knows a field by its alias only.
            config = schema.model_validate_json(json.dumps(self.values), strict=True, by_alias=True, by_name=False)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
        # Raised outside the handler: a ValidationError in the traceback would show the values of private fields.
        lines = problems(errors[: MAX_PROBLEMS + 1], self.root, Outline(schema))
        if config is not None and not lines:
            faults = ((path, value.fault()) for path, value in private_values(config))
            lines = [located(self.root, path, fault) for path, fault in faults if fault]
        if config is None or lines:
            raise ConfigError(_first(lines))
        return config


def read(path: str | Path, overrides: Iterable[str] = (), *, builtin: Builtin | None = None) -> Draft:
    """The file at `path` over its bases, with `key=value` overrides on top; what is malformed is reported at once.

    An override's value follows the rules of the file: `tags=[a, b]` is a list, `name=` is null (as `name:` is),
    `name=""` is empty text, and a mapping joins the one that is there. `steps=9` replaces a file's `epochs`.
    """
    faults: list[str] = []
    file = Value({}, "")
    changes = Value({}, COMMAND_LINE)
    try:
        file = _read_with_bases(Path(path), builtin)
    except ConfigError as error:
        faults.extend(error.problems)
    for override in overrides:
        try:
            changes = changes.merge(_read_override(override))
        except ConfigError as error:
            faults.extend(error.problems)
    if faults:
        raise ConfigError(_first(faults))
    return Draft(Value(_lay_over(file, changes).content, file.origin))


def _lay_over(earlier: Value, later: Value) -> Value:
    for pair in ALTERNATIVES:
        for given, other in (pair, pair[::-1]):
            if later.gives(given) and not later.gives(other):
                earlier = earlier.without(other)
    return earlier.merge(later)


def _read_with_bases(path: Path, builtin: Builtin | None) -> Value:
    """The file laid over its base, that one over its own base, and so on."""
    layers: list[Value] = []
    chain: list[Path] = []
    naming = ""  # the place that names the file
    while True:
        try:
            text = read_text(path)
        except ConfigError as error:
            raise ConfigError([naming + problem for problem in error.problems]) from None
        chain.append(path.resolve())
        if chain[-1] in chain[:-1]:
            loop = " → ".join(printable(each.name) for each in chain[chain.index(chain[-1]) :])
            raise ConfigError([f"{naming}a config cannot build on itself: {loop}"])
        if len(chain) > MAX_BASES + 1:
            raise ConfigError([f"{naming}more than {MAX_BASES} bases, one on another"])
        document, base = _split_base(read_mapping(text, printable(str(path))))
        layers.append(document)
        if base is None:
            return reduce(_lay_over, reversed(layers))
        naming = f"{base.origin}: base: "
        path = _base_path(base, path.parent, builtin)


def _split_base(document: Value) -> tuple[Value, Value | None]:
    assert isinstance(document.content, dict)
    base = document.content.get("base")
    rest = {key: value for key, value in document.content.items() if key != "base"}
    return Value(rest, document.origin), base if base and base.content is not None else None


def _base_path(base: Value, folder: Path, builtin: Builtin | None) -> Path:
    """A built-in config's file, so that its name means the same in every folder; else a path beside the file."""
    name = base.content
    if not isinstance(name, str) or not name:
        expected = "the path of a file or the name of a built-in config"
        raise ConfigError([f"{base.origin}: base: expected {expected}, got {shown(base.plain())}"])
    names = references(name)
    if names:
        raise ConfigError([f"{base.origin}: base: ${{{names[0]}}} {ONLY_PRIVATE}"])
    return (builtin(name) if builtin else None) or folder / name


def _read_override(override: str) -> Value:
    key, equals, text = override.partition("=")
    path: KeyPath = tuple(key.strip().split("."))
    if not equals or not all(path):
        # What follows the sign may be a secret.
        raise ConfigError([f"{COMMAND_LINE}: {_quoted(key, equals)}: expected key=value, as in optim.lr=1e-3"])
    if len(path) > MAX_DEPTH:
        raise ConfigError([f"{COMMAND_LINE}: {_quoted(key, equals)}: nested deeper than {MAX_DEPTH} levels"])
    if path == ("base",):
        raise ConfigError([f"{COMMAND_LINE}: base: can only be named in a file"])
    value = parse(text, lambda _: COMMAND_LINE, path)
    if value is None:
        if text.strip():
            raise ConfigError(
                [f"{COMMAND_LINE}: {dotted(path)}: YAML reads the value as a comment; write it in quotes"]
            )
        value = Value(None, COMMAND_LINE)
    for step in reversed(path):
        value = Value({str(step): value}, COMMAND_LINE)
    return value


def _quoted(key: str, equals: str) -> str:
    return f"'{shortened(printable(key))}{'=…' if equals else ''}'"


def _first(lines: list[str]) -> list[str]:
    if len(lines) <= MAX_PROBLEMS:
        return lines
    return [*lines[:MAX_PROBLEMS], f"only the first {MAX_PROBLEMS} problems are shown"]
