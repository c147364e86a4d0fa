"""Accelerate, as its manual has it: everything is prepared, and the loop stays the user's."""

from torch.utils.data import DataLoader

from lockstep.benchmark.loop import SEED, Loop, PlainLoop, Rows, Setting, as_they_are, endless, make_optimizer


def with_accelerate(setting: Setting) -> Loop:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=setting.world.device.type == "cpu")
    set_seed(SEED)
    bare = setting.work.make_model()
    loader = DataLoader(Rows(setting.work.data.tensors), setting.share, shuffle=True, collate_fn=as_they_are)
    model, optimizer, loader = accelerator.prepare(bare, make_optimizer(bare.parameters()), loader)
    return PlainLoop(bare, model, optimizer, endless(loader), setting.work.loss_sum, accelerator.backward)
