"""Mistakes in the loss function and in what a model does in its forward pass."""

from tests.contracts.mistakes.mistake import Mistake, training_script


def loss_script(returned: str, **parts: str) -> str:
    """Return a script whose loss function returns this."""
    function = (
        f"def wrong(model, batch):\n    inputs, labels = batch\n    outputs = model(inputs)\n    return {returned}"
    )
    parts.setdefault("body", "step.accumulate(wrong, model)\nstep.update(optimizer)")
    return training_script(before=function, **parts)


COUNTING = """
class Counting(nn.Linear):
    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs) * (1 + 0.01 * self.calls)
"""
CARRYING = """
class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out, self.hidden = nn.GRUCell(8, 4), nn.Linear(4, 3), None

    def forward(self, inputs):
        self.hidden = self.cell(inputs, None if self.hidden is None else self.hidden.detach())
        return self.out(self.hidden)
"""
CACHING = """
class Caching(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)
        self.register_buffer("mask", None, persistent=False)

    def forward(self, inputs):
        if self.mask is None:
            self.mask = torch.ones(8, device=inputs.device)
        return super().forward(inputs * self.mask)
"""
REGISTERING = """
class Registering(nn.Linear):
    def forward(self, inputs):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(8, device=inputs.device))
        return super().forward(inputs * self.mask)
"""
DRAWING = """
class Drawing(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, inputs):
        noise = torch.randn(inputs.shape, generator=self.generator)
        return super().forward(inputs + noise.to(inputs.device))
"""

NOT_DETERMINISTIC = """
torch.use_deterministic_algorithms(True)  # on a GPU, lockstep does this


def overwrite(values):
    return torch.zeros_like(values).put_(torch.arange(values.numel(), device=values.device), values.flatten())


class OverwriteGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        return overwrite(gradient)


class Forward(nn.Linear):
    def forward(self, inputs):
        return super().forward(overwrite(inputs))


class Backward(nn.Linear):
    def forward(self, inputs):
        return OverwriteGradient.apply(super().forward(inputs))
"""

