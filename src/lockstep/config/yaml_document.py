"""Parse YAML into located values: bounded in size and depth, plain values only, never code.

Unquoted scalars follow YAML 1.2: only true and false are booleans (`no` is text), `3e-4` is a number, a date is text.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from yaml.reader import ReaderError

from lockstep.config.located_value import KeyPath, LocatedValue, dotted, printable, shortened
from lockstep.config.regular_files import open_to_read
from lockstep.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20
MAX_NODES = 100_000  # with aliases expanded: a few lines of aliases to aliases can stand for billions of values
MAX_DEPTH = 64
MAX_DIGITS = 400  # more than any float has; the cost of parsing an integer grows faster than its length

LineLabel = Callable[[int], str]  # from a line number to how messages name it: `run.yaml:3`

_CORE = "tag:yaml.org,2002:"
_SEQUENCE = _CORE + "seq"
_MAPPING = _CORE + "map"
_TEXT = _CORE + "str"


def _whole_number(text: str) -> int:
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _number(text: str) -> float:
    return float(re.sub(r"\.(?=[in])", "", text.lower()))  # YAML writes .inf and .nan, Python without the dot


class ScalarType(NamedTuple):
    """A type of unquoted scalar: its tag, its possible first characters, its pattern, and how to convert its text."""

    tag: str
    first_characters: str
    pattern: re.Pattern[str]
    convert: Callable[[str], bool | int | float | None]


_SIGNED = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_NONFINITE = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"

# In the order in which they are tried; an unquoted scalar that matches none is text.
SCALAR_TYPES = (
    ScalarType(_CORE + "null", "~nN", re.compile(r"(?:~|null|Null|NULL|)\Z"), lambda _: None),
    ScalarType(
        _CORE + "bool", "tTfF", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), lambda text: text[0] in "tT"
    ),
    ScalarType(_CORE + "int", "-+0123456789", re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), _whole_number),
    ScalarType(_CORE + "float", "-+.0123456789", re.compile(rf"(?:{_SIGNED}|{_NONFINITE})\Z"), _number),
)
_BY_TAG = {scalar.tag: scalar for scalar in SCALAR_TYPES}


def read_yaml_text(path: Path) -> str:
    """The file's text; a ConfigError says why it cannot be read."""
    try:
        with open_to_read(path, follow_links=True) as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        problem = "no such file"
    except IsADirectoryError:
        problem = "a folder, not a file"
    except OSError as error:  # a pipe, such as <(…), is refused too: a run reads its config again on every rank
        problem = f"cannot be read: {error.strerror}"
    except ValueError:  # a NUL character in the path
        problem = "not a valid path"
    else:
        if len(data) > MAX_CONFIG_BYTES:
            problem = f"larger than {MAX_CONFIG_BYTES >> 20} MiB; too large for a config"
        elif b"\0" in data:
            problem = "not a text file"
        else:
            try:
                return data.decode("utf-8-sig")
            except UnicodeDecodeError:
                problem = "not a text file (UTF-8)"
    raise ConfigError([f"{printable(str(path))}: {problem}"])


def parse_yaml(text: str, label: LineLabel, path: KeyPath = ()) -> LocatedValue | None:
    """Parse one YAML document.

    Args:
        text: the document.
        label: names a line of it in messages and in the values' origins.
        path: the key that the value is for, if it is not a whole file.

    Returns:
        The value; None if the text is empty or only a comment.
    """
    prefix = f"{dotted(path)}: " if path else ""

    def refuse(line: int, problem: str) -> NoReturn:
        raise ConfigError([f"{label(line)}: {prefix}{problem}"]) from None

    try:
        loader = _Loader(text, len(path), refuse)
    except ReaderError as error:
        refuse(
            text.count("\n", 0, error.position) + 1, f"not valid YAML: character U+{error.character:04X} is not allowed"
        )
    try:
        node = loader.get_node() if loader.check_node() else None
        if loader.check_node():
            refuse(loader.next_line, "a second YAML document starts here; a config is a single document")
    except yaml.MarkedYAMLError as error:
        # A key without its colon is noticed on the next line only.
        is_unfinished = "simple key" in (error.context or "")
        mark = (error.context_mark if is_unfinished else None) or error.problem_mark or error.context_mark
        message = " ".join(f"{error.problem or ''} {error.context or ''}".split())
        message = re.sub("alias '.*?'", "alias", message)  # the name may be a password that begins with *
        remedy = "; indent with spaces" if r"'\t'" in message else ""
        refuse(mark.line + 1 if mark else 1, f"not valid YAML: {printable(message)}{remedy}")
    except (ValueError, OverflowError):
        # PyYAML lets Python's own error through for an escape such as "\UFFFFFFFF", which is not a character.
        refuse(loader.get_mark().line + 1, "not valid YAML: an escape sequence does not stand for a character")
    if node is None:
        return None
    builder = _Builder(label, refuse)
    value = builder.build(node, path, label(_line(node)))
    if builder.problems:
        raise ConfigError(builder.problems)
    return value


