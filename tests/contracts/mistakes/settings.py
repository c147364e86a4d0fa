"""Mistakes in a config, in overrides, and in the commands that take them or a run folder."""

from tests.contracts.mistakes.mistake import Mistake, training_script

DIGITS = "recipe: digits\nepochs: 1\nbatch: {global: 64}\n"


def _of_setting(name: str, setting: str, says: str) -> Mistake:
    return Mistake(name, command=f"lockstep train digits {setting}", says=f"^lockstep: command line: {says}")


def _of_file(name: str, text: str, says: str, **others: str) -> Mistake:
    files = {"mine.yaml": text, **{f"{other}.yaml": content for other, content in others.items()}}
    return Mistake(name, command="lockstep train mine.yaml", files=files, says=f"^lockstep: {says}")


_SETTINGS = [
    _of_setting("a misspelt key", "epohcs=3", r"epohcs: unknown key; did you mean epochs\?$"),
    _of_setting(
        "a misspelt key of the recipe", "model.widht=3", r"model.widht: unknown key; did you mean model.width\?$"
    ),
    _of_setting("a key without its section", "lr=0.1", r"lr: unknown key; did you mean optim.lr\?$"),
    _of_setting("text for a number", "optim.lr=fast", "optim.lr: expected a number greater than 0, got 'fast'$"),
    _of_setting("a value for a section", "optim=adam", "optim: expected a mapping with name, lr, .*, got 'adam'$"),
    _of_setting("negative epochs", "epochs=-1", "epochs: expected a whole number greater than 0, got -1$"),
    _of_setting("negative workers", "workers=-2", "workers: expected a whole number from 0 to 256, got -2$"),
    _of_setting("epochs and steps in overrides", "epochs=1 steps=5", "steps: give exactly one of epochs and steps$"),
    _of_setting(
        "an unknown schedule", "schedule.kind=cosin", r"schedule.kind: expected one of .* did you mean cosine\?$"
    ),
    _of_setting("an unknown device", "device=gpu", "device: expected one of auto, cpu, cuda, mps, got 'gpu'"),
    _of_setting("an unknown precision", "precision=fp8", "precision: expected one of fp32, bf16, fp16, got 'fp8'$"),
    _of_setting("lanes that are no power of two", "lanes=3", "lanes: expected auto or a power of two, got 3$"),
    _of_setting("spaces around =", "epochs = 3", r"'epochs': expected key=value, as in optim\.lr=1e-3$"),
    _of_setting(
        "an unknown optimizer", "optim.name=adamm", r"optim.name: torch.optim has .*'adamm'; did you mean adam\?$"
    ),
    _of_setting(
        "an optimizer with a closure", "optim.name=LBFGS", "optim.name: LBFGS evaluates .*: use another optimizer$"
    ),
    _of_setting(
        "an optimizer of sparse gradients", "optim.name=SparseAdam", "optim.name: SparseAdam .*: use adam or adamw$"
    ),
    _of_setting(
        "an optimizer's unknown argument",
        "optim.name=RMSprop optim.arguments.alhpa=0.9",
        r"optim.arguments.alhpa: RMSprop has no argument alhpa; did you mean alpha\?$",
    ),
    _of_setting(
        "a setting of another optimizer",
        "optim.name=RMSprop optim.momentum=0.5",
        "optim.momentum: only for sgd: for RMSprop, write optim.arguments.momentum$",
    ),
    _of_setting(
        "a setting without effect", "optim.momentum=0.5", "optim.momentum: only for sgd, and optim.name is adamw$"
    ),
    _of_setting(
        "an optimizer in no module",
        "optim.name=nowhere:Lion",
        "optim.name: nowhere:Lion: ModuleNotFoundError: No module named 'nowhere'$",
    ),
    _of_setting(
        "an unknown recipe in a setting", "recipe=digts", r"recipe: expected .*, got 'digts'; did you mean digits\?$"
    ),
]

_FILES = [
    _of_file(
        "neither epochs nor steps in a file",
        "recipe: digits\nbatch: {global: 8}\n",
        "mine.yaml: steps: give exactly one of ",
    ),
    _of_file(
        "both epochs and steps in a file",
        f"{DIGITS}steps: 5\n",
        "mine.yaml:4: steps: give exactly one of epochs and steps$",
    ),
    _of_file("no recipe", "epochs: 1\nbatch: {global: 8}\n", "mine.yaml: recipe: missing; expected .*digits, "),
    _of_file("a dotted key in a file", f"{DIGITS}optim.lr: 2\n", "mine.yaml:4: optim.lr: .*: write lr under optim$"),
    _of_file(
        "a key without a colon",
        "recipe: digits\nepochs 1\n",
        "mine.yaml:2: not valid YAML: could not find expected ':'",
    ),
    _of_file("tabs", "recipe: digits\nbatch:\n\tglobal: 8\n", "mine.yaml:3: not valid YAML: .*; indent with spaces$"),
    _of_file("a missing base", "base: none.yaml\n", "mine.yaml:1: base: none.yaml: no such file$"),
    _of_file(
        "bases in a circle",
        "base: other.yaml\n",
        "other.yaml:1: base: a config cannot build on itself: mine.yaml → other.yaml → mine.yaml$",
        other="base: mine.yaml\n",
    ),
]

