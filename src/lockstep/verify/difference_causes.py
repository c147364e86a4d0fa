"""Explain why a script with its own training loop gives a different result on several processes."""

import math

from lockstep.config.plurals import count_noun
from lockstep.events.step_trace import TraceDifference
from lockstep.supervision.step_recorder import BUFFERS, GRADIENT, RANDOM_NUMBERS, RATES, ROWS, START, WEIGHTS
from lockstep.verify.recorded_updates import (
    THE_ROWS,
    UPDATE_PHASES,
    RankDisagreement,
    RecordedUpdates,
)
from lockstep.verify.row_matching import differ_only_in_padding
from lockstep.verify.update_judgement import LOW_PRECISION_ROUNDING, ROUNDING, Judgement
from lockstep.verify.value_comparison import UpdateValues, alignment_of, relative_distance
from lockstep.verify.verify_verdict import END_OF_RUN

_BATCH_ADVICE = (
    "Compare equal global batches: most scripts take --batch-size per process. Give the single process as many rows as "
    'all processes have together, with --one-args "--batch-size {rows}" or whatever the script calls it.'
)
_AMPLIFIED = (
    "training has amplified rounding so far that it would hide a mistake in values: compare fewer --steps, in fp32, to "
    "be sure."
)
_NO_ROWS = (
    "The samples were not compared: the first dimension of the model's inputs is not that of the samples, since other "
    "rows gave the same gradient."
)
_PADDING_ADVICE = (
    "Each batch is padded to its own longest row, and a process has only its part of the batch: pad to a fixed length "
    "or to a multiple that all batches share."
)


def explain_disagreement(disagreement: RankDisagreement, num_ranks: int) -> str:
    """Return the likely cause of a difference between the ranks of one job."""
    step, phase, tensor, _ = disagreement.at
    rank = f"rank {disagreement.rank} of {num_ranks}"
    if phase == START and step > 1:
        return (
            f"Between step {step - 1} and step {step}, something other than the optimizer changed the weights of "
            f"{rank} ({tensor}), and those of rank 0 not in the same way. Do the same on all ranks: look for code that "
            "depends on the rank, and for random numbers."
        )
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
        return f"In step {step}, {rank} did not use the same {_setting(tensor)} as rank 0."
    return (
        f"In step {step}, {rank} computed different weights than rank 0 ({tensor}) from the same gradient: its "
        "optimizer has a different state or different settings."
    )


def explain_rounding(one: RecordedUpdates, many: RecordedUpdates, judgement: Judgement) -> str:
    """Say what it means that the jobs differ by rounding alone, and what was not compared."""
    last = min(one.num_updates, many.num_updates)
    apart = relative_distance(_values(last, one, many).pairs(WEIGHTS).values())
    grown = f", and after step {last} the weights differ by {apart:.2g} of their norm" if math.isfinite(apart) else ""
    first = relative_distance(_values(1, one, many).pairs(GRADIENT).values())
    large = ""
    if not many.has_low_precision and first > ROUNDING:
        large = (
            f" It is large for fp32: in step 1 the gradient differs by {first:.2g} of its norm, usually by less than "
            f"{ROUNDING:g}. Check the loss: is it a mean over the rows of all processes?"
        )
    coarse = ""
    if many.has_low_precision:
        coarse = " (as far as can be told in bf16, fp16 or TF32, in which it is large: fp32 shows more)"
    padded = [step for step in range(1, last + 1) if _is_padded_otherwise(step, one, many)]
    return (
        f"This is rounding{coarse}: several processes sum in a different "
        f"order than one, and multiply smaller matrices. In {count_noun(last, 'step')} nothing else was found to "
        f"differ{grown}.{large}"
        + (f" In step {padded[0]}, the rows are the same but padded differently. {_PADDING_ADVICE}" if padded else "")
        + ("" if judgement.amplified_at is None else f" From step {judgement.amplified_at} on, {_AMPLIFIED}")
        + ("" if judgement.compares_rows else f" {_NO_ROWS}")
        + " A loop with lockstep.Run gives the same bits on any number of processes."
    )


