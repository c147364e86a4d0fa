"""Explain why a script with its own training loop gives a different result on several processes."""

from lockstep.events.step_trace import TraceDifference, read_trace
from lockstep.supervision.step_recorder import BUFFERS, GRADIENT, RATES, ROWS, START, WEIGHTS
from lockstep.verify.recorded_updates import (
    COARSE_ROUNDING,
    ROUNDING,
    THE_ROWS,
    RankDisagreement,
    RecordedUpdates,
    alignment_of,
    largest_gap,
)

_BATCH_ADVICE = (
    "Compare equal global batches: most scripts take --batch-size per process. Give the single process as many rows as "
    'all processes have together, with --one-args "--batch-size {rows}" or whatever the script calls it.'
)


def explain_disagreement(disagreement: RankDisagreement, num_ranks: int) -> str:
    """Return the likely cause of a difference between the ranks of one job."""
    step, phase, tensor, _ = disagreement.at
    rank = f"rank {disagreement.rank} of {num_ranks}"
    if phase == START:
        return (
            f"From the start, {rank} had different weights than rank 0 ({tensor}), and nothing made them equal: wrap "
            "the model in DistributedDataParallel, which also averages the gradients."
        )
    if phase == GRADIENT:
        return (
            f"In step {step}, {rank} used a different gradient than rank 0 ({tensor}): it was not averaged over the "
            "ranks. Wrap the model in DistributedDataParallel and call the wrapped model, not its module; leave "
            "no_sync() before the last backward pass of a step."
        )
    if phase == RATES:
        return f"In step {step}, {rank} used a different learning rate than rank 0."
    return (
        f"In step {step}, {rank} computed different weights than rank 0 ({tensor}) from the same gradient: its "
        "optimizer has a different state or different settings."
    )


def explain_difference(at: TraceDifference, one: RecordedUpdates, many: RecordedUpdates, num_ranks: int) -> str:
    """Return the likely cause of the first difference between one process and several."""
    if many.disagreement is None or many.disagreement.at.step > at.step:
        return _explain_phase(at, one, many, num_ranks)
    cause = explain_disagreement(many.disagreement, num_ranks)
    return f"{_explain_rows(at, one, many, num_ranks)} {cause}" if at.phase == ROWS else cause


def _explain_phase(at: TraceDifference, one: RecordedUpdates, many: RecordedUpdates, num_ranks: int) -> str:
    """Return the cause by the phase that differs, if all ranks agree with each other."""
    if at.phase == START:
        return (
            "The weights differ before the first step. Call torch.manual_seed(…) with a constant on every rank before "
            "the model is created, and make sure that no random draw before it depends on the number of processes."
        )
    if at.phase == ROWS:
        return _explain_rows(at, one, many, num_ranks)
    if at.phase == GRADIENT:
        return _explain_gradient(at, one, many, num_ranks)
    if at.phase == RATES:
        return (
            "The learning rate depends on the number of processes. That may be intended if the batch grows with them, "
            "but the same batch gives the same result only with the same learning rate."
        )
    if at.phase == WEIGHTS:
        return (
            "The same gradient and learning rate gave different weights: the optimizer has different settings, or "
            "depends on the rank or the process."
        )
    assert at.phase == BUFFERS
    return (
        "Gradients and weights are the same, but a buffer is not. Batch norm's statistics come from rank 0's part of "
        "the batch; nn.SyncBatchNorm.convert_sync_batchnorm(model) computes them over all processes."
    )


def _explain_rows(at: TraceDifference, one: RecordedUpdates, many: RecordedUpdates, num_ranks: int) -> str:
    own, theirs = one.num_rows(at.step), many.num_rows(at.step)
    ranks = many.rows[at.step - 1]
    if own and all(sorted(rows) == sorted(one.rows[at.step - 1][0]) for rows in ranks):
        return (
            f"Each of the {num_ranks} processes was given the same {own} rows as the single process: the work is "
            "repeated, not shared. Give the DataLoader a DistributedSampler."
        )
    if own != theirs:
        advice = _BATCH_ADVICE.format(rows=theirs)
        return (
            f"In step {at.step}, one process was given {own} rows and {num_ranks} processes {theirs} in total. {advice}"
        )
    shared = (one.all_rows(at.step) & many.all_rows(at.step)).total()
    if shared == 0:
        return (
            f"None of the {own} rows are the same: the samples come in a different order, or their augmentation or "
            "noise is drawn from a stream that is seeded by the rank, or not seeded."
        )
    if at.tensor == THE_ROWS and at.step == 1:
        return (
            f"Only {shared} of {own} rows are the same. The order of the samples depends on the number of processes, "
            "or the random draws for some of them do."
        )
    return f"Only {shared} of {own} rows are the same: the order of the samples depends on the number of processes."