_PROCESSES = [
    Mistake(
        "a batch that lanes do not divide",
        command="lockstep train digits batch.global=30 lanes=8",
        says="global_batch=30 cannot be split equally into lanes=8: use a multiple of 8, or set lanes=2$",
    ),
    Mistake(
        "more processes than lanes",
        command="lockstep train digits lanes=1 --quick -n 2",
        says="2 processes cannot share lanes=1: start at most 1, or set lanes=2 or more",
    ),
    Mistake(
        "a GPU where there is none",
        command="lockstep train digits device=cuda",
        env={"CUDA_VISIBLE_DEVICES": ""},
        says="device=cuda, but torch sees no CUDA device: use device=cpu or check nvidia-smi$",
    ),
    Mistake(
        "no processes", command="lockstep train digits -n 0", says="--nproc-per-node 0: expected at least 1, or auto$"
    ),
    Mistake(
        "processes in words", command="lockstep train digits -n two", says="-n two: expected a whole number, auto, or "
    ),
]

_COMMANDS = [
    Mistake(
        "an unknown recipe",
        command="lockstep train digts",
        says=r"digts: neither a file nor .*; did you mean digits\?$",
    ),
    Mistake("a missing config", command="lockstep train nowhere.yaml", says="nowhere.yaml: no such file$"),
    Mistake(
        "a setting as an option",
        command="lockstep train digits --epochs 3",
        says=r"No such option: --epochs \(a setting is written epochs=…, without dashes\)$",
    ),
    Mistake(
        "a script given to train",
        command="lockstep train train.py",
        says="train.py is a script, not a config: `lockstep run train.py` runs it$",
    ),
    Mistake(
        "a config given to run",
        command="lockstep run mine.yaml",
        files={"mine.yaml": DIGITS},
        says="mine.yaml: a config is not a script: `lockstep train mine.yaml` trains it$",
    ),
    Mistake(
        "a run folder given to train",
        command="lockstep train .",
        files={"config.yaml": DIGITS},
        says=r"\. is a run folder: to continue its run, `lockstep train config\.yaml --run \.`$",
    ),
    Mistake(
        "an empty folder given to ckpt",
        command="lockstep ckpt ls .",
        says=r"\. has no checkpoints: expected a run folder",
    ),
    Mistake(
        "no folder given to ckpt",
        command="lockstep ckpt digest nowhere",
        says="nowhere is not a folder: expected a run",
    ),
    Mistake(
        "a folder without a run given to report",
        command="lockstep report .",
        files={"notes.txt": ""},
        says=r"\. is not a run folder: it has no run\.json$",
    ),
    Mistake(
        "a folder without a run given to watch",
        command="lockstep watch . --once",
        files={"notes.txt": ""},
        says=r"\. is not a run folder: it has no run\.json$",
    ),
    Mistake(
        "a folder without a run given to plan",
        command="lockstep plan .",
        files={"notes.txt": ""},
        says=r"\. is not a run folder: it has no run\.json; give a run folder, or a config to try$",
    ),
    Mistake(
        "a page that is not HTML",
        command="lockstep report . -o out.pdf",
        says="-o out.pdf: expected a file name that ends",
    ),
    Mistake(
        "a plan for no processes",
        command="lockstep plan digits -n 1,0",
        says="-n 1,0: expected numbers of processes, at most 65536, as in 1,2,4$",
    ),
    Mistake(
        "a plan for absurdly many",
        command="lockstep plan digits -n 100000",
        says="-n 100000: expected numbers of processes, at most 65536, as in 1,2,4$",
    ),
    Mistake(
        "init over a file",
        command="lockstep init train.py",
        files={"train.py": "mine"},
        says="train.py exists: choose another name$",
    ),
    Mistake(
        "a misspelt setting",
        command="lockstep settings optm",
        says=r"no setting begins with 'optm'; did you mean optim\?$",
    ),
]

_RUN_FOLDERS = [
    Mistake(
        "a folder of something else, in a command",
        command="lockstep train digits --quick --run .",
        files={"events.jsonl": ""},
        says=r"\. is not a run folder .*, but its events\.jsonl would be taken .*: choose another folder with --run$",
    ),
    Mistake(
        "a folder of something else, in a script",
        script=training_script(run="'.', world, seed=7"),
        files={"events.jsonl": ""},
        says=r"\. is not a run folder .*, but its events\.jsonl would be taken .*: give Run or Trainer another folder$",
    ),
    Mistake(
        "another config, in a command",
        command="lockstep train digits --quick optim.lr=0.5 --run .",
        files={"config.yaml": DIGITS, "run.json": '{"format": 1, "run_id": "0123456789abcdef", "config_digest": ""}'},
        says=r"\. holds a run with another config: choose another folder with --run, or pass --force to continue it ",
    ),
    Mistake(
        "another recipe, in a command",
        command="lockstep train gpt --quick --run .",
        files={"config.yaml": DIGITS, "run.json": '{"format": 1, "run_id": "0123456789abcdef", "config_digest": ""}'},
        says="^lockstep:   recipe: digits → gpt$",
    ),
    Mistake(
        "another seed, in a script",
        script=training_script(run="'.', world, seed=7"),
        files={"config.yaml": "{}", "run.json": '{"format": 1, "run_id": "0123456789abcdef", "config_digest": ""}'},
        says=r'\. holds a run with another config: give Run or Trainer another folder, or pass resume="force" to ',
    ),
]

MISTAKES = [*_SETTINGS, *_FILES, *_PROCESSES, *_COMMANDS, *_RUN_FOLDERS]
