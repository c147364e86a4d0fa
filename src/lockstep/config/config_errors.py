"""The wording of config errors: `file:line: key: expected …, got …; did you mean …?`, a line for each key.

`describe_problems` turns pydantic's validation errors into such lines; `SchemaOutline` supplies the words for what a
schema expects at a key. Three kinds of messages are worded elsewhere: rules between keys in the schemas' validators,
YAML syntax in `yaml_document.py`, overrides and bases in `config_file.py`.
"""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from lockstep.config.field_types import PRIVATE_FORMAT, references
from lockstep.config.located_value import KeyPath, LocatedValue, Plain, dotted, printable, show_value
from lockstep.config.plurals import count_noun

MAX_PROBLEMS = 50  # as many as anyone will read: a wrong file may have a hundred thousand
_MAX_KEYS = 4  # of a section, where something else was written
ONLY_PRIVATE = "is not replaced here: only fields of type Private may refer to environment variables; write the value"

# Errors that say no more than the outline does, besides those whose type ends in `_type` or `_parsing`.
_WORDED_BY_OUTLINE = {
    "enum",
    "literal_error",
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "int_from_float",
    "whole_number",
}
# Errors whose message does not show the value: pydantic's own, and two of `field_types.py`.
_WITHOUT_VALUE = frozenset(get_args(core_schema.ErrorType)) | {"power_of_two", "out_of_range"}

