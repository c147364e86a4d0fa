"""The models that are timed by name: those of `lockstep bench` in other sizes, without dropout."""

from functools import partial

from lockstep.benchmark.workloads import Workload, classified, make_conv, make_gpt, make_mlp, predicted


def workload(name: str, samples: int) -> Workload:
    if name == "tiny":
        return classified(partial(make_mlp, 32, 64, 1), (32,), samples)
    if name == "mlp-0.15M":
        return classified(partial(make_mlp, 64, 256, 3), (64,), samples)
    if name == "mlp-9M":
        return classified(partial(make_mlp, 256, 1500, 5), (256,), samples)
    if name == "conv":
        return classified(make_conv, (3, 32, 32), samples)
    return predicted(partial(make_gpt, 2000, 320, 7, 64), 2000, 64, samples)