def explain_difference(at: TraceDifference, one: RecordedUpdates, many: RecordedUpdates, num_ranks: int) -> str:
    """Return the likely cause of the first difference that is more than rounding, between the jobs or the ranks."""
    if at.phase == END_OF_RUN:
        return _explain_counts(one, many, num_ranks)
    disagreement = many.disagreement
    if disagreement is None or disagreement.at.step > at.step:
        return _explain_phase(at, one, many, num_ranks)
    cause = explain_disagreement(disagreement, num_ranks)
    if at.phase == ROWS:  # two mistakes: other rows, and ranks that compute something else from them
        return f"{_explain_rows(at, one, many, num_ranks)} {cause}"
    is_later = disagreement.at.step == at.step and _place(disagreement.at) > _place(at)
    return _explain_phase(at, one, many, num_ranks) if is_later else cause


def _explain_phase(at: TraceDifference, one: RecordedUpdates, many: RecordedUpdates, num_ranks: int) -> str:
    """Return the cause by the phase that differs, if all ranks agree with each other."""
    if at.phase == START and at.step > 1:
        return (
            f"Between step {at.step - 1} and step {at.step}, something other than the optimizer changed the weights, "
            "and not in the same way on one process: look for code that depends on the number of processes, and for "
            "random numbers."
        )
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
        setting = _setting(at.tensor)
        return (
            f"The {setting} depends on the number of processes. That may be intended if the batch grows with them, "
            f"but the same batch gives the same result only with the same {setting}."
        )
    if at.phase == WEIGHTS:
        return (
            "The same gradient and learning rate changed the weights differently: the optimizer has different "
            "settings (do they depend on the number of processes?), or draws random numbers."
        )
    assert at.phase == BUFFERS
    return (
        "Gradients and weights are the same, but a buffer is not. Batch norm's statistics come from rank 0's part of "
        "the batch; nn.SyncBatchNorm.convert_sync_batchnorm(model) computes them over all processes."
    )


def _explain_rows(at: TraceDifference, one: RecordedUpdates, many: RecordedUpdates, num_ranks: int) -> str:
    own, theirs = one.num_rows(at.step), many.num_rows(at.step)
    if many.is_work_repeated(one, at.step):
        return (
            f"Each of the {num_ranks} processes was given the same {own} rows as the single process: the work is "
            "repeated, not shared. Give the DataLoader a DistributedSampler."
        )
    if own != theirs:
        given = (
            f"In step {at.step}, one process was given {count_noun(own, 'row')} and {num_ranks} processes {theirs} in "
            "total"
        )
        if at.step > 1 and 0 < theirs - own < num_ranks:
            return (
                f"{given}: a DistributedSampler repeats samples until all processes have equally many. Train on a "
                f"number of samples that {num_ranks} divides, or leave out the last ones with drop_last=True in the "
                "sampler."
            )
        if at.step > 1:
            return f"{given}; before that, equally many: the epochs have different lengths (drop_last, or the sampler)."
        return f"{given}. {_BATCH_ADVICE.format(rows=theirs)}"
    shared = (one.all_rows(at.step) & many.all_rows(at.step)).total()
    if shared == 0:
        return (
            f"None of the {own} rows are the same: the samples come in a different order (shuffle=True and a "
            "DistributedSampler draw different ones: use the sampler on one process too), or their augmentation or "
            "noise is drawn from a stream that is seeded by the rank, or not seeded."
        )
    if at.tensor == THE_ROWS and at.step == 1:
        return (
            f"Only {shared} of {own} rows are the same. The order of the samples depends on the number of processes, "
            "or the random draws for some of them do."
        )
    return f"Only {shared} of {own} rows are the same: the order of the samples depends on the number of processes."


