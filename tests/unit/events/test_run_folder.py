"""A run claims its folder exclusively; nothing that is there is ever overwritten."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config.resolved_config import ResolvedSettings
from lockstep.config.train_schema import BatchConfig, Config, OptimConfig
from lockstep.errors import UserError
from lockstep.events.event_log import EventLog
from lockstep.events.jsonl import JsonlWriter
from lockstep.events.run_folder import RunFolder, ScriptSettings


def config(lr: float = 1e-3) -> Config:
    return Config(recipe="digits", epochs=1, batch=BatchConfig(global_batch=8), optim=OptimConfig(lr=lr))


def test_a_new_folder_gets_run_json_and_the_resolved_config(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "a")
    claim = folder.claim(ResolvedSettings(config()), {"torch": "x"})
    assert claim.attempt == 1
    claim.release()
    content = json.loads(folder.run_json.read_text())
    assert content["format"] == 1
    assert content["fingerprint"] == {"torch": "x"}
    assert {"run_id", "created", "config_digest"} <= content.keys()
    assert Config.from_file(folder.config) == config()


def test_every_claim_is_another_attempt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    for expected in (1, 2, 3):
        claim = folder.claim(ResolvedSettings(config()), {})
        assert claim.attempt == expected
        events = EventLog([JsonlWriter(folder.events)], claim.attempt)
        events.emit("start", 0)
        events.close()
        claim.release()


def test_another_config_is_refused_and_the_changes_are_listed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.claim(ResolvedSettings(config()), {}).release()
    before = {path: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(UserError, match=r"another config.*--force.*\n  optim.lr: 0.001 → 0.003"):
        folder.claim(ResolvedSettings(config(lr=3e-3)), {})
    with pytest.raises(UserError, match=r"another config.*--force.*\n  recipe: digits → other"):
        folder.claim(ResolvedSettings(config().model_copy(update={"recipe": "other"})), {})
    assert {path: path.read_bytes() for path in folder.path.iterdir()} == before


FREE = {
    "workers": 2,
    "log_every": 3,
    "log": {"tensorboard": True},
    "trace": True,
    "timeout_s": 5.0,
    "bucket_mb": 1.0,
    "lanes_per_rank": [1, 7],
    "ddp_backend": "gloo",
    "nccl_debug": "WARN",
    "parallel": {"shard": 2},
    "fsdp": {"wrap": ["Block"], "min_parameters": 100.0, "cpu_offload": True, "reshard_after_forward": False},
    "tensor_plan": {"*.query": "column"},
    "find_unused_parameters": True,
    "activation_checkpointing": {"every": 2},
    "checkpoint": {"every": "7 steps", "keep": 9, "keep_every": 4, "memory": False},
}


def test_settings_that_change_no_bit_may_change_and_are_saved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.claim(ResolvedSettings(config()), {"lanes": 8}).release()
    run_id = folder.read_run_json()["run_id"]
    now = config()
    assert Config.free_on_resume == FREE.keys()
    for name, value in FREE.items():  # each by itself
        now = Config.model_validate({**now.model_dump(by_alias=True), name: value})
        folder.claim(ResolvedSettings(now), {"lanes": 8}).release()
        assert Config.from_file(folder.config) == now
    assert folder.read_run_json()["run_id"] == run_id
    with pytest.raises(UserError, match=r"--force.*\n  optim.lr: 0.001 → 0.003$"):
        folder.claim(ResolvedSettings(config(lr=3e-3)), {})
    assert Config.from_file(folder.config) == now


def test_a_forced_run_has_the_fingerprint_of_its_new_settings(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.claim(ResolvedSettings(config()), {"global_batch": 8}).release()
    folder.claim(ResolvedSettings(config(lr=3e-3)), {"global_batch": 16}, force=True).release()
    assert folder.read_run_json()["fingerprint"] == {"global_batch": 16}


@pytest.mark.parametrize("name", ["events.jsonl", "ledger.jsonl", "checkpoints", "ranks", "config.yaml", "a/run.json"])
def test_a_folder_with_what_would_be_taken_for_a_runs_is_left_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("years of work")
    with pytest.raises(UserError, match=r"is not a run folder.*: give Run or Trainer another folder$"):
        RunFolder(tmp_path).claim(ScriptSettings({}), {})
    with pytest.raises(UserError, match=r"is not a run folder.*: choose another folder with --run$"):
        RunFolder(tmp_path).claim(ResolvedSettings(config()), {})
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == [path]
    assert path.read_text() == "years of work"


def test_other_files_do_not_matter(tmp_path: Path) -> None:
    for name in ("thesis.tex", ".gitignore", ".DS_Store", "tensorboard/events", "incidents/note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("years of work")
    RunFolder(tmp_path).claim(ResolvedSettings(config()), {}).release()
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(UserError, match="cannot use the run folder"):
        RunFolder(tmp_path / "thesis.tex").claim(ResolvedSettings(config()), {})


def test_a_start_that_was_killed_can_be_repeated(tmp_path: Path) -> None:
    """It has written its lock and its config, but not run.json."""
    folder = RunFolder(tmp_path)
    folder.claim(ResolvedSettings(config()), {}).release()
    folder.run_json.unlink()
    folder.claim(ResolvedSettings(config()), {}).release()


def test_only_a_committed_checkpoint_can_be_continued(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (folder.checkpoints / ".draft-step-3-x").mkdir(parents=True)
    folder.run_json.write_text("{}")
    assert not folder.has_checkpoint()
    (folder.checkpoints / "step-3").mkdir()
    assert folder.has_checkpoint()


class Grown(Config):
    patience: int = 3  # a setting that the folder's config does not know yet


def test_a_setting_that_the_saved_config_lacks_counts_with_its_default(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.claim(ResolvedSettings(config()), {}).release()
    grown = Grown(**dict(config()))
    folder.claim(ResolvedSettings(grown), {}).release()
    with pytest.raises(UserError, match="patience: 3 → 4"):
        folder.claim(ResolvedSettings(grown.model_copy(update={"patience": 4})), {})


def test_a_start_that_was_killed_halfway_starts_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.claim(ResolvedSettings(config()), {}).release()
    folder.run_json.unlink()
    claim = folder.claim(ResolvedSettings(config()), {})
    assert claim.attempt == 1
    assert folder.run_json.exists()
    claim.release()


def test_a_folder_in_use_names_its_owner(tmp_path: Path) -> None:
    hold = """