_TYPES = {"boolean": "true or false", "string": "text", "array": "a list", "object": "a mapping"}
_NUMBERS = {"integer": "a whole number", "number": "a number"}
_BOUNDS = {
    "exclusiveMinimum": "greater than",
    "minimum": "at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}


def describe_problems(errors: Sequence[ErrorDetails], root: LocatedValue, schema: type[BaseModel]) -> list[str]:
    """One line for each wrong key.

    Args:
        errors: what pydantic found when it validated `root` against `schema`.
        root: the config as written, which knows the file and line of every value.
        schema: the config's class.
    """
    outline = SchemaOutline(schema)
    lines: dict[KeyPath, str] = {}
    located_errors = [(_key_path(error["loc"], root, outline), error) for error in errors[: MAX_PROBLEMS + 1]]
    enclosing = {path[:length] for path, _ in located_errors for length in range(len(path))}
    for path, error in located_errors:
        # Each branch of a union reports its own errors. The outline's words cover all branches, so one line is enough;
        # and if the value fits a branch except for something inside it, the error inside is the one to show.
        if path in enclosing and _is_worded_by_outline(error["type"]):
            continue
        lines.setdefault(path, _line(error, path, root, outline))
    for path, name in _misplaced_references(root, outline):
        lines.setdefault(path, located(root, path, f"${{{name}}} {ONLY_PRIVATE}"))
    return list(lines.values())


def located(root: LocatedValue, path: KeyPath, problem: str) -> str:
    """`problem` with the place and the key in front of it: `run.yaml:3: optim.lr: …`."""
    label = f"{dotted(path)}: " if path else ""
    return f"{root.nearest(path).origin}: {label}{problem}"


def first_problems(lines: list[str]) -> list[str]:
    """At most MAX_PROBLEMS of the lines, and a line that says so if there were more."""
    if len(lines) <= MAX_PROBLEMS:
        return lines
    return [*lines[:MAX_PROBLEMS], f"only the first {MAX_PROBLEMS} problems are shown"]


def _key_path(location: tuple[str | int, ...], root: LocatedValue, outline: "SchemaOutline") -> KeyPath:
    """The key that an error is about: pydantic's location without the names of union branches that it mixes in."""
    path: KeyPath = ()
    for step in location:
        if root.nearest(path).child(step) is not None or step in outline.names(path):
            path = (*path, step)
    return path


def _line(error: ErrorDetails, path: KeyPath, root: LocatedValue, outline: "SchemaOutline") -> str:
    kind = error["type"]
    expected = _expected(path, outline)
    value = root.nearest(path).content
    if kind in ("missing", "too_long") and isinstance(value, list) and outline.is_fixed_length(path):
        return located(root, path, f"expected {expected}, got {count_noun(len(value), 'value')}")
    if kind == "missing":
        return located(root, path, "missing" + (f"; expected {expected}" if expected else ""))
    if kind == "extra_forbidden":
        return located(root, path, "unknown key" + _suggested_key(path, outline))
    if kind in ("value_error", "assertion_error"):
        return located(root, path, _one_line(str(error["ctx"]["error"])))
    if expected and _is_worded_by_outline(kind):
        return located(root, path, f"expected {expected}{_got(path, root, outline)}")
    message = _one_line(error["msg"].replace("Input should be", "expected"))
    return located(root, path, message + (_got(path, root, outline) if kind in _WITHOUT_VALUE else ""))


def _expected(path: KeyPath, outline: "SchemaOutline") -> str | None:
    """What is valid at `path`, in words; of a section, with its first keys."""
    expected = outline.expected(path)
    names = outline.names(path)
    if expected != _TYPES["object"] or not names:
        return expected
    return f"{expected} with {', '.join(names[:_MAX_KEYS])}" + ", …" * (len(names) > _MAX_KEYS)


def _is_worded_by_outline(kind: str) -> bool:
    return kind in _WORDED_BY_OUTLINE or kind.endswith(("_type", "_parsing"))


def _got(path: KeyPath, root: LocatedValue, outline: "SchemaOutline") -> str:
    """The wrong value, unless it is private or may contain something private."""
    value = root.nearest(path).plain()
    if outline.is_private(path):
        return ", got something else (not shown: the field is private)"
    if isinstance(value, dict):
        return ", got a mapping"
    if isinstance(value, list):
        return ", got a list"
    near = get_close_matches(value, outline.choices(path), n=1) if isinstance(value, str) else []
    return f", got {show_value(value)}" + (f"; did you mean {near[0]}?" if near else "")


def _suggested_key(path: KeyPath, outline: "SchemaOutline") -> str:
    *around, key = path
    known = [dotted(each) for each in outline.paths()]
    if not around and key in known:
        outer, _, inner = str(key).rpartition(".")
        return f"; dots do not nest keys in a file: write {inner} under {outer}"
    siblings = get_close_matches(str(key), outline.names(tuple(around)), n=1)
    if siblings:
        return f"; did you mean {dotted((*around, siblings[0]))}?"
    elsewhere = {name.rpartition(".")[2]: name for name in reversed(known)}  # reversed: the outermost key wins
    similar = get_close_matches(str(key), list(elsewhere), n=1)
    return f"; did you mean {elsewhere[similar[0]]}?" if similar else ""


def _misplaced_references(root: LocatedValue, outline: "SchemaOutline") -> Iterator[tuple[KeyPath, str]]:
    """Every field that refers to an environment variable and is not private, with the variable's name."""
    for path, value in root.leaves():
        names = references(value.content) if isinstance(value.content, str) else []
        if names and not outline.is_private(path):
            yield path, names[0]


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


class SchemaOutline:
    """What a schema expects at each key, in words.

    It reads the JSON schema that pydantic makes of a model, which covers any type that a config's author may use.
    """

    def __init__(self, schema: type[BaseModel]) -> None:
        self._root = schema.model_json_schema(schema_generator=_LenientJsonSchema)

    def expected(self, path: KeyPath) -> str | None:
        """What is valid at `path`, as in "a whole number greater than 0"; None where the schema does not say."""
        phrases = [_phrase(node) for node in self._nodes_at(path)]
        known = list(dict.fromkeys(phrase for phrase in phrases if phrase))
        # "or null" is noise: omitting the key means the same.
        known = [phrase for phrase in known if phrase != "null"] or known
        separator = ", or " if any("," in phrase for phrase in known) else " or "
        return separator.join(known) if known and None not in phrases else None

    def choices(self, path: KeyPath) -> list[str]:
        """The texts that are valid at `path`, where it takes one of a few."""
        return [choice for node in self._nodes_at(path) for choice in node.get("enum", []) if isinstance(choice, str)]

    def is_private(self, path: KeyPath) -> bool:
        """Is the field at `path` of type `Private`?"""
        return any(node.get("format") == PRIVATE_FORMAT for node in self._nodes_at(path))

    def is_fixed_length(self, path: KeyPath) -> bool:
        """Does `path` take a list of a fixed number of values?"""
        return any(_fixed_length(node) is not None for node in self._nodes_at(path))

    def names(self, path: KeyPath) -> list[str]:
        """The keys that the mapping at `path` may have."""
        return [name for node in self._nodes_at(path) for name in node.get("properties", {})]

    def paths(self) -> Iterator[tuple[str, ...]]:
        """Every key of the schema, outer ones first."""
        level: list[tuple[tuple[str, ...], JsonSchemaValue]] = [((), self._root)]
        seen: list[JsonSchemaValue] = []  # visit each model once: one that contains itself has endless keys
        while level:
            inner = []
            for path, reference in level:
                for node in self._alternatives(reference):
                    if node in seen or "properties" not in node:
                        continue
                    seen.append(node)
                    inner += [((*path, name), child) for name, child in node["properties"].items()]
            yield from (path for path, _ in inner)
            level = inner

    def _nodes_at(self, path: KeyPath) -> list[JsonSchemaValue]:
        nodes = self._alternatives(self._root)
        for step in path:
            children = [child for node in nodes for child in _children(node, step)]
            nodes = [node for child in children for node in self._alternatives(child)]
        return nodes

    def _alternatives(self, node: JsonSchemaValue) -> list[JsonSchemaValue]:
        """The node itself or, where it is a reference or a union, the nodes that it stands for."""
        if "$ref" in node:
            return self._alternatives(self._root["$defs"][node["$ref"].rpartition("/")[2]])
        for word in ("anyOf", "oneOf", "allOf"):
            if word in node:
                return [inner for alternative in node[word] for inner in self._alternatives(alternative)]
        return [node]


class _LenientJsonSchema(GenerateJsonSchema):
    """Leaves types blank that JSON schema cannot describe: the error is then worded by pydantic."""

    def handle_invalid_for_json_schema(self, _schema: CoreSchema, _error_info: str) -> JsonSchemaValue:
        return {}

    def emit_warning(self, _kind: JsonSchemaWarningKind, _detail: str) -> None:
        pass


def _children(node: JsonSchemaValue, step: str | int) -> list[JsonSchemaValue]:
    if isinstance(step, int):
        items: list[JsonSchemaValue] = node.get("prefixItems", [])
        return [items[step]] if step < len(items) else _mappings(node.get("items"))
    if step in node.get("properties", {}):
        return [node["properties"][step]]
    return [*_mappings(node.get("additionalProperties")), *node.get("patternProperties", {}).values()]


def _mappings(node: Any) -> list[JsonSchemaValue]:
    return [node] if isinstance(node, dict) else []  # true and false are valid JSON schemas too, and say nothing


def _phrase(node: JsonSchemaValue) -> str | None:
    if "enum" in node:
        return "one of " + ", ".join(map(_choice, node["enum"]))
    if "const" in node:
        return _choice(node["const"])
    kind = node.get("type")
    if kind in _NUMBERS:
        return _number_phrase(node, _NUMBERS[kind])
    if (length := _fixed_length(node)) is not None:
        return f"a list of {length} values"
    if kind == "string" and str(node.get("format")).endswith("path"):
        return "a path"
    return "null" if kind == "null" else _TYPES.get(str(kind))


def _fixed_length(node: JsonSchemaValue) -> int | None:
    longest: int | None = node.get("maxItems")
    return longest if longest == node.get("minItems") else None


def _number_phrase(node: JsonSchemaValue, noun: str) -> str:
    if "minimum" in node and "maximum" in node:
        return f"{noun} from {node['minimum']:.15g} to {node['maximum']:.15g}"
    bounds = " and ".join(f"{words} {node[bound]:.15g}" for bound, words in _BOUNDS.items() if bound in node)
    if bounds.startswith("at "):
        return f"{noun} of {bounds}"
    return f"{noun} {bounds}".rstrip()


def _choice(value: Plain) -> str:
    return value if isinstance(value, str) else show_value(value)
