"""Mistakes with torch.compile, and uses of it that simply work."""

from tests.contracts.mistakes.mistake import Mistake, training_script

COMPILED = 'torch.compile(nn.Linear(8, 3), backend="eager")'

MISTAKES = [
    Mistake(
        "a compiled DistributedDataParallel",
        script=training_script(
            before="from torch.nn.parallel import DistributedDataParallel",
            run="None, world",
            model='torch.compile(DistributedDataParallel(nn.Linear(8, 3).to(world.device)), backend="eager")',
        ),
        command="lockstep run -n 1 train.py",
        says=r"compiled model contains a DistributedDataParallel, .*: compile the bare model, run\.prepare\(",
    ),
    Mistake(
        "a compiled run that continues without the compiler",
        script=training_script(
            before=f"""
def first(world):
    run = lockstep.Run("runs/mine", world, seed=7)
    model = run.prepare({COMPILED})
    optimizer = run.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    for step in run.steps(run.loader(data, global_batch=16, lanes=4), steps=2):
        step.accumulate(loss, model)
        step.update(optimizer)
""",
            run="(first(world), 'runs/mine')[1], world, seed=7",
        ),
        code=0,
        says=r"step-2 was saved with torch\.compile, and the run continues without: compiled kernels may round",
    ),
    Mistake(
        "the weights of a compiled run, loaded into a bare model",
        script=training_script(
            model=COMPILED,
            after="""
bare = nn.Linear(8, 3)
path = lockstep.export_weights("runs/mine", "model.pt")
bare.load_state_dict(torch.load(path, weights_only=True))
assert torch.equal(bare.weight, model.weight.cpu())
print("loaded", *torch.load(path, weights_only=True))
""",
        ),
        code=0,
        says=r"^loaded bias weight$",
    ),
    Mistake(
        "a prepared model that is prepared again after torch.compile",
        script=training_script(
            setup="""
model = run.prepare(torch.compile(model, backend="eager"))
""",
            after='print("digest of", *sorted({name.split("/")[0] for name in run.state()}))',
        ),
        code=0,
        says=r"^digest of model optimizer$",
    ),
]