import sys
from pathlib import Path
from lockstep.events.run_folder import RunFolder, ScriptSettings
claim = RunFolder(Path(sys.argv[1])).claim(ScriptSettings({"seed": 1}), {})
print("held", flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "a")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None and owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    with pytest.raises(
        UserError, match=f"in use by process {owner.pid} on .*: wait for it to end, or give Run or Trainer another"
    ):
        RunFolder(tmp_path / "a").claim(ScriptSettings({"seed": 1}), {})
    with owner:
        owner.stdin.close()
    RunFolder(tmp_path / "a").claim(ScriptSettings({"seed": 1}), {}).release()


def test_a_scripts_settings_are_compared_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(ScriptSettings({"seed": 1, "lanes": 8, "betas": (0.9, 0.99)}).text())
    assert ScriptSettings({"seed": 1, "lanes": 8, "betas": [0.9, 0.99]}).changes_since(path) == []
    assert ScriptSettings({"seed": 2, "lanes": 8, "tail": None}).changes_since(path) == [
        "seed: 1 → 2",
        "betas: [0.9, 0.99] → (absent)",
        "tail: (absent) → None",
    ]
    path.write_text("seed: 1\n")
    assert ScriptSettings({"seed": 1}).changes_since(path) == [f"{path} was not written by a script"]


def test_strange_events_do_not_stop_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.claim(ResolvedSettings(config()), {}).release()
    folder.events.write_text('{"attempt": "x"}\n{"attempt": [1]}\n{"attempt": 1e400}\n{"attempt": 4}\n{}\n')
    claim = folder.claim(ResolvedSettings(config()), {})
    assert claim.attempt == 5
    claim.release()


@pytest.mark.parametrize("content", ["", "{", '{"format": 99}', "[]", '"x"'])
def test_a_damaged_run_json_is_named(tmp_path: Path, content: str) -> None:
    folder = RunFolder(tmp_path)
    folder.run_json.write_text(content)
    with pytest.raises(UserError, match=r"run\.json"):
        folder.claim(ResolvedSettings(config()), {})


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot use the run folder"):
        RunFolder(tmp_path / "file" / "run").claim(ResolvedSettings(config()), {})
    folder = RunFolder(tmp_path / "a")
    folder.claim(ResolvedSettings(config()), {}).release()
    folder.events.mkdir()
    with pytest.raises(UserError, match="cannot use the run folder"):
        folder.claim(ResolvedSettings(config()), {})
    with pytest.raises(UserError, match="cannot write"):
        JsonlWriter(folder.events)