def _explain_gradient(at: TraceDifference, one: RecordedUpdates, many: RecordedUpdates, num_ranks: int) -> str:
    all_files = one.rank_0.values(at.step), many.rank_0.values(at.step)
    gap, alignment = largest_gap(GRADIENT, *all_files), alignment_of(GRADIENT, *all_files)
    if gap is None:
        return "One process has gradients for different parameters than several processes."
    if gap.relative <= ROUNDING:
        return _rounding(one, many, num_ranks)
    has_rows = one.num_rows(at.step) > 0
    if alignment is not None and alignment.is_only_scaled:
        return (
            f"The gradient of {num_ranks} processes has the same direction as that of one process, but "
            f"{alignment.scale:.4g} times its length: the loss is averaged over a different number of samples, or "
            "gradients are summed over the ranks instead of averaged. DistributedDataParallel averages over ranks: on "
            "each rank, the loss must be a mean over its own rows."
        )
    if not has_rows:
        return (
            "This is far more than rounding. The model's inputs could not be observed; most likely the global batch is "
            "not the same. " + _BATCH_ADVICE.format(rows="…")
        )
    if gap.relative <= COARSE_ROUNDING and many.layers:
        return _layers(many) + " Or this is rounding of bf16, fp16 or TF32."
    if gap.relative <= COARSE_ROUNDING:
        excess = "This is more than fp32 rounding, and about as much as rounding of bf16, fp16 or TF32."
        return f"{excess} {_rounding(one, many, num_ranks)}"
    if many.layers:
        return _layers(many)
    return (
        "The same rows gave a different gradient, by far more than rounding. The loss may be a mean of means over "
        "parts of unequal size, the labels may not belong to the rows, or the forward pass depends on the rank."
    )


def _rounding(one: RecordedUpdates, many: RecordedUpdates, num_ranks: int) -> str:
    last = min(one.num_updates, many.num_updates)
    gap = largest_gap(WEIGHTS, one.rank_0.values(last), many.rank_0.values(last))
    grown = "" if gap is None else f" After step {last} the weights differ {gap}."
    rounding = (
        "This is rounding: the same data gave the same gradient, except for its last digits. Several processes sum in "
        "a different order than one, and multiply smaller matrices."
    )
    beyond = _first_beyond_rounding(one, many)
    if beyond is not None:
        phase = beyond.phase if beyond.phase != ROWS else "data"
        why = explain_difference(beyond, one, many, num_ranks)
        return f"{rounding} But step {beyond.step} has a larger difference, in its {phase}: {why}{grown}"
    return (
        f"{rounding} The script is correct; still, its result depends on the number of processes.{grown} A loop with "
        "lockstep.Run gives the same bits on any number of processes."
    )


def _first_beyond_rounding(one: RecordedUpdates, many: RecordedUpdates) -> TraceDifference | None:
    """Find the first difference in rows, gradients or rates; not in weights: optimizers can amplify tiny gradients."""
    ours, theirs = read_trace(one.trace), read_trace(many.trace)
    for step in sorted(ours.keys() & theirs.keys()):
        for phase in (ROWS, GRADIENT, RATES):
            own, other = ours[step][phase], theirs[step][phase]
            names = [name for name in own if own[name] != other.get(name)]
            if not names:
                continue
            gap = largest_gap(GRADIENT, one.rank_0.values(step), many.rank_0.values(step))
            if phase != GRADIENT or (gap is not None and gap.relative > COARSE_ROUNDING):
                return TraceDifference(step, phase, names[0], len(names))
    return None


def _layers(many: RecordedUpdates) -> str:
    norms = [layer for layer in many.layers if "BatchNorm" in layer and "Sync" not in layer]
    drops = [layer for layer in many.layers if "Dropout" in layer]
    lines = ["The same rows gave a different gradient, by more than rounding."]
    if norms:
        lines.append(
            f"The model has {', '.join(norms)}, which sees only a process's own part of the batch: "
            "nn.SyncBatchNorm.convert_sync_batchnorm(model) makes it see the whole batch."
        )
    if drops:
        lines.append(f"It has {', '.join(drops)}: every process draws its dropout masks from its own random stream.")
    return " ".join(lines)
