"""Change the files of a run folder as an attacker, a bug or a disk would: mostly their structure; hashes fit."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.forged import forge_file, forge_manifest, forge_text, tensor_file

HOSTILE_NAME = "a\x1b[2J\x07\u202e[red]\udce9"
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 1.5, -0.0, 2**32, 2**60, 2**63, 2**64, 10**17, 10**400, "", "x", "\ud800",
    HOSTILE_NAME, "nan", "9" * 1000, "../../outside", [], {}, [[]], [None], {"": 0}, {"\ud800": "\ud800"}, [1] * 50,
    {"$tensor": "x"}, {"$float": 10**400}, {"$pairs": [[1, 2]]}, "0001-01-01", [-1, -1],
]  # fmt: skip
# What Python's `json.dumps` does not write: each takes the place of a mark in the text.
RAW = [
    "NaN", "-Infinity", "1e999", "-1e999", "9" * 4300, "9" * 4301, "[" * 100_000 + "]" * 100_000,
    '{"a":' * 500 + "1" + "}" * 500, '"\\ud800"', '"\\u001b[8m"', '{"step":1,"step":2}', '"\n"', "'x'", "", "-", "0x10",
]  # fmt: skip
_MARK = "a mark for raw text"
# Only the optimizer knows which entries its state must have, and of which kind: its first step is what fails otherwise.
_KNOWN_TO_TORCH = {"exp_avg", "exp_avg_sq"}

Place = tuple[Any, Any]  # a container, and a key or an index in it


def mutate(run: Path, rng: random.Random) -> str:
    """Change one file of the run; return which one, and how."""
    path = rng.choice(_files(run))
    name = str(path.relative_to(run))
    if path.name == "manifest.json":
        return f"{name}: {_mutate_manifest(path.parent, rng)}"
    if path.suffix == ".safetensors":
        return f"{name}: {_mutate_tensors(path, rng)}"
    if rng.random() < 0.25 or not path.read_text().startswith(("{", "[")):  # LATEST, BEST, a config in YAML
        return f"{name}: {_mutate_bytes(path, run, rng)}"
    return f"{name}: {_mutate_json(path, rng)}"


def _files(run: Path) -> list[Path]:
    """Return the run's files, every kind of them about as often."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(
        each for each in run.rglob("*") if each.is_file() and each.stat().st_size and each.name != ".lock"
    ):
        kinds.setdefault(path.suffix if path.suffix == ".safetensors" else path.name, []).append(path)
    newest = [max(paths, key=lambda path: str(path)) for paths in kinds.values()]
    manifests = [path for path in newest if path.name == "manifest.json"]
    return newest + manifests * 4  # its content matters most


def _mutate_manifest(checkpoint: Path, rng: random.Random) -> str:
    did: list[str] = []
    if rng.random() < 0.3:
        body = (checkpoint / "manifest.json").read_bytes().rpartition(b',\n "sha256": "')[0]
        content = json.loads(body + b"\n}")
        text = _with_raw(content, rng, did)
        forge_text(checkpoint, text.removesuffix("}").rstrip().encode())
    else:
        forge_manifest(checkpoint, lambda content: did.append(_change(content, rng)))
    return did[0]


def _mutate_tensors(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    did = _change(header, rng)
    forge_file(path.parent, path.name, tensor_file(header, rest))
    return did


def _mutate_json(path: Path, rng: random.Random) -> str:
    """Change a JSON file, or a line of a file of them."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = rng.randrange(len(lines))
    content, did = json.loads(lines[number]), [""]
    if rng.random() < 0.3:
        lines[number] = _with_raw(content, rng, did)
    else:
        did.append(_change(content, rng))
        lines[number] = json.dumps(content)
    if rng.random() < 0.2:
        lines.insert(rng.randrange(len(lines) + 1), lines[number])
    path.write_text("\n".join(lines) + "\n")
    return f"line {number + 1}: {did[-1]}"


def _mutate_bytes(path: Path, run: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    other = rng.choice(_files(run)).read_bytes()
    changes: dict[str, Callable[[], bytes]] = {
        "empty": lambda: b"",
        "truncated": lambda: data[: rng.randrange(len(data))],
        "doubled": lambda: data + data,
        "swapped": lambda: other,
        "utf-16": lambda: data.decode().encode("utf-16"),
        "utf-32 without a mark": lambda: data.decode().encode("utf-32-le"),
        "with a byte order mark": lambda: b"\xef\xbb\xbf" + data,
        "latin-1": lambda: b'{"\xe9": "\xff"}\n' + data,
        "a raw surrogate": lambda: b'{"step": 1, "kind": "\xed\xa0\x80"}\n' + data,
        "zeros": lambda: b"\0" * len(data),
        "one long line": lambda: data.replace(b"\n", b" "),
        "carriage returns": lambda: data.replace(b"\n", b"\r"),
        "nested deeply": lambda: b"[" * 200_000,
        "control characters": lambda: b"\x1b[2J\x9b8m" + data,
        "YAML": lambda: b"!!python/object/apply:os.system ['touch planted']\n",
        "an anchor in itself": lambda: b"a: &a [*a, *a]\n",
    }
    name = rng.choice(list(changes))
    path.write_bytes(changes[name]())
    return name


def _change(content: Any, rng: random.Random) -> str:
    """Change something inside a JSON value; return what."""
    container, key = rng.choice(list(_places(content)))
    place = f"{key!r:.60}"
    is_named = isinstance(container, dict)
    if is_named and rng.random() < 0.25:
        del container[key]
        return f"without {place}"
    if is_named and rng.random() < 0.15:
        container[HOSTILE_NAME] = container.pop(key)
        return f"{place} renamed"
    if rng.random() < 0.1:
        for _ in range(rng.choice([1, 3, 90, 400])):
            container[key] = [container[key]]
        return f"{place} nested"
    container[key] = rng.choice(VALUES)
    return f"{place} = {container[key]!r:.60}"


def _with_raw(content: Any, rng: random.Random, did: list[str]) -> str:
    """Return the JSON text of a value in which something is replaced by a text that `json.dumps` does not write."""
    container, key = rng.choice(list(_places(content)))
    container[key] = _MARK
    raw = rng.choice(RAW)
    did.append(f"{key!r:.60} = {raw:.60}")
    return json.dumps(content).replace(json.dumps(_MARK), raw)


def _places(value: Any) -> Iterator[Place]:
    """Yield every place in a JSON value, outer ones as often as all that is inside them."""
    entries = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, element in entries:
        if not (isinstance(element, dict) and _KNOWN_TO_TORCH & element.keys()):
            yield value, key
            yield from _places(element)
