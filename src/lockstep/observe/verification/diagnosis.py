"""Why a script with a loop of its own computes something else on several processes: from evidence to plain words."""

from lockstep.events.trace import Difference, read_trace
from lockstep.observe.verification.gap import COARSE_ROUNDING, ROUNDING, gap_in, tilt_in
from lockstep.observe.verification.updates import THE_ROWS, Discord, Updates
from lockstep.supervision.updates import BUFFERS, GRADIENT, RATES, ROWS, START, WEIGHTS

_BATCH_ADVICE = (
    "Compare equal global batches: most scripts take --batch-size for each process. Give the one process as many rows "
    'as all of them have together, by --one-args "--batch-size {rows}" or whatever the script calls it.'
)


def explain_discord(discord: Discord, num_ranks: int) -> str:
    step, phase, tensor, _ = discord.at
    if phase == START:
        return (
            f"Rank {discord.rank} of {num_ranks} did not even begin with rank 0's weights ({tensor}), and nothing made "
            "them equal: wrap the model in DistributedDataParallel, which also averages the gradients."
        )
    if phase == GRADIENT:
        return (
            f"In step {step}, rank {discord.rank} of {num_ranks} used another gradient than rank 0 ({tensor}): it was "
            "not averaged over the ranks. Wrap the model in DistributedDataParallel and call the wrapped model, not "
            "its module; leave no_sync() before the last backward pass of a step."
        )
    if phase == RATES:
        return f"In step {step}, rank {discord.rank} of {num_ranks} used another learning rate than rank 0."
    return (
        f"In step {step}, rank {discord.rank} of {num_ranks} came to other weights than rank 0 ({tensor}) by the same "
        "gradient: its optimizer has another state or other settings."
    )


def explain(at: Difference, one: Updates, many: Updates, num_ranks: int) -> str:
    """The likely cause of the first difference between one process and several."""
    if many.discord is None or many.discord.at.step > at.step:
        return _explain_agreed(at, one, many, num_ranks)
    told = explain_discord(many.discord, num_ranks)
    return f"{_explain_rows(at, one, many, num_ranks)} {told}" if at.phase == ROWS else told


def _explain_agreed(at: Difference, one: Updates, many: Updates, num_ranks: int) -> str:
    """Where the ranks have come to the same among themselves."""
    if at.phase == START:
        return (
            "The weights are not the same before the first step. Call torch.manual_seed(…) with a constant before the "
            "model is made, on every rank, and let nothing that is drawn before it depend on the number of processes."
        )
    if at.phase == ROWS:
        return _explain_rows(at, one, many, num_ranks)
    if at.phase == GRADIENT:
        return _explain_gradient(at, one, many, num_ranks)
    if at.phase == RATES:
        return (
            "The learning rate depends on the number of processes. That can be meant, where the batch grows with them; "
            "for the same result from the same batch it must not."
        )
    if at.phase == WEIGHTS:
        return (
            "The same gradient and learning rate left other weights: the optimizer has other settings, or depends on "
            "the rank or the process."
        )
    assert at.phase == BUFFERS
    return (
        "Gradients and weights are the same, a buffer is not. Batch norm's statistics are those of rank 0's part of "
        "the batch; nn.SyncBatchNorm.convert_sync_batchnorm(model) takes them over all processes."
    )


def _explain_rows(at: Difference, one: Updates, many: Updates, num_ranks: int) -> str:
    own, theirs = one.num_rows(at.step), many.num_rows(at.step)
    ranks = many.rows[at.step - 1]
    if own and all(sorted(rows) == sorted(one.rows[at.step - 1][0]) for rows in ranks):
        return (
            f"Every one of the {num_ranks} processes was given the same {own} rows as the one: the work is repeated, "
            "not shared. Give the DataLoader a DistributedSampler."
        )
    if own != theirs:
        advice = _BATCH_ADVICE.format(rows=theirs)
        return f"One process was given {own} rows in step {at.step}, {num_ranks} together {theirs}. {advice}"
    shared = (one.all_rows(at.step) & many.all_rows(at.step)).total()
    if shared == 0:
        return (
            f"Of {own} rows, none is the same: the samples come in another order, or what is drawn for them "
            "(augmentation, noise) comes from a stream that is seeded by the rank or not at all."
        )
    if at.tensor == THE_ROWS and at.step == 1:
        return (
            f"Of {own} rows, {shared} are the same. The order of the samples depends on the number of processes, or "
            "what is drawn for some of them does."
        )
    return f"Of {own} rows, {shared} are the same: the order of the samples depends on the number of processes."


