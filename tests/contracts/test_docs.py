"""The guide: it builds, its links work, its scripts and configs run, its commands exist, its reference is complete."""

import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any

import pytest
import yaml

import lockstep
import lockstep.loggers
import lockstep.metrics
from lockstep import errors
from lockstep.config.train_schema import Config
from lockstep.errors import ConfigError, LockstepError, Stopped, UserError
from lockstep.events.event_log import Sink
from lockstep.loggers.logger_factory import open_loggers
from lockstep.supervision.stop_signals import STOP_SIGNALS
from tests.commands import clean_environment
from tests.contracts.documents import (
    DOCUMENTS,
    GUIDE,
    ROOT,
    anchors_of,
    blocks_of,
    commands_of,
    fault_of,
    is_complete,
    links_of,
    name_of,
    named_file,
)

# A part of a config is laid over this one.
SMALLEST = "recipe: digits\nepochs: 1\nbatch: {global: 64}\n"

# Run every script in its own folder, in one process: importing torch takes most of the time.
RUNNER = """
import contextlib, io, os, runpy, sys, traceback
from pathlib import Path
failed = 0
for script in sys.argv[1:]:
    before, folder = dict(os.environ), str(Path(script).parent)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = [script]
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        failed += bool(end.code)
        print(script, "ended with", end.code)
    except BaseException:
        failed += 1
        print(script, traceback.format_exc())
    sys.path.remove(folder)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(before)
sys.exit(failed)
"""


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_and_anchors_lead_somewhere(path: Path) -> None:
    lost = []
    for link in links_of(path):
        target, _, anchor = link.target.partition("#")
        file = path.parent / target if target else path
        if not file.exists():
            lost.append(f"line {link.line}: {link.target}: there is no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors_of(file):
            lost.append(f"line {link.line}: {link.target}: there is no such heading")
    assert not lost


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_python_blocks_compile_and_commands_exist(path: Path) -> None:
    for block in blocks_of(path):
        if block.language == "python":
            compile(block.text, f"{name_of(path)}:{block.line}", "exec")
    faults = [(line, command, fault_of(command)) for line, command in commands_of(path)]
    assert not [fault for fault in faults if fault[2]]


def test_an_unknown_command_is_found() -> None:
    assert fault_of("lockstep train digits -n 2 optim.lr=1e-3   # a remark") is None
    assert fault_of("lockstep run -n 2 --max_restarts 1 train.py --epochs 10") is None
    assert fault_of("lockstep ckpt ls     RUN            what is there") is None
    assert fault_of("lockstep fly digits") == "there is no command fly"
    assert "--nodes" in str(fault_of("lockstep train digits --nodes 2"))
    assert fault_of("lockstep ckpt diff runs/one") is not None
    assert fault_of("lockstep train digits -n") is not None
    assert fault_of("lockstep submit slurm --nodes 2 -- train digits --quick | sbatch") is None
    assert "--nodes" in str(fault_of("lockstep submit slurm -- train digits --nodes 2"))
    assert "--node-count" in str(fault_of("lockstep submit slurm --node-count 2 -- train digits"))


def test_complete_scripts_and_configs_run(tmp_path: Path) -> None:
    """Those of the README are run by test_readme.py; scripts that start several processes are not run."""
    scripts = []
    for path in GUIDE:
        folder = tmp_path / name_of(path).replace("/", "-")
        folder.mkdir()
        for number, block in enumerate(blocks_of(path)):
            name = named_file(block)
            if block.language not in ("python", "yaml") or not (name or is_complete(block)):
                continue
            script = folder / (name or f"block_{number}.py")
            script.write_text(block.text)
            if block.language == "python" and is_complete(block) and "main_distributed" not in block.text:
                scripts.append(script)
            if block.language == "yaml":
                check = folder / f"check_{number}.py"
                check.write_text(f"from lockstep.recipes.registry import load_recipe\nload_recipe({script.name!r})\n")
                scripts.append(check)
    assert len(scripts) >= 12
    finished = subprocess.run(
        [sys.executable, "-c", RUNNER, *map(str, scripts)],
        env=clean_environment() | {"PYTHONPATH": f"{ROOT / 'src'}", "LOCKSTEP_MEMORY": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_parts_of_configs_are_valid(tmp_path: Path) -> None:
    (tmp_path / "smallest.yaml").write_text(SMALLEST)
    faults = []
    num_checked = 0
    for path in DOCUMENTS:
        for block in blocks_of(path):
            if block.language != "yaml" or named_file(block):
                continue
            for part in _alternatives(block.text):
                (tmp_path / "part.yaml").write_text(f"base: smallest.yaml\n{part}")
                num_checked += 1
                try:
                    Config.from_file(tmp_path / "part.yaml")
                except ConfigError as error:
                    faults.append(f"{name_of(path)}:{block.line}: {error}")
    assert not faults
    assert num_checked >= 8


def _alternatives(text: str) -> Iterator[str]:
    """Return one config for each of the ways in which a block sets the same key."""
    keys = re.findall(r"^(\w+):", text, re.MULTILINE)
    if len(keys) == len(set(keys)):
        yield text
    else:
        yield from (line for line in text.splitlines() if yaml.safe_load(line))


# An entry of the reference: `.. autoclass:: lockstep.Config(**settings)`.
_ENTRY = re.compile(r"^\.\. auto(?:class|data|function|exception):: (lockstep(?:\.\w+)+)", re.MULTILINE)


def _public_names() -> dict[str, Any]:
    """Return everything that a script may import, by its full name."""
    modules = (lockstep, lockstep.metrics, lockstep.search, lockstep.loggers)
    names = {f"{module.__name__}.{name}": module for module in modules for name in getattr(module, "__all__", ())}
    public = {name: pkgutil.resolve_name(name) for name in names}
    return {name: value for name, value in public.items() if not isinstance(value, ModuleType)}


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
    entries = [pkgutil.resolve_name(name) for name in _ENTRY.findall(pages)]
    counts = {name: sum(entry is value for entry in entries) for name, value in _public_names().items()}
    assert not {name: count for name, count in counts.items() if count != 1}
    for needed in (LockstepError, UserError, ConfigError, Stopped, Sink, open_loggers):
        assert sum(entry is needed for entry in entries) == 1, needed


def test_every_public_name_has_its_own_docstring() -> None:
    missing = []
    for name, value in _public_names().items():
        if isinstance(value, UnionType):  # an alias: the reference describes it
            continue
        own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
        if not own or own.startswith(f"{value.__name__}("):  # a dataclass without one shows its signature
            missing.append(name)
    assert not missing


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for name in ("docs", "src", "examples", "bench"):
        ignored = shutil.ignore_patterns("_build", "__pycache__", "evolution.md", "measurements.md")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet", "-b", "html", "docs", "site"]
    built = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    recipes = list((ROOT / "src" / "lockstep" / "recipes").glob("*/README.md"))
    assert recipes
    for recipe in recipes:
        assert tmp_path / "site" / "recipes" / f"{recipe.parent.name}.html" in pages
    assert "--max-restarts" in (tmp_path / "site" / "reference" / "commands.html").read_text()
    assert "optim.lr_scaling" in (tmp_path / "site" / "reference" / "settings.html").read_text()
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*\"")
    for page in pages:
        assert not loads.findall(page.read_text()), page
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text()), style


def test_the_table_of_exit_codes_is_complete() -> None:
    section = (ROOT / "docs" / "quickstart.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    listed = {int(code) for row in re.findall(r"^\| (\d[\d, ]*) \|", section, re.MULTILINE) for code in row.split(", ")}
    ours = {code for name, code in vars(errors).items() if name.startswith("EXIT_")}
    assert listed == {0, *ours, *map(errors.exit_code_of_signal, STOP_SIGNALS)}
