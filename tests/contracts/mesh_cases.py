"""The meshes under test, by name: the number of ranks and the options of a run."""

from typing import Any

from torch import Tensor

from lockstep.world.world import World
from tests.contracts.mesh_workloads import PLAN, SEQUENCE_PLAN, train_small

BLOCKS = {"wrap": ["Block"]}


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp on 2": (2, {"parallel": "fsdp", "fsdp": BLOCKS}),
    "fsdp on 4, gathered once": (4, {"parallel": "fsdp", "fsdp": {"reshard_after_forward": False}}),
    "fsdp, offloaded": (2, {"parallel": "fsdp", "fsdp": {"min_parameters": 100, "cpu_offload": True}}),
    "hybrid": (4, {"parallel": {"data": 2, "shard": 2}, "fsdp": BLOCKS}),
    "tensor": (2, {"parallel": {"tensor": 2, "shard": 1}, "tensor_plan": PLAN}),
    "data and tensor": (4, {"parallel": {"data": 2, "tensor": 2, "shard": 1}, "tensor_plan": PLAN}),
    "shard and tensor": (4, {"parallel": {"shard": 2, "tensor": 2}, "tensor_plan": PLAN, "fsdp": BLOCKS}),
    "sequence": (4, {"parallel": {"shard": 2, "tensor": 2}, "tensor_plan": SEQUENCE_PLAN, "tied": False}),
}


TIED = [name for name, (_, options) in MESHES.items() if options.get("tied", True)]


def train_many(world: World, names: list[str], **options: Any) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train_small(world, name, **options) for name in names]
