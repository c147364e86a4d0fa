"""Mistakes with a `Trainer` and its callbacks."""

from tests.contracts.mistakes.mistake import TASK, Mistake

SCRIPT = (
    TASK
    + """

def main(world):
    run = lockstep.Run("runs/mine", world)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,))), batch_size=16)
    trainer = lockstep.Trainer({trainer})
    trainer.train({train})
    {after}


if __name__ == "__main__":
    lockstep.launch(main)
"""
)


def trainer_script(trainer: str = "", train: str = "loader, loader, epochs=1", after: str = "pass") -> str:
    arguments = "model, optimizer, loss, accuracy, " + (trainer or "run=run")
    return SCRIPT.format(trainer=arguments, train=train, after=after)


MISTAKES = [
    Mistake(
        "the best checkpoint without a folder",
        script=trainer_script("callbacks=[lockstep.SaveBest('accuracy', 'max')]"),
        says=r"SaveBest\('accuracy', …\) needs a folder to save to: Trainer\(…, folder=…\)",
    ),
    Mistake(
        "a metric that does not exist",
        script=trainer_script("run=run, callbacks=[lockstep.EarlyStopping('f1', 'max', patience=2)]"),
        says=r"no metric is called 'f1'; known: accuracy",
    ),
    Mistake(
        "neither epochs nor steps for a trainer",
        script=trainer_script(train="loader"),
        says=r"give epochs= or steps=",
    ),
    Mistake(
        "early stopping without a validation set",
        script=trainer_script("run=run, callbacks=[lockstep.EarlyStopping('accuracy', 'max', 2)]", "loader, epochs=1"),
        says=r"EarlyStopping\('accuracy', …\) needs evaluations: trainer\.train\(train_loader, val_loader, …\)",
    ),
    Mistake(
        "a callback's class",
        script=trainer_script("run=run, callbacks=[lockstep.Callback]"),
        says=r"callbacks=… takes a list of callbacks, .*, not <class '.*Callback'>",
    ),
    Mistake(
        "a data set to train on",
        script=trainer_script(train="loader.dataset, epochs=1"),
        says=r"trainer\.train\(TensorDataset, …\): make the loader with run\.loader\(dataset, global_batch=…\)",
    ),
    Mistake(
        "a model without a loss of its own",
        script=trainer_script(after="lockstep.Trainer(model, optimizer).train(loader, epochs=1)"),
        says=r"the batch goes to Linear\.forward\(\*batch\) with 2, .*: give the trainer a loss\(model, batch\)",
    ),
    Mistake(
        "a run and a folder",
        script=trainer_script("run=run, folder='runs/other'"),
        says=r"Trainer: give either run=, or folder= and device=: a run has its own",
    ),
    Mistake(
        "an average of nobody's",
        script=trainer_script("run=run, ema=lockstep.Run(None, world).ema(model)"),
        says=r"call run\.prepare\(model\) before run\.ema\(model\)",
    ),
    Mistake(
        "a decay in place of an average",
        script=trainer_script("run=run, ema=0.999"),
        says=r"ema= takes what run\.ema\(model, decay\) returns: no update of this run would move this float",
    ),
    Mistake(
        "a log after the trainer has finished its run",
        script=trainer_script(after="run.log(accuracy=0.5)"),
        says=r"run\.log\(…\) after the run's end: give finish=False to run\.steps or trainer\.train",
    ),
    Mistake(
        "evaluations that are never due",
        script=trainer_script(train="loader, loader, epochs=1, evaluate_every=0"),
        says=r"evaluate_every=0: expected a duration greater than 0",
    ),
]
