"""What a schema expects at each key, in words: which keys there are, what each may hold, which are private."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core import CoreSchema

from lockstep.config.private import PRIVATE_FORMAT
from lockstep.config.value import KeyPath, Plain, shown

_TYPES = {"boolean": "true or false", "string": "text", "array": "a list", "object": "a mapping"}
_NUMBERS = {"integer": "a whole number", "number": "a number"}
_BOUNDS = {
    "exclusiveMinimum": "greater than",
    "minimum": "of at least",
    "exclusiveMaximum": "less than",
    "maximum": "of at most",
}


class Outline:
    """A pydantic model seen through its JSON schema, which covers every type that a config's author may use."""

    def __init__(self, schema: type[BaseModel]) -> None:
        self._root = schema.model_json_schema(schema_generator=_Lenient)

    def expected(self, path: KeyPath) -> str | None:
        """What may stand at `path`, as in "a whole number greater than 0"; None where the schema does not say."""
        phrases = [_phrase(node) for node in self._at(path)]
        known = list(dict.fromkeys(phrase for phrase in phrases if phrase))
        # "or null" is noise: leaving the key out says the same.
        known = [phrase for phrase in known if phrase != "null"] or known
        return " or ".join(known) if known and None not in phrases else None

    def choices(self, path: KeyPath) -> list[str]:
        return [choice for node in self._at(path) for choice in node.get("enum", []) if isinstance(choice, str)]

    def is_private(self, path: KeyPath) -> bool:
        return any(node.get("format") == PRIVATE_FORMAT for node in self._at(path))

    def names(self, path: KeyPath) -> list[str]:
        """The keys that the mapping at `path` may have."""
        return [name for node in self._at(path) for name in node.get("properties", {})]

    def paths(self) -> Iterator[tuple[str, ...]]:
        """Every key of the schema, outer ones first."""
        level: list[tuple[tuple[str, ...], JsonSchemaValue]] = [((), self._root)]
        seen: list[JsonSchemaValue] = []  # a model that contains itself has endless keys: go through each model once
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

    def _at(self, path: KeyPath) -> list[JsonSchemaValue]:
        nodes = self._alternatives(self._root)
        for step in path:
            children = [child for node in nodes for child in _children(node, step)]
            nodes = [node for child in children for node in self._alternatives(child)]
        return nodes

    def _alternatives(self, node: JsonSchemaValue) -> list[JsonSchemaValue]:
        """The node itself or, where it is a reference or a choice between several, what it stands for."""
        if "$ref" in node:
            return self._alternatives(self._root["$defs"][node["$ref"].rpartition("/")[2]])
        for word in ("anyOf", "oneOf", "allOf"):
            if word in node:
                return [inner for alternative in node[word] for inner in self._alternatives(alternative)]
        return [node]


class _Lenient(GenerateJsonSchema):
    """A type that JSON schema cannot describe is left blank: the config is no worse for it."""

    def handle_invalid_for_json_schema(self, _schema: CoreSchema, _error_info: str) -> JsonSchemaValue:
        return {}

    def emit_warning(self, _kind: JsonSchemaWarningKind, _detail: str) -> None:
        pass


def _children(node: JsonSchemaValue, step: str | int) -> list[JsonSchemaValue]:
    if isinstance(step, int):
        places: list[JsonSchemaValue] = node.get("prefixItems", [])
        return [places[step]] if step < len(places) else _mappings(node.get("items"))
    if step in node.get("properties", {}):
        return [node["properties"][step]]
    return [*_mappings(node.get("additionalProperties")), *node.get("patternProperties", {}).values()]


def _mappings(node: Any) -> list[JsonSchemaValue]:
    return [node] if isinstance(node, dict) else []  # true and false are schemas too, and say nothing


def _phrase(node: JsonSchemaValue) -> str | None:
    if "enum" in node:
        return "one of " + ", ".join(map(_choice, node["enum"]))
    if "const" in node:
        return _choice(node["const"])
    kind = node.get("type")
    if kind in _NUMBERS:
        if "minimum" in node and "maximum" in node:
            return f"{_NUMBERS[kind]} from {node['minimum']:.15g} to {node['maximum']:.15g}"
        bounds = [f"{words} {node[bound]:.15g}" for bound, words in _BOUNDS.items() if bound in node]
        return " ".join([_NUMBERS[kind], " and ".join(bounds)]).rstrip()
    if kind == "string" and str(node.get("format")).endswith("path"):
        return "a path"
    return "null" if kind == "null" else _TYPES.get(str(kind))


def _choice(value: Plain) -> str:
    return value if isinstance(value, str) else shown(value)
