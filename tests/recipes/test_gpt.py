"""The gpt recipe through the real command, and its parts: the text, the model, the samples it writes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError, UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.recipes.gpt import text as text_module
from lockstep.recipes.gpt.text import read_corpus, split_text
from lockstep.recipes.gpt.transformer import GptNetwork, _printable, sample_text
from lockstep.recipes.registry import load_recipe
from lockstep.train.optim.optimizer_factory import build_optimizer
from lockstep.world.keyed_random import keyed_generator
from tests.commands import LOCKSTEP, call, run

SMALL = (
    "model.width=32 model.depth=1 model.heads=2 model.dropout=0.1 data.length=32 data.sample=200 batch.global=16 "
    "lanes=4 optim.lr=1e-2 schedule.warmup=10 steps=120 evaluate_every=60 data.temperature=0.5"
)
SENTENCE = "the same bits on any number of processes\n"


def train(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    finished = run([*LOCKSTEP, "train", "gpt", *arguments, "--run", "here"], folder)
    assert finished.code == 0, finished.err
    return list(read_jsonl(folder / "here" / "events.jsonl"))


def sample_of(events: list[dict[str, Any]]) -> str:
    (sample,) = [event["texts"]["sample"] for event in events if "texts" in event]
    return str(sample)


def test_it_learns_any_text_and_writes_the_same_on_one_and_two_processes(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(SENTENCE * 200)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    one = train(folders[0], *SMALL.split(), "data.path=../mine.txt")
    two = train(folders[1], *SMALL.split(), f"data.path={tmp_path}/mine.txt", "-n", "2")

    assert one[-1]["digest"] == two[-1]["digest"]
    assert one[-1]["metrics"] == two[-1]["metrics"]
    assert list(one[-1]["metrics"]) == ["bits_per_byte", "accuracy"]
    losses = [event["loss"] for event in two if "loss" in event]
    assert losses[-1] < losses[0] / 2
    assert two[-1]["metrics"]["bits_per_byte"] < 1.5
    # The last one is the best, so it is not saved a second time.
    assert [event["is_best"] for event in two if event["kind"] == "checkpoint"] == [True, True]

    sample = sample_of(two)
    assert sample == sample_of(one)
    assert len(sample) == 200
    assert all(character.isprintable() or character == "\n" for character in sample)
    assert "�" not in sample
    assert len(set(sample.split()) & set(SENTENCE.split())) >= 5, f"words of the text: {sample}"


def test_a_quick_run_in_bf16_on_pythons_own_text_is_the_same_on_one_and_two_processes(tmp_path: Path) -> None:
    digests = set()
    for number, arguments in enumerate([[], ["-n", "2"]]):
        (tmp_path / str(number)).mkdir()
        events = train(tmp_path / str(number), "--quick", "precision=bf16", "data.sample=8", *arguments)
        assert (events[0]["precision"], events[-1]["step"]) == ("bf16", 8)
        digests.add(events[-1]["digest"])
    assert len(digests) == 1


def test_a_missing_text_is_one_line_before_anything_is_written(tmp_path: Path) -> None:
    finished = run([*LOCKSTEP, "train", "gpt", "-n", "2", "data.path=nowhere.txt"], tmp_path)
    assert finished.code == 2
    (line,) = finished.err.splitlines()
    assert line.startswith("lockstep: data.path=nowhere.txt: no such file")
    assert not any(tmp_path.iterdir())


def test_a_text_that_is_too_short_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    finished = call(["train", "gpt", "data.path=short.txt"], tmp_path)
    assert finished.code == 2
    (line,) = finished.err.splitlines()
    assert "the text has 9 bytes, and windows of data.length=64 need 640" in line
    assert "data.path=FILE" in line


def test_unreadable_texts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"data.path=.*: not a file"):
        read_corpus(str(tmp_path))
    with pytest.raises(UserError, match=r"data.path=/dev/zero: not a file"):
        read_corpus("/dev/zero")
    with pytest.raises(UserError, match=r"data.path=/proc/self/mem: cannot be read: Input/output error"):
        read_corpus("/proc/self/mem")
    with pytest.raises(UserError, match=r"data.path=.*: cannot be read: File name too long"):
        read_corpus("x" * 5000)
    (tmp_path / "long.txt").write_bytes(b"x" * 101)
    monkeypatch.setattr(text_module, "_MAX_BYTES", 100)
    with pytest.raises(UserError, match="longer than 100 bytes: train on a part of it"):
        read_corpus(str(tmp_path / "long.txt"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="the text has 0 bytes"):
        split_text(read_corpus(str(tmp_path / "empty.txt")), 8)


def test_a_file_is_its_bytes_and_pythons_text_is_long_enough_for_long_windows(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    assert read_corpus(str(tmp_path / "bytes")).tolist() == list(range(256))
    assert len(read_corpus(None)) > 300_000
    assert len(split_text(read_corpus(None), 1024).test) > 20  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_bytes", "length"), [(1000, 16), (170, 16), (1013, 7), (30, 1)])
def test_training_starts_at_every_byte_and_the_test_predicts_each_of_its_own_once(num_bytes: int, length: int) -> None:
    train_set, test_set, _ = split_text(torch.arange(num_bytes), length)  # every byte is known by its place
    trained = torch.stack([window for (window,) in train_set])  # type: ignore[attr-defined]
    tested = torch.stack([window for (window,) in test_set])  # type: ignore[attr-defined]
    border = int(tested.min())
    assert trained.tolist() == [list(range(i, i + length + 1)) for i in range(border - length)]
    assert tested[:, 1:].flatten().tolist() == list(range(border + 1, num_bytes))
    assert 0 <= num_bytes / 10 - tested[:, 1:].numel() < length


@pytest.mark.parametrize("num_bytes", [1, 15, 159, 160, 161])
def test_the_shortest_text_that_is_enough(num_bytes: int) -> None:
    if num_bytes < 160:
        with pytest.raises(UserError, match="need 160"):
            split_text(torch.arange(num_bytes), 16)
    else:
        splits = split_text(torch.arange(num_bytes), 16)
        assert len(splits.train) > 0 and len(splits.test) > 0  # type: ignore[arg-type]


def small_model(dropout: float = 0.0) -> GptNetwork:
    torch.manual_seed(0)
    return GptNetwork(width=16, depth=2, heads=2, length=12, dropout=dropout)


def test_a_byte_attends_only_to_those_before_it() -> None:
    model = small_model()
    context = torch.arange(12)[None]
    changed = context.clone()
    changed[0, 7] = 99
    differs = (model(context) != model(changed)).any(2)[0]
    assert differs.tolist() == [False] * 7 + [True] * 5


def test_the_position_of_a_byte_matters() -> None:
    scores = small_model()(torch.full((1, 12), 65))
    assert not torch.allclose(scores[0, 3], scores[0, 4])


def test_the_output_layer_is_the_embedding_and_nothing_else_is_shared() -> None:
    assert sum(parameter.numel() for parameter in small_model().parameters()) == (
        256 * 16  # bytes
        + 12 * 16  # positions
        + 2 * (2 * 2 * 16 + 4 * 16 * 16 + 4 * 16 + 8 * 16 * 16 + 5 * 16)  # blocks
        + 2 * 16  # the last norm
    )


def test_norms_and_biases_do_not_decay() -> None:
    recipe, config = load_recipe("gpt")
    model = recipe.model(config)
    optimizer = build_optimizer(model, config.optim, 32)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decaying = {names[p] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert {name for name, parameter in model.named_parameters() if parameter.dim() > 1} == decaying


def test_loss_and_metrics_are_sums_over_bytes() -> None:
    recipe, config = load_recipe("gpt")
    model = recipe.model(config).eval()
    windows = read_corpus(None)[: 3 * 65].view(3, 65)
    parts = [recipe.loss(model, [window[None]]) for window in windows]
    total, count = recipe.loss(model, [windows])
    assert count == sum(part_count for _, part_count in parts) == 3 * 64
    torch.testing.assert_close(total, torch.stack([part for part, _ in parts]).sum())

    metrics = recipe.metrics(model, [windows])
    assert {name: number for name, (_, number) in metrics.items()} == {"bits_per_byte": count, "accuracy": count}
    torch.testing.assert_close(metrics["bits_per_byte"][0], total / torch.tensor(2.0).log())
    hits = sum(int((model(window[None, :-1])[0].argmax(1) == window[1:]).sum()) for window in windows)
    assert metrics["accuracy"][0] == hits


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.heads: expected a divisor of width=128, got 5"):
        load_recipe("gpt", ["model.heads=5"])


def test_writing_is_keyed_goes_past_the_window_and_leaves_the_model_as_it_was() -> None:
    model = small_model(dropout=0.5)
    model.train()
    drawn = torch.get_rng_state()
    first, second = (sample_text(model, 40, 1.0, keyed_generator(3, "sample")) for _ in range(2))
    assert first == second != sample_text(model, 40, 1.0, keyed_generator(4, "sample"))
    assert model.training
    assert torch.equal(drawn, torch.get_rng_state())


def test_a_low_temperature_always_takes_the_likeliest_byte() -> None:
    texts = {sample_text(small_model(), 20, 1e-4, keyed_generator(seed, "sample")) for seed in range(3)}
    assert len(texts) == 1


def test_terminal_control_characters_are_not_written() -> None:
    assert _printable(b"plain\n\ttext \xc3\xa9 \x1b[2J\x00\xff\r") == "plain\n\ttext é �[2J���"
