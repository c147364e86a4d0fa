"""A checked config as text: for the run folder, for its identity, and for telling two apart."""

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from lockstep.config.document import WORDS
from lockstep.config.draft import read
from lockstep.config.job import JobConfig
from lockstep.config.value import KeyPath, Plain, dotted, shown
from lockstep.errors import ConfigError

ABSENT = "(absent)"


def dump(config: BaseModel) -> str:
    """YAML that reads back as an equal config, keys in the schema's order. Private values stay references."""
    return yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def digest(config: BaseModel) -> str:
    """sha256, in hex, of the resolved values as JSON with sorted keys: the order in a file does not matter."""
    return hashlib.sha256(_canonical(_plain(config)).encode()).hexdigest()


def difference(a: BaseModel, b: BaseModel, *, but: Collection[str] = ()) -> list[str]:
    """One line for each key whose values differ, as in `optim.lr: 0.001 → 0.003`; empty where the digests agree.

    `but`: sections that are not looked at.
    """
    before, after = (
        {path: leaf for path, leaf in _leaves(_plain(each)) if not path or path[0] not in but} for each in (a, b)
    )
    return [
        f"{dotted(path)}: {_side(before, path)} → {_side(after, path)}"
        for path in dict.fromkeys([*before, *after])
        if path not in before or path not in after or _canonical(before[path]) != _canonical(after[path])
    ]


@dataclass(frozen=True)
class ResolvedSettings:
    """A config as a run folder remembers it."""

    config: JobConfig

    def text(self) -> str:
        return dump(self.config)

    def digest(self) -> str:
        return digest(self.config)

    def changes_since(self, path: Path) -> list[str]:
        """How the config differs from a file's, but for what a run may change when it goes on.

        A setting that was added since counts with its default.
        """
        old = read(path)
        recipe = old.values.get("recipe")
        if recipe != self.config.recipe:
            return [f"recipe: {recipe} → {self.config.recipe}"]
        try:
            return difference(old.check(type(self.config)), self.config, but=self.config.free_on_resume)
        except ConfigError as error:
            return list(error.problems)


def _plain(config: BaseModel) -> dict[str, Plain]:
    values: dict[str, Plain] = config.model_dump(mode="json", by_alias=True)
    return values


def _canonical(value: Plain) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _leaves(value: Plain, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Plain]]:
    """What is compared as one: everything but mappings with keys. Lists are, since an insertion moves all items."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _side(leaves: dict[KeyPath, Plain], path: KeyPath) -> str:
    return shown(leaves[path]) if path in leaves else ABSENT


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else, so that every reader agrees on the file."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes rare line breaks such as U+0085 as they are and reads them back as spaces; in double quotes not.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)
for _word in WORDS:
    _Dumper.add_implicit_resolver(_word.tag, _word.pattern, list(_word.first))