def _explain_gradient(at: Difference, one: Updates, many: Updates, num_ranks: int) -> str:
    places = one.rank_0.values(at.step), many.rank_0.values(at.step)
    gap, tilt = gap_in(GRADIENT, *places), tilt_in(GRADIENT, *places)
    if gap is None:
        return "One of them has gradients for other parameters than the other."
    if gap.relative <= ROUNDING:
        return _rounding(one, many, num_ranks)
    is_seen = one.num_rows(at.step) > 0
    if tilt is not None and tilt.is_scaled_alone:
        return (
            f"The gradient of {num_ranks} processes has the direction of the one's and {tilt.scale:.4g} times its "
            "length: the loss is averaged over another number of samples, or gradients are added up over the ranks "
            "instead of averaged. DistributedDataParallel averages over ranks: on each, the loss must be a mean over "
            "its own rows."
        )
    if not is_seen:
        return (
            "This is far more than rounding. What the model is given could not be seen; most likely it is not the same "
            "global batch. " + _BATCH_ADVICE.format(rows="…")
        )
    if gap.relative <= COARSE_ROUNDING:
        return (
            "This is more than fp32 rounds by, and about what bf16, fp16 or TF32 do. " + _rounding(one, many, num_ranks)
            if not many.layers
            else _layers(many) + " Or it is the rounding of bf16, fp16 or TF32."
        )
    if many.layers:
        return _layers(many)
    return (
        "The same rows gave another gradient, by far more than rounding. The loss may be a mean of means over parts of "
        "unequal size, the labels may not be those of the rows, or the forward pass depends on the rank."
    )


def _rounding(one: Updates, many: Updates, num_ranks: int) -> str:
    last = min(one.num_made, many.num_made)
    gap = gap_in(WEIGHTS, one.rank_0.values(last), many.rank_0.values(last))
    grown = "" if gap is None else f" After step {last} the weights differ {gap}."
    told = (
        "This is rounding: the same data gave the same gradient, but for its last digits. Several processes add up in "
        "another order than one, and multiply smaller matrices."
    )
    beyond = _first_beyond_rounding(one, many)
    if beyond is not None:
        phase = beyond.phase if beyond.phase != ROWS else "data"
        why = explain(beyond, one, many, num_ranks)
        return f"{told} But in step {beyond.step} comes more, in its {phase}: {why}{grown}"
    return (
        f"{told} The script is right; its result depends on the number of processes all the same.{grown} A loop of "
        "lockstep's (lockstep.Run) keeps every bit."
    )


def _first_beyond_rounding(one: Updates, many: Updates) -> Difference | None:
    """Other rows, rates or gradients. Weights say less: an optimizer can make much of an almost vanishing gradient."""
    ours, theirs = read_trace(one.trace), read_trace(many.trace)
    for step in sorted(ours.keys() & theirs.keys()):
        for phase in (ROWS, GRADIENT, RATES):
            own, other = ours[step][phase], theirs[step][phase]
            names = [name for name in own if own[name] != other.get(name)]
            if not names:
                continue
            gap = gap_in(GRADIENT, one.rank_0.values(step), many.rank_0.values(step))
            if phase != GRADIENT or (gap is not None and gap.relative > COARSE_ROUNDING):
                return Difference(step, phase, names[0], len(names))
    return None


def _layers(many: Updates) -> str:
    norms = [layer for layer in many.layers if "BatchNorm" in layer and "Sync" not in layer]
    drops = [layer for layer in many.layers if "Dropout" in layer]
    told = ["The same rows gave another gradient, by more than rounding."]
    if norms:
        told.append(
            f"The model has {', '.join(norms)}, which sees only a process's own part of the batch: "
            "nn.SyncBatchNorm.convert_sync_batchnorm(model) has it see all of it."
        )
    if drops:
        told.append(f"It has {', '.join(drops)}: every process draws what is dropped from a stream of its own.")
    return " ".join(told)