MISTAKES = [
    Mistake(
        "a mean with a count",
        script=loss_script("F.cross_entropy(outputs, labels), len(labels)"),
        says=r"the loss is a mean over the batch, given with a count of 4, so it would be divided twice",
    ),
    Mistake(
        "a mean with label smoothing and a count",
        script=loss_script("F.cross_entropy(outputs, labels, label_smoothing=0.1), len(labels)"),
        says=r"the loss is a mean over the batch, given with a count of 4",
    ),
    Mistake(
        "a mean of squares as one of several terms",
        script=loss_script(
            "{'ce': (F.cross_entropy(outputs, labels, reduction='sum'), 4), 'l2': (outputs.square().mean(), 4)}"
        ),
        says=r"the loss term 'l2' is a mean over the batch, given with a count of 4",
    ),
    Mistake(
        "a negative mean of log-probabilities",
        script=loss_script("-torch.distributions.Categorical(logits=outputs).log_prob(labels).mean(), len(labels)"),
        says=r"the loss is a mean over the batch, given with a count of 4",
    ),
    Mistake(
        "a weighted sum of means",
        script=loss_script("F.cross_entropy(outputs, labels) + 0.1 * outputs.square().mean(), len(labels)"),
        says=r"the loss is a mean over the batch, given with a count of 4",
    ),
    Mistake(
        "a sum of the samples' own means",
        script=loss_script(
            "sum(F.cross_entropy(a[None], b[None]) for a, b in zip(outputs, labels)), len(labels)",
            after="print('trained', step.number)",
        ),
        code=0,
        says=r"^trained 4$",
    ),
    Mistake(
        "torch's loss in place of a loss function",
        script=training_script(body="step.accumulate(nn.CrossEntropyLoss(), model)\nstep.update(optimizer)"),
        says=r"CrossEntropyLoss takes outputs and labels: write a function loss\(model, batch\)",
    ),
    Mistake(
        "a mean alone",
        script=loss_script("F.cross_entropy(outputs, labels)"),
        says=r"a loss is a sum and a count, .* not a tensor of shape \(\): return the sum",
    ),
    Mistake(
        "the losses of single samples",
        script=loss_script("F.cross_entropy(outputs, labels, reduction='none'), len(labels)"),
        says=r"the loss's sum has the shape \(4,\): return one number, as reduction='sum' or loss\.sum\(\) gives",
    ),
    Mistake(
        "a float",
        script=loss_script("F.cross_entropy(outputs, labels, reduction='sum').item(), len(labels)"),
        says=r"the loss's sum is a float: return the tensor that the loss function computed, without \.item\(\)",
    ),
    Mistake(
        "a detached loss",
        script=loss_script("F.cross_entropy(outputs.detach(), labels, reduction='sum'), len(labels)"),
        says=r"the loss does not depend on any parameter that is trained",
    ),
    Mistake(
        "outputs before the loss, as models return them",
        script=loss_script("outputs, F.cross_entropy(outputs, labels, reduction='sum')"),
        says=r"the loss's sum has the shape \(4, 3\): return one number",
    ),
    Mistake(
        "three values",
        script=loss_script("F.cross_entropy(outputs, labels, reduction='sum'), len(labels), outputs"),
        says=r"the loss is a sum and a count, \(sum, count\), not a tuple of 3",
    ),
    Mistake(
        "terms without counts",
        script=loss_script("{'ce': F.cross_entropy(outputs, labels, reduction='sum')}"),
        says=r"the loss term 'ce' is a sum and a count, \(sum, count\), not a tensor of shape \(\)",
    ),
    Mistake(
        "a count of zero",
        script=loss_script("F.cross_entropy(outputs, labels, reduction='sum'), 0"),
        says=r"the loss is not zero, but its count is 0: return how many losses were summed",
    ),
    Mistake(
        "a count for each sample",
        script=loss_script("F.cross_entropy(outputs, labels, reduction='sum'), torch.ones(4)"),
        says=r"a loss's count is a number or a tensor of one element, not tensor",
    ),
    Mistake(
        "a loss that turns into NaN",
        script=loss_script("(outputs - outputs).sum().log() * 0, len(labels)"),
        code=3,
        says=r"lockstep: step 1: the loss is not finite in lane 0 \(rank 0\)",
    ),
    Mistake(
        "padding without weights",
        script=loss_script(
            "F.cross_entropy(outputs, labels, reduction='sum'), len(labels)",
            loader="run.loader(data, global_batch=24, lanes=4, tail='pad')",
        ),
        says=r"tail=pad adds samples of weight zero, so the loss must take weights: loss\(model, batch, weight\)",
    ),
    Mistake(
        "a forward pass without a deterministic kernel",
        script=training_script(before=NOT_DETERMINISTIC, model="Forward(8, 3)"),
        says=r"put_, which the model or its loss uses, has no deterministic kernel, .* with determinism=\"fast\"",
    ),
    Mistake(
        "a backward pass without a deterministic kernel",
        script=training_script(before=NOT_DETERMINISTIC, model="Backward(8, 3)"),
        says=r"put_, which the model or its loss uses, has no deterministic kernel",
    ),
    Mistake(
        "a counter in the model",
        script=training_script(before=COUNTING, model="Counting(8, 3)"),
        says=r"the forward pass depends on the model's attribute calls, which it changes: .* make it a buffer",
    ),
    Mistake(
        "a hidden state that is carried from batch to batch",
        script=training_script(before=CARRYING, model="Carrying()"),
        says=r"the forward pass depends on the model's attribute hidden, which it changes",
    ),
    Mistake(
        "a buffer that is filled by the first batch",
        script=training_script(before=CACHING, model="Caching()"),
        says=r"the forward pass makes or resizes the buffer mask, so no checkpoint would fit .*: make it in __init__",
    ),
    Mistake(
        "an empty buffer with a rule",
        script=training_script(
            before=CACHING, model="Caching()", run="None, world, buffers={'mask': 'first'}", steps="steps=2"
        ),
        says=r"the forward pass makes or resizes the buffer mask, so no checkpoint would fit .*: make it in __init__",
    ),
    Mistake(
        "a buffer that is registered by the first batch",
        script=training_script(before=REGISTERING, model="Registering(8, 3)"),
        says=r"the forward pass makes or resizes the buffer mask, so no checkpoint would fit .*: make it in __init__",
    ),
    Mistake(
        "spectral norm, of both kinds",
        script=training_script(
            model="nn.Sequential(\n        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), "
            "nn.utils.spectral_norm(nn.Linear(8, 3))\n    )",
            after="print('trained', step.number)",
        ),
        code=0,
        says=r"^trained 4$",
    ),
    Mistake(
        "a random generator of the model's own",
        script=training_script(before=DRAWING, model="Drawing()"),
        says=r"the forward pass depends on the model's attribute generator, which it changes",
    ),
    Mistake(
        "layers that normalise over all processes",
        script=training_script(model="nn.Sequential(nn.Linear(8, 3), nn.SyncBatchNorm(3))"),
        says=r"1 is a SyncBatchNorm, whose statistics depend on the number of processes",
    ),
]
