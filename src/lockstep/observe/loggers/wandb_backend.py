"""Weights & Biases: one run for all attempts in a run folder, known by the folder's own run id.

Its files, logs and caches stay under RUN/wandb.
"""

from html import escape
from pathlib import Path
from typing import Any

from lockstep.config import environment
from lockstep.config.job import WandbConfig
from lockstep.config.json_text import parse_json
from lockstep.errors import UserError
from lockstep.events.event import Event
from lockstep.events.run_folder import RunFolder
from lockstep.observe.loggers.shown import Shown, facts
from lockstep.observe.loggers.wandb_service import WandbService


class WandbBackend:
    def __init__(self, config: WandbConfig, folder: Path) -> None:
        self._config = config
        self._folder = RunFolder(folder.resolve())
        self._run: Any = None
        self._first_step = 0
        self._service: WandbService | None = None

    def open(self, start: Event, config: str) -> None:
        self._service = WandbService()
        try:
            with environment.exported(self._variables() | self._service.variables):
                self._run = self._init(config, start)
        except Exception as error:
            if self._config.required:
                words = " ".join(str(error).split())
                raise UserError(f"log.wandb did not start, and log.wandb.required is true: {words}") from error
            raise
        # After a restart W&B takes only steps that it has not seen. In lockstep mode the others are the same anyway.
        self._first_step = self._run.starting_step

    def show(self, shown: Shown) -> None:
        import wandb

        if shown.step < self._first_step:
            return
        values: dict[str, Any] = {**shown.scalars}
        values |= {name: wandb.Image(str(path)) for name, path in shown.images.items()}
        values |= {name: wandb.Html(f"<pre>{escape(text)}</pre>") for name, text in shown.texts.items()}
        self._run.log(values, step=shown.step)

    def close(self, *, failed: bool) -> None:
        run, self._run = self._run, None
        if self._service is not None:
            self._service.end(
                lambda: None if run is None else run.finish(exit_code=int(failed)),
                exit_code=int(failed),
                limit_s=self._config.finish_timeout_s,
            )

    def _init(self, config: str, start: Event) -> Any:
        import wandb
        import yaml

        settings = wandb.Settings(
            init_timeout=self._config.init_timeout_s,
            login_timeout=self._config.init_timeout_s,  # of a question on a terminal
            finish_timeout=self._config.finish_timeout_s,
            silent=True,
            console="off",
            # Neither code nor the command line, where somebody may have put a secret.
            save_code=False,
            disable_git=True,
            x_disable_meta=True,
            x_save_requirements=False,
            symlink=False,
        )
        return wandb.init(
            id=parse_json(self._folder.facts.read_text())["run_id"],
            resume="allow",
            reinit="create_new",  # whatever else the user's code does with W&B
            dir=self._folder.path,
            name=self._config.name or self._folder.path.name,
            project=self._config.project,
            entity=self._config.entity,
            tags=self._config.tags or None,
            mode=self._config.mode,
            config={**yaml.safe_load(config), "start": facts(start)},
            allow_val_change=True,  # another attempt may run on other processes
            settings=settings,
        )

    def _variables(self) -> dict[str, str]:
        """Where W&B has no setting for it. Its reports on itself would be sent even from an offline run."""
        wanted = {
            "WANDB_CACHE_DIR": str(self._folder.path / "wandb" / "cache"),
            "WANDB_DATA_DIR": str(self._folder.path / "wandb" / "data"),
            "WANDB_ERROR_REPORTING": "false",
        }
        return {name: value for name, value in wanted.items() if environment.variable(name) is None}
