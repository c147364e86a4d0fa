"""Fabric, the part of Lightning that leaves the loop to its user, as its manual has it."""

from torch.utils.data import DataLoader

from lockstep.benchmark.loop import SEED, Loop, PlainLoop, Rows, Setting, as_they_are, endless, make_optimizer


def with_fabric(setting: Setting) -> Loop:
    from lightning.fabric import Fabric

    world = setting.world
    strategy = "ddp" if world.size > 1 else "auto"
    fabric = Fabric(accelerator=world.device.type, strategy=strategy, devices=world.size)
    fabric.launch()
    fabric.seed_everything(SEED, verbose=False)
    bare = setting.work.make_model()
    model, optimizer = fabric.setup(bare, make_optimizer(bare.parameters()))
    rows = Rows(setting.work.data.tensors)
    loader = fabric.setup_dataloaders(DataLoader(rows, setting.share, shuffle=True, collate_fn=as_they_are))
    return PlainLoop(bare, model, optimizer, endless(loader), setting.work.loss_sum, fabric.backward)
