"""No data that is read can run code: nothing in the source unpickles, evaluates, or builds objects from a file."""

import ast
from pathlib import Path

import pytest

from lockstep.config.resolved_config import ResolvedSettings
from lockstep.config.train_schema import BatchConfig, Config
from lockstep.events.run_folder import RunFolder
from tests.commands import call

SOURCE = Path(__file__).parents[2] / "src" / "lockstep"

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}

# Where bytes of our own are unpickled, that never were in a file: what a test sends its ranks, and what data workers
# send their own parent.
OWN_BYTES = {"testing/ranks_harness.py", "testing/rank_worker.py", "data/stream_workers.py"}


def violations(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [f"import {alias.name}" for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(f"from {node.module} import …")
        elif isinstance(node, ast.Call):
            found += _bad_call(node)
    return found


def _bad_call(call: ast.Call) -> list[str]:
    name = ast.unparse(call.func)
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in BUILTINS:
        return [f"{name}(…)"]
    if name.endswith("torch.load") and options.get("weights_only") != "True":
        return [f"{name}(…) without weights_only=True"]
    if "allow_pickle" in options and options["allow_pickle"] != "False":
        return [f"{name}(…, allow_pickle=…)"]
    if name in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"):
        return [] if "Safe" in options.get("Loader", "") else [f"{name}(…)"]
    return []


def test_nothing_that_is_read_can_run_code() -> None:
    found = {
        str(path.relative_to(SOURCE)): problems
        for path in sorted(SOURCE.rglob("*.py"))
        if (problems := violations(ast.parse(path.read_text())))
    }
    assert {name: problems for name, problems in found.items() if name not in OWN_BYTES} == {}
    assert found.keys() == OWN_BYTES, "a place that is allowed and does not need it any more"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import os, dill",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
    ],
)
def test_code_that_runs_data_is_found(text: str) -> None:
    assert violations(ast.parse(text))


@pytest.mark.parametrize("text", ["torch.load(path, weights_only=True)", "yaml.load(text, Loader=_SafeLoader)"])
def test_harmless_code_is_accepted(text: str) -> None:
    assert not violations(ast.parse(text))


def test_reading_a_run_imports_nothing_that_its_config_names(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    folder = RunFolder(tmp_path / "mine")
    own = Config(recipe="digits", epochs=1, batch=BatchConfig(global_batch=8))
    folder.claim(ResolvedSettings(own), {}).release()
    folder.config.write_text("optim: {name: 'planted:Optimizer'}\nepochs: 1\nbatch: {global: 8}\nrecipe: digits\n")
    for command in ("report", "watch --once", "plan", "ckpt ls", "ckpt verify", "ckpt audit", "ckpt digest"):
        call([*command.split(), "mine"], tmp_path)
    assert ResolvedSettings(own).changes_since(folder.config)[0] == "optim.name: 'planted:Optimizer' → 'adamw'"
    assert not (tmp_path / "executed").exists()
    refused = call(["train", "digits", "optim.name=planted:Optimizer"], tmp_path)  # the user names it: it is imported
    assert "optim.name: planted:Optimizer: AttributeError" in refused.err
    assert (tmp_path / "executed").exists()
