"""Mistakes in a loop over `run.steps(…)`, and in what is prepared for it."""

from tests.contracts.mistakes.mistake import Mistake, training_script

UNREGISTERED = "torch.optim.SGD(model.parameters(), lr=0.1)"

MISTAKES = [
    # The update
    Mistake(
        "an update before the lanes",
        script=training_script(body="step.update(optimizer)"),
        says=r"step\.update\(\) without gradients: run step\.accumulate",
    ),
    Mistake(
        "an optimizer that the run has not seen",
        script=training_script(optimizer=UNREGISTERED),
        says=r"step\.update\(SGD\): the run does not know it.*call optimizer = run\.optimizer\(model, optimizer\)",
    ),
    Mistake(
        "the optimizer given to run.optimizer and another to the update",
        script=training_script(
            setup=f"another = {UNREGISTERED}", body="step.accumulate(loss, model)\nstep.update(another)"
        ),
        says=r"step\.update\(SGD\): the run does not know it",
    ),
    Mistake(
        "an update without an optimizer",
        script=training_script(body="step.accumulate(loss, model)\nstep.update()"),
        says=r"step\.update\(\) updates nothing: give it the optimizers",
    ),
    Mistake(
        "no update at all",
        script=training_script(body="step.accumulate(loss, model)"),
        says=r"step 1 ended with gradients that no update has used: call step\.update",
    ),
    Mistake(
        "accumulation by hand",
        script=training_script(
            body="step.accumulate(loss, model)\nif step.number % 4 == 0:\n    step.update(optimizer)", steps="steps=12"
        ),
        says=r"step 1 ended with gradients .* make global_batch larger and cut it into more lanes",
    ),
    Mistake(
        "an update in every second step of some epochs",
        script=training_script(
            body="if step.batch.number % 2:\n    step.accumulate(loss, model)\n    step.update(optimizer)",
            steps="epochs=2",
        ),
        says=r"step 1 ended without an update: .* or step\.skip\(\)",
    ),
    Mistake(
        "every step skipped",
        script=training_script(body="step.skip()"),
        says=r"no step of an epoch made an update: steps=4 would never be reached",
    ),
    Mistake(
        "an update on one rank only",
        script=training_script(body="step.accumulate(loss, model)\nif world.is_main:\n    step.update(optimizer)"),
        command="lockstep run -n 2 train.py",
        says=r"step 1 ended with gradients that no update has used",
    ),
    Mistake(
        "optimizer.step() in place of the update",
        script=training_script(body="step.accumulate(loss, model)\noptimizer.step()\noptimizer.zero_grad()"),
        says=r"optimizer\.step\(\) inside a step: step\.update\(optimizer\) calls it",
    ),
    Mistake(
        "zero_grad between the lanes and the update",
        script=training_script(body="step.accumulate(loss, model)\noptimizer.zero_grad()\nstep.update(optimizer)"),
        says=r"the gradients were removed before step\.update\(…\): omit zero_grad\(\)",
    ),
    Mistake(
        "a second pass for the same model",
        script=training_script(
            body="step.accumulate(loss, model)\nstep.accumulate(loss, model)\nstep.update(optimizer)"
        ),
        says=r"a second pass for the same model before step\.update\(…\) would lose the first gradients",
    ),
    Mistake(
        "the second of two models left without an update",
        script=training_script(
            setup="other = run.prepare(nn.Linear(8, 3))\nrun.optimizer(other, lambda params: torch.optim.SGD(params))",
            body="step.accumulate(loss, model)\nstep.accumulate(loss, other)\nstep.update(optimizer)",
        ),
        says=r"step 1 ended with gradients that no update has used",
    ),
    # Gradients
    Mistake(
        "clipping inside the loop over the lanes",
        script=training_script(
            body="""
for batch in step.lanes:
    step.backward(*loss(model, batch))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
step.update(optimizer)
"""
        ),
        says=r"inside the loop over step\.lanes, gradients are not complete: .* clip or read gradients after the loop",
    ),
    Mistake(
        "loss.backward() inside the loop over the lanes",
        script=training_script(
            body="for batch in step.lanes:\n    loss(model, batch)[0].backward()\nstep.update(optimizer)"
        ),
        says=r"a lane called loss\.backward\(\): call step\.backward\(loss_sum, count\) instead",
    ),
    Mistake(
        "step.backward outside of the loop over the lanes",
        script=training_script(body="step.backward(*loss(model, step.batch.lanes[0].data))"),
        says=r"step\.backward\(\) belongs inside `for batch in step\.lanes:`",
    ),
    Mistake(
        "clipping sharded gradients by torch's function",
        script=training_script(
            run="'runs/mine', world, seed=7, parallel='zero'",
            body="step.accumulate(loss, model)\nnn.utils.clip_grad_norm_([model.weight], 1)\nstep.update(optimizer)",
        ),
        command="lockstep run -n 2 train.py",
        says=r"the gradients are sharded over the ranks.*clip by Run\(…, clip_norm=…\)",
    ),
    Mistake(
        "the loss read before the update",
        script=training_script(body="step.accumulate(loss, model)\nrun.log(loss=step.loss)\nstep.update(optimizer)"),
        says=r"step\.loss is known after step\.update\(…\)",
    ),
    # Models and optimizers
    Mistake(
        "loss and model exchanged",
        script=training_script(body="step.accumulate(model, loss)\nstep.update(optimizer)"),
        says=r"step\.accumulate\(model, loss\): the loss comes first, step\.accumulate\(loss, model\)",
    ),
    Mistake(
        "a model that was not prepared",
        script=training_script(
            setup="other = nn.Linear(8, 3)", body="step.accumulate(loss, other)\nstep.update(optimizer)"
        ),
        says=r"Linear has parameters that are in no prepared model: call model = run\.prepare\(model\) first",
    ),
    Mistake(
        "an optimizer of a model that was not prepared",
        script=training_script(optimizer="run.optimizer(model, torch.optim.SGD(nn.Linear(8, 3).parameters(), lr=0.1))"),
        says=r"SGD has 2 parameters of no prepared model",
    ),
    Mistake(
        "nothing prepared",
        script=training_script(model="nn.Linear(8, 3)", optimizer="None").replace("run.prepare(", "("),
        says=r"nothing to train: call run\.prepare\(model\) before run\.steps\(…\)",
    ),
    Mistake(
        "a class in place of a model",
        script=training_script(model="nn.Linear"),
        says=r"run\.prepare\(…\) takes a module, not the class Linear: give it the model itself",
    ),
    Mistake(
        "all parameters frozen",
        script=training_script(setup="model.requires_grad_(False)"),
        says=r"nothing to train: all parameters of the model are frozen",
    ),
    Mistake(
        "a layer that no optimizer trains",
        script=training_script(
            model="nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))",
            optimizer="run.optimizer(model, torch.optim.SGD(model[1].parameters(), lr=0.1))",
        ),
        code=0,
        says=r"2 parameters in no optimizer, so not trained: 0\.weight, 0\.bias: give them to one, or freeze them",
    ),
    Mistake(
        "optimizer and model exchanged",
        script=training_script(optimizer="run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)"),
        says=r"run\.optimizer\(…\): the model comes first, run\.optimizer\(model, optimizer\)",
    ),
    Mistake(
        "a learning-rate scheduler as schedule",
        script=training_script(
            optimizer="torch.optim.SGD(model.parameters(), lr=0.1)",
            setup="run.optimizer(model, optimizer, schedule=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4))",
        ),
        says=r"schedule=CosineAnnealingLR\): a torch scheduler is stepped by the script",
    ),
    Mistake(
        "a number as schedule",
        script=training_script(optimizer=f"run.optimizer(model, {UNREGISTERED}, schedule=0.1)"),
        says=r"schedule=0\.1\): expected a lockstep\.Schedule or a function",
    ),
    Mistake(
        "a torch scheduler whose state is not saved",
        script=training_script(
            setup="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)",
            body="step.accumulate(loss, model)\nstep.update(optimizer)\nscheduler.step()",
        ),
        says=r'no checkpoint would hold the state of StepLR: call run\.register_state\("scheduler", scheduler\)',
    ),
    Mistake(
        "a sequence of registered torch schedulers",
        script=training_script(
            before="from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR",
            setup="""
parts = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 8)]
scheduler = SequentialLR(optimizer, parts, [2])
run.register_state("scheduler", scheduler)
""",
            body="step.accumulate(loss, model)\nstep.update(optimizer)\nscheduler.step()",
            after="print('schedulers that are said to be lost: 0')",
        ),
        code=0,
        says=r"no checkpoint would hold|^schedulers that are said to be lost: 0$",
    ),
    Mistake(
        "a second torch scheduler whose state is not saved",
        script=training_script(
            setup="""
other = run.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (optimizer, other)]
run.register_state("scheduler", schedulers[0])
""",
        ),
        code=0,
        says=r"no checkpoint would hold the state of StepLR",
    ),
    Mistake(
        "two schedules of one optimizer",
        script=training_script(
            optimizer=f"run.optimizer(model, {UNREGISTERED}, lockstep.Schedule.cosine())",
            setup="scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)",
        ),
        says=r"ReduceLROnPlateau and run\.optimizer\(…, schedule=…\) would both set the learning rate of SGD: omit one",
    ),
    Mistake(
        "no optimizer but its class",
        script=training_script(optimizer="run.optimizer(model, lambda params: torch.optim.SGD)"),
        says=r"run\.optimizer\(…\): expected a torch optimizer or a function that makes one",
    ),
    # The loop
    Mistake(
        "neither epochs nor steps",
        script=training_script(steps=""),
        says=r"run\.steps\(…\): give epochs= or steps=",
    ),
    Mistake(
        "both epochs and steps",
        script=training_script(steps="epochs=1, steps=4"),
        says=r"run\.steps\(…\): give either epochs= or steps=, not both",
    ),
    Mistake(
        "half an epoch",
        script=training_script(steps="epochs=0.5"),
        says=r"epochs=0\.5: expected a whole number of at least 0",
    ),
    Mistake(
        "fewer than no steps",
        script=training_script(steps="steps=-1"),
        says=r"steps=-1: expected a whole number of at least 0",
    ),
    Mistake(
        "a number of steps that is a float",
        script=training_script(steps="steps=1e1", after="print('steps', step.number)"),
        code=0,
        says=r"^steps 10$",
    ),
    Mistake(
        "a number as checkpoint policy",
        script=training_script(steps="steps=4, checkpoints=2"),
        says=r"checkpoints=2: expected a lockstep\.CheckpointPolicy\(every=…\)",
    ),
    Mistake(
        "a seed that is a text",
        script=training_script(run="'runs/mine', world, seed='7'"),
        says=r"seed='7': expected a whole number",
    ),
    Mistake(
        "the folder after the world",
        script=training_script(run="world, 'runs/mine'"),
        says=r"Run\(folder, world\): the world is what lockstep\.launch hands to main, not 'runs/mine'",
    ),
    Mistake(
        "a data set in place of a loader",
        script=training_script(loader="data"),
        says=r"run\.steps\(TensorDataset, …\): make the loader with run\.loader\(dataset, global_batch=…\)",
    ),
    Mistake(
        "a loop inside a step of another",
        script=training_script(body="for inner in run.steps(loader, steps=1):\n    pass"),
        says=r"run\.steps\(…\) inside a step of another run\.steps\(…\)",
    ),
    Mistake(
        "a log after the run's end",
        script=training_script(after="run.log(accuracy=0.5)"),
        says=r"run\.log\(…\) after the run's end: give finish=False",
    ),
    Mistake(
        "the end inside the loop",
        script=training_script(body="step.accumulate(loss, model)\nstep.update(optimizer)\nrun.finish()"),
        says=r"run\.finish\(\) inside a step: call it after the loop over run\.steps\(…\), or run\.end_steps\(\)",
    ),
    Mistake(
        "an average that is begun inside the loop",
        script=training_script(
            body="step.accumulate(loss, model)\nstep.update(optimizer)\nif step.number == 2:\n    run.ema(model)"
        ),
        says=r"run\.ema\(…\) inside a step: call it before run\.steps\(…\), which restores what is saved",
    ),
    Mistake(
        "tensors of one element in the log",
        script=training_script(
            body="""
step.accumulate(loss, model)
step.update(optimizer)
run.log(loss=step.loss_tensor, norm=step.grad_norm, layers=[each.norm() for each in model.parameters()])
if step.is_last:
    print("logged")
"""
        ),
        code=0,
        says=r"^logged$",
    ),
    Mistake(
        "a whole tensor in the log",
        script=training_script(body="step.accumulate(loss, model)\nstep.update(optimizer)\nrun.log(w=model.weight)"),
        says=r"run\.log\(w=…\): expected a number, .* not a Parameter of shape \(3, 8\)",
    ),
    Mistake(
        "the step in the log",
        script=training_script(body="step.accumulate(loss, model)\nstep.update(optimizer)\nrun.log(step=step.number)"),
        says=r"run\.log\(step=…\): every event has a step of its own: choose another name",
    ),
    Mistake(
        "metrics that are not named",
        script=training_script(after="run.evaluate(model, data, loss)"),
        says=r"metrics\(model, batch\) returns a dictionary, \{name: \(sum, count\), …\}, not a tuple",
    ),
    Mistake(
        "saves without a folder",
        script=training_script(run="None, world", steps="steps=4, save_every=2"),
        code=0,
        says=r"save_every=2 has no effect: the run has no folder",
    ),
    Mistake(
        "a save without a folder",
        script=training_script(
            run="None, world", body="step.accumulate(loss, model)\nstep.update(optimizer)\nrun.save()"
        ),
        code=0,
        says=r"run\.save\(\) has no effect: the run has no folder",
    ),
    Mistake(
        "the loop left by break",
        script=training_script(
            body="step.accumulate(loss, model)\nstep.update(optimizer)\nif step.number == 2:\n    break"
        ),
        code=0,
        says=r"left the run after step 2 without run\.finish\(\): it is saved as it is, and the same command continues",
    ),
    Mistake(
        "main left by return",
        script=training_script(
            body="step.accumulate(loss, model)\nstep.update(optimizer)\nif step.number == 2:\n    return"
        ),
        code=0,
        says=r"left the run after step 2 without run\.finish\(\): it is saved as it is",
    ),
    Mistake(
        "a run that is never finished",
        script=training_script(steps="steps=4, finish=False"),
        code=0,
        says=r"left the run after step 4 without run\.finish\(\): it is saved as it is",
    ),
    Mistake(
        "the loop left by break without launch",
        script=training_script(
            body="step.accumulate(loss, model)\nstep.update(optimizer)\nif step.number == 2:\n    break"
        ).replace("lockstep.launch(main)", "main(None)"),
        code=0,
        says=r"left the run after step 2 without run\.finish\(\): what came after the last checkpoint is lost",
    ),
    Mistake(
        "an exception in the loop",
        script=training_script(body="step.accumulate(loss, model)\nstep.update(optimizer)\nloss.value"),
        code=1,
        says=r"AttributeError: 'function' object has no attribute 'value'",
        shows_traceback=True,
    ),
    Mistake(
        "an average before the model is prepared",
        script=training_script(setup="run.ema(nn.Linear(8, 3))"),
        says=r"call run\.prepare\(model\) before run\.ema\(model\)",
    ),
    Mistake(
        "state that cannot be saved",
        script=training_script(setup="run.register_state('step', 3)"),
        says=r"run\.register_state\('step', …\) needs an object with state_dict and load_state_dict",
    ),
    Mistake(
        "lazy layers",
        script=training_script(model="nn.LazyLinear(3)"),
        says=r"the model has lazy modules without weights yet: run a batch through it first",
    ),
]