def _explain_gradient(at: TraceDifference, one: RecordedUpdates, many: RecordedUpdates, num_ranks: int) -> str:
    values = _values(at.step, one, many)
    pairs = values.pairs(GRADIENT).values()
    apart, alignment = relative_distance(pairs), alignment_of(pairs)
    if not values.has_same_tensors(GRADIENT):
        return "One process has gradients for different parameters than several processes."
    if alignment is not None and alignment.is_only_scaled:
        return (
            f"The gradient of {num_ranks} processes has the same direction as that of one process, but "
            f"{alignment.scale:.4g} times its length: the loss is averaged over a different number of samples, or "
            "gradients are summed over the ranks instead of averaged. DistributedDataParallel averages over ranks: on "
            "each rank, the loss must be a mean over its own rows."
        )
    if one.num_rows(at.step) == 0:
        return (
            "This is far more than rounding. The model's inputs could not be observed; most likely the global batch is "
            "not the same. " + _BATCH_ADVICE.format(rows="…")
        )
    counts = [len(rows) for rows in many.rows[at.step - 1]]
    if len(set(counts)) > 1:
        return (
            f"The ranks were given {', '.join(str(count) for count in counts[:-1])} and {counts[-1]} rows, and a mean "
            "over the ranks of each rank's mean loss is not the mean over all rows: divide the sum of each rank's loss "
            "by the rows of all ranks, and multiply it by the number of ranks."
        )
    if _is_padded_otherwise(at.step, one, many):
        return (
            "The same rows gave a different gradient, by more than rounding, and they are padded differently. "
            f"{_PADDING_ADVICE} If the gradient still differs, mask the padding, in the loss too."
        )
    if many.layers:
        is_small = many.has_low_precision and apart < LOW_PRECISION_ROUNDING
        return _layers(many) + (" Or this is rounding of bf16, fp16 or TF32." if is_small else "")
    return (
        "The same rows gave a different gradient, by far more than rounding. The loss may be a mean of means over "
        "parts of unequal size (of rows, tokens or pixels), the labels may not belong to the rows, or the forward pass "
        "depends on the rank."
    )


def _setting(tensor: str) -> str:
    """Return the name of an optimizer's setting, without the number of its group."""
    return tensor.rpartition(" ")[0]


def _place(difference: TraceDifference) -> int:
    return UPDATE_PHASES.index(difference.phase)


def _explain_counts(one: RecordedUpdates, many: RecordedUpdates, num_ranks: int) -> str:
    counts = many.updates_by_rank
    if len(set(counts)) > 1:
        made = ", ".join(f"rank {rank} made {count}" for rank, count in enumerate(counts))
        return (
            f"The ranks of one job made different numbers of steps ({made}): share the samples equally, and decide "
            "when to stop from a value that is the same on all ranks, such as one that was broadcast."
        )
    return (
        f"One process made {count_noun(one.num_updates, 'step')} and {num_ranks} processes {counts[0]}: the number of "
        "batches, or of epochs, depends on the number of processes."
    )


def _values(step: int, one: RecordedUpdates, many: RecordedUpdates) -> UpdateValues:
    return UpdateValues(one.rank_0.values(step), many.rank_0.values(step))


def _is_padded_otherwise(step: int, one: RecordedUpdates, many: RecordedUpdates) -> bool:
    is_same = one.all_rows(step) == many.all_rows(step)
    return not is_same and differ_only_in_padding(one.rows_of(step), many.rows_of(step))


def _layers(many: RecordedUpdates) -> str:
    norms = [layer for layer in many.layers if "BatchNorm" in layer]
    drops = [layer for layer in many.layers if "BatchNorm" not in layer and layer != RANDOM_NUMBERS]
    lines = ["The same rows gave a different gradient, by more than rounding."]
    if norms:
        lines.append(
            f"The model has {', '.join(norms)}, which sees only a process's own part of the batch: "
            "nn.SyncBatchNorm.convert_sync_batchnorm(model) makes it see the whole batch."
        )
    if drops:
        lines.append(f"It has {', '.join(drops)}: every process draws its dropout masks from its own random stream.")
    elif RANDOM_NUMBERS in many.layers:
        lines.append(
            "The model draws random numbers (by torch.nn.functional.dropout or as noise, for example): every process "
            "draws them from its own random stream."
        )
    return " ".join(lines)
