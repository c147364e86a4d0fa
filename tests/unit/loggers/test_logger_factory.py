"""Which loggers a config asks for, and what happens when their packages are missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config.job_schema import LogConfig, WandbConfig
from lockstep.config.train_schema import Config
from lockstep.errors import ConfigError, UserError
from lockstep.loggers.logger_factory import open_loggers


def test_no_logger_by_default(tmp_path: Path) -> None:
    assert open_loggers(LogConfig(), tmp_path) == []
    assert open_loggers(LogConfig(wandb=WandbConfig(mode="disabled")), tmp_path) == []


def test_nothing_is_written_or_loaded_before_the_run_starts(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from lockstep.config.job_schema import LogConfig, WandbConfig
from lockstep.loggers.logger_factory import open_loggers
sinks = open_loggers(LogConfig(tensorboard=True, wandb=WandbConfig()), Path(sys.argv[1]))
for sink in sinks:
    sink.close()
print(len(sinks), {"tensorboard", "torch", "wandb"} & set(sys.modules))
"""
    answer = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout == "2 set()\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "name"), [(LogConfig(tensorboard=True), "tensorboard"), (LogConfig(wandb=WandbConfig()), "wandb")]
)
def test_a_missing_extra_is_one_clear_line(
    config: LogConfig, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    for path in ([], [str(tmp_path)]):  # not installed; and a folder that a run left here is not a package
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setattr(sys, "path", path)
        with pytest.raises(UserError) as caught:
            open_loggers(config, tmp_path)
        assert str(caught.value) == f'log.{name} needs an extra: pip install "lockstep-train[{name}]"'


def test_the_config_section(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("epochs: 1\nbatch: {global: 8}\nlog: {tensorboard: yes, wandb: {project: p, tags: [a, b]}}\n")
    log = Config.from_file(path, ["log.wandb.mode=offline"]).log
    assert log.tensorboard
    assert log.wandb == WandbConfig(project="p", tags=("a", "b"), mode="offline")
    with pytest.raises(ConfigError, match=r"(?s)log\.wandb\.mode: expected .*offline.*got 'of'") as caught:
        Config.from_file(path, ["log.wandb.mode=of", "log.wandb.init_timeout_s=0"])
    assert len(caught.value.problems) == 2


def test_wandb_is_switched_on_by_an_override_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("epochs: 1\nbatch: {global: 8}\n")
    assert Config.from_file(path).log == LogConfig()
    assert Config.from_file(path, ["log.wandb.mode=offline"]).log.wandb == WandbConfig(mode="offline")