def parse_yaml_mapping(text: str, source: str) -> LocatedValue:
    """Parse a file whose top level is a mapping, or empty; `source` is the file's name in messages."""
    value = parse_yaml(text, lambda line: f"{source}:{line}")
    if value is None or value.content is None:
        return LocatedValue({}, source)
    if not isinstance(value.content, dict):
        kind = "a list" if isinstance(value.content, list) else "a single value"
        raise ConfigError([f"{value.origin}: expected `key: value` lines at the top level, got {kind}"])
    return LocatedValue(value.content, source)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class _Loader(yaml.SafeLoader):
    """PyYAML's scanner and composer with YAML 1.2's scalars, and with limits that apply while the tree is composed."""

    def __init__(self, text: str, depth: int, refuse: Callable[[int, str], NoReturn]) -> None:
        super().__init__(text)
        self._depth = depth
        self._num_nodes = 0
        self._refuse = refuse

    @property
    def next_line(self) -> int:
        return int(self.peek_event().start_mark.line) + 1  # type: ignore[no-untyped-call]

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            self._refuse(self.next_line, f"more than {MAX_NODES:,} values")
        if self._depth > MAX_DEPTH:
            self._refuse(self.next_line, f"nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


_Loader.yaml_implicit_resolvers = {}  # replaces the inherited YAML 1.1 resolvers
for _scalar in SCALAR_TYPES:
    _Loader.add_implicit_resolver(_scalar.tag, _scalar.pattern, list(_scalar.first_characters))
_Loader.add_implicit_resolver(_CORE + "null", _BY_TAG[_CORE + "null"].pattern, [""])


class _Builder:
    """Turns composed nodes into located values and collects the problems in them."""

    def __init__(self, label: LineLabel, refuse: Callable[[int, str], NoReturn]) -> None:
        self.problems: list[str] = []
        self._label = label
        self._refuse = refuse
        self._num_nodes = 0
        self._open: set[int] = set()  # nodes being built: reaching one again means that it contains itself

    def build(self, node: yaml.Node, path: KeyPath, origin: str) -> LocatedValue:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            self._refuse(_line(node), f"more than {MAX_NODES:,} values once aliases are expanded")
        if len(path) > MAX_DEPTH:
            self._refuse(_line(node), f"nested deeper than {MAX_DEPTH} levels once aliases are expanded")
        if id(node) in self._open:
            self._refuse(_line(node), "an alias refers to the value that contains it")
        self._open.add(id(node))
        try:
            return LocatedValue(self._content(node, path), origin)
        finally:
            self._open.discard(id(node))

    def _content(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == _MAPPING:
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQUENCE:
            return [self.build(item, (*path, n), self._label(_line(item))) for n, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and (node.tag == _TEXT or node.tag in _BY_TAG):
            return self._scalar(node, path)
        # A tag with a single exclamation mark may be a password that begins with one.
        tag = shortened(printable(node.tag.replace(_CORE, "!!"))) if node.tag.startswith(_CORE) else "!…"
        self._problem(node, path, f"the tag {tag} is not allowed; a config holds plain values only")
        return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, LocatedValue]:
        content: dict[str, LocatedValue] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TEXT:
                shown = shortened(printable(key)) if isinstance(key, str) else "a list or mapping"
                self._problem(key_node, path, f"a key must be text, got {shown}; put it in quotes")
            elif key == "<<" and key_node.style is None:
                self._problem(
                    key_node, path, "merge keys (<<) are not supported; to build on another file, use `base:`"
                )
            elif key in content:
                self._problem(key_node, (*path, key), f"duplicate key; first set on line {lines[key]}")
            else:
                self._check_text(key_node, path)
                lines[key] = _line(key_node)
                content[key] = self.build(value_node, (*path, key), self._label(lines[key]))
        return content

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> bool | int | float | str | None:
        text: str = node.value
        if node.tag == _TEXT:
            self._check_text(node, path)
            return text
        scalar = _BY_TAG[node.tag]
        if not scalar.pattern.match(text):
            self._problem(node, path, f"not a valid value for the tag {node.tag.replace(_CORE, '!!')}")
        elif len(text) > MAX_DIGITS:
            self._problem(node, path, f"a number longer than {MAX_DIGITS} characters")
        else:
            return scalar.convert(text)
        return None

    def _check_text(self, node: yaml.ScalarNode, path: KeyPath) -> None:
        # Half of a surrogate pair can be escaped in YAML, but UTF-8 cannot encode it.
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            self._problem(node, path, "contains half of a surrogate pair, which is not a character")

    def _problem(self, node: yaml.Node, path: KeyPath, problem: str) -> None:
        prefix = f"{dotted(path)}: " if path else ""
        self.problems.append(f"{self._label(_line(node))}: {prefix}{problem}")