OTHER = 65534  # nobody
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def claim(path: Path, *, is_shared: bool = False) -> None:
    RunFolder(path, is_shared).claim(ScriptSettings({}), {}).release()


def test_a_folder_that_every_user_can_write_needs_the_option(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    for mode in (0o777, 0o1777):
        path.chmod(mode)
        with pytest.raises(UserError, match=rf"a can be written \(mode {mode:04o};.*every user.*shared_folder=True"):
            claim(path)
        assert list(path.iterdir()) == []
    claim(path, is_shared=True)
    assert RunFolder(path).run_json.exists()


@needs_root
def test_a_folder_of_another_user_needs_the_option(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    os.chown(path, OTHER, -1)
    with pytest.raises(UserError, match=rf"a belongs to another user \(uid {OTHER}\).*another folder.*shared_folder="):
        claim(path)
    assert list(path.iterdir()) == []
    claim(path, is_shared=True)


@needs_root
def test_a_link_of_another_user_in_place_of_the_folder_needs_the_option(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "a").symlink_to("mine")
    os.lchown(tmp_path / "a", OTHER, -1)
    with pytest.raises(UserError, match=r"a belongs to another user"):
        claim(tmp_path / "a")
    claim(tmp_path / "a", is_shared=True)


@needs_root
def test_a_group_may_write_if_the_user_is_in_it(tmp_path: Path) -> None:
    """Teams share folders in this way, and Kubernetes makes its volumes writable for the pod's group."""
    path = tmp_path / "a"
    path.mkdir()
    path.chmod(0o2775)
    claim(path)
    os.chown(path, -1, OTHER)
    path.chmod(0o2775)
    with pytest.raises(UserError, match=rf"\(mode 2775;.*by another group \(gid {OTHER}\)"):
        claim(path)


@needs_root
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", ["ranks", "checkpoints", "evaluations", "incidents", "media", "wandb", "config.yaml"])
def test_links_of_another_user_are_refused(tmp_path: Path, name: str, is_shared: bool) -> None:
    path, outside = tmp_path / "a", tmp_path / "outside"
    claim(path)
    outside.mkdir()
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(outside)
    os.lchown(path / name, OTHER, -1)
    with pytest.raises(UserError, match=rf"a/{name} is a link that another user \(uid {OTHER}\) made: remove it"):
        claim(path, is_shared=is_shared)
    assert list(outside.iterdir()) == []


def test_links_that_the_user_made_to_folders_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk" / "a").mkdir(parents=True)
    (tmp_path / "disk" / "checkpoints").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    (tmp_path / "b").symlink_to("disk/a")
    claim(tmp_path / "runs" / "a")
    (tmp_path / "b" / "checkpoints").symlink_to(tmp_path / "disk" / "checkpoints")
    claim(tmp_path / "b")


def test_a_file_system_without_modes_or_owners_is_no_reason_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a disk of Windows under Linux, where every file has the mode 0777, or NFS that maps root to nobody."""
    path = tmp_path / "a"
    path.mkdir()
    path.chmod(0o777)
    if os.geteuid() == 0:
        os.chown(path, OTHER, -1)
    as_made = os.fstat

    def mapped(descriptor: int) -> os.stat_result:
        found = list(as_made(descriptor))
        found[0], found[4] = found[0] | 0o777, path.stat().st_uid
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", mapped)
    claim(path)


def test_a_new_folder_is_never_writable_for_everybody(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        claim(tmp_path / "a")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o775


@pytest.mark.parametrize("name", [".lock", "run.json", "events.jsonl"])
def test_files_are_not_opened_through_links_and_pipes(tmp_path: Path, name: str) -> None:
    path, precious = tmp_path / "a", tmp_path / "precious"
    claim(path)
    precious.write_text("keep")
    for put, problem in (
        (lambda file: file.symlink_to(precious), "a symbolic link"),
        (os.mkfifo, "not a regular file"),
    ):
        (path / name).unlink(missing_ok=True)
        put(path / name)
        with pytest.raises(UserError, match=rf"cannot use the run folder {path}: {path}/{name}: {problem}"):
            claim(path)
        assert precious.read_text() == "keep"
