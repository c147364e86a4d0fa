"""A model of a disk that loses what was not flushed when the power is cut.

A file's content survives as it was at the file's last flush; a folder's entries, as they were at the folder's last
flush. Later changes may or may not survive: the first few of a folder's; of a file's content all, a part, or only its
size. Flushing a folder does not flush its files, and the other way round.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.faults.system_calls import Call


@dataclass
class File:
    content: bytes = b""
    flushed: bytes = b""


@dataclass
class Folder:
    entries: "dict[str, Node]" = field(default_factory=dict)
    flushed: "dict[str, Node]" = field(default_factory=dict)
    later: "list[dict[str, Node]]" = field(default_factory=list)  # the entries after each change since the last flush

    def change(self, entries: "dict[str, Node]") -> None:
        self.entries = entries
        self.later.append(entries)


Node = File | Folder


class Cut(Protocol):
    """What survives of the changes that were not flushed."""

    def of_folder(self, folder: Folder) -> dict[str, Node]: ...

    def of_file(self, file: File) -> bytes: ...


class LosesAll:
    """Nothing that was not flushed survives."""

    def of_folder(self, folder: Folder) -> dict[str, Node]:
        return folder.flushed

    def of_file(self, file: File) -> bytes:
        return file.flushed


class LosesSome:
    """A random part of what was not flushed survives."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def of_folder(self, folder: Folder) -> dict[str, Node]:
        return self._random.choice([folder.flushed, *folder.later])

    def of_file(self, file: File) -> bytes:
        if file.content == file.flushed:
            return file.content
        size = len(file.content)
        torn = file.content[: self._random.randrange(size + 1)]
        return self._random.choice([file.flushed, file.content, bytes(size), torn, torn.ljust(size, b"\0")])


class Disk:
    """Starts as a copy of a folder, all of it flushed. `apply` then repeats the calls that were made there."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tree = _read_tree(root)

    def apply(self, call: Call) -> None:
        folder, name = self._parent(call.path)
        match call.kind:
            case "create" if name not in folder.entries:
                folder.change({**folder.entries, name: File()})
            case "mkdir":
                folder.change({**folder.entries, name: Folder()})
            case "write":
                file = folder.entries[name]
                assert isinstance(file, File)
                file.content = call.content
            case "remove":
                folder.change(_without(folder.entries, name))
            case "rename":
                target, new_name = self._parent(call.target)
                assert target is folder, "a rename between folders is not modelled"
                folder.change({**_without(folder.entries, name), new_name: folder.entries[name]})
            case "flush":
                node = folder.entries[name] if name else folder
                if isinstance(node, File):
                    node.flushed = node.content
                else:
                    node.flushed, node.later = node.entries, []

    def write_survivors(self, target: Path, cut: Cut) -> None:
        """Write what the disk holds after a power cut to a new folder."""
        _write(self._tree, target, cut)

    def _parent(self, path: str) -> tuple[Folder, str]:
        """Return the folder that contains a path, and the name in it; the name of the root is empty."""
        *folders, name = Path(path).relative_to(self._root).parts or ("",)
        node = self._tree
        for each in folders:
            inner = node.entries[each]
            assert isinstance(inner, Folder)
            node = inner
        return node, name


def _read_tree(path: Path) -> Folder:
    entries: dict[str, Node] = {
        each.name: _read_tree(each) if each.is_dir() else File(each.read_bytes(), each.read_bytes())
        for each in path.iterdir()
    }
    return Folder(entries, entries)


def _write(folder: Folder, path: Path, cut: Cut) -> None:
    path.mkdir()
    for name, node in cut.of_folder(folder).items():
        if isinstance(node, Folder):
            _write(node, path / name, cut)
        else:
            (path / name).write_bytes(cut.of_file(node))


def _without(entries: dict[str, Node], name: str) -> dict[str, Node]:
    return {each: node for each, node in entries.items() if each != name}
