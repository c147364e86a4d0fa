"""A validated config as YAML for the run folder, its digest, and the difference between two configs."""

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from lockstep.config.config_file import read_config
from lockstep.config.folder_remedies import IN_COMMAND, FolderRemedies
from lockstep.config.job_schema import JobConfig
from lockstep.config.located_value import KeyPath, Plain, dotted, show_value
from lockstep.config.yaml_document import SCALAR_TYPES
from lockstep.errors import ConfigError

ABSENT = "(absent)"


def dump_config(config: BaseModel) -> str:
    """YAML that reads back as an equal config, keys in the schema's order. Private values stay unresolved."""
    return yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def config_digest(config: BaseModel) -> str:
    """The sha256, in hex, of the values as JSON with sorted keys, so that their order in the file does not matter."""
    return hashlib.sha256(_canonical(_plain(config)).encode()).hexdigest()


def config_changes(old: BaseModel, new: BaseModel, *, ignore: Collection[str] = ()) -> list[str]:
    """One line for each key whose value differs, as in `optim.lr: 0.001 → 0.003`; empty if the digests agree.

    Args:
        old: the config before.
        new: the config after.
        ignore: top-level keys that are not compared.
    """
    before, after = _compared(old, ignore), _compared(new, ignore)
    return [
        f"{dotted(path)}: {_shown(before, path)} → {_shown(after, path)}"
        for path in dict.fromkeys([*before, *after])
        if path not in before or path not in after or _canonical(before[path]) != _canonical(after[path])
    ]


@dataclass(frozen=True)
class ResolvedSettings:
    """A validated config in the form that a run folder saves and compares."""

    config: JobConfig
    remedies: FolderRemedies = IN_COMMAND

    def text(self) -> str:
        """The content of config.yaml."""
        return dump_config(self.config)

    def digest(self) -> str:
        """What identifies the config in run.json."""
        return config_digest(self.config)

    def changes_since(self, path: Path) -> list[str]:
        """How the config differs from the one in a file, except for the keys that a resumed run may change.

        A key that the file does not have yet counts with its default.
        """
        old = read_config(path)
        recipe = old.values.get("recipe")
        if recipe != self.config.recipe:
            return [f"recipe: {recipe} → {self.config.recipe}"]
        try:
            return config_changes(old.check(type(self.config)), self.config, ignore=self.config.free_on_resume)
        except ConfigError as error:
            return list(error.problems)


def _plain(config: BaseModel) -> dict[str, Plain]:
    values: dict[str, Plain] = config.model_dump(mode="json", by_alias=True)
    return values


def _canonical(value: Plain) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _compared(config: BaseModel, ignore: Collection[str]) -> dict[KeyPath, Plain]:
    return {path: leaf for path, leaf in _leaves(_plain(config)) if not path or path[0] not in ignore}


def _leaves(value: Plain, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Plain]]:
    """Everything but non-empty mappings. A list is one leaf, since an insertion would move all items after it."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _shown(leaves: dict[KeyPath, Plain], path: KeyPath) -> str:
    return show_value(leaves[path]) if path in leaves else ABSENT


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else, so that every parser reads the same."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes rare line breaks such as U+0085 literally and reads them back as spaces, unless in double quotes.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)
for _scalar in SCALAR_TYPES:
    _Dumper.add_implicit_resolver(_scalar.tag, _scalar.pattern, list(_scalar.first_characters))
