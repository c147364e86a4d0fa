"""How many ranks lie along each axis of a mesh: `parallel: {data: 2, shard: 4}`."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from lockstep.config.arguments import require_count, require_known
from lockstep.errors import UserError


class MeshSizes(NamedTuple):
    """Ranks are numbered along the last axis first: a tensor group is made of neighbours."""

    data: int  # groups that have all parameters between them
    shard: int  # ranks that share out every parameter
    tensor: int  # ranks that share out the work of single layers

    @property
    def num_data_ranks(self) -> int:
        """Those with samples of their own."""
        return self.data * self.shard

    def __str__(self) -> str:
        return "{" + ", ".join(f"{axis}: {size}" for axis, size in self._asdict().items()) + "}"


def mesh_sizes(parallel: str | Mapping[str, int | None], num_ranks: int) -> MeshSizes:
    """As `parallel` says. Where one of data and shard is left out, it is filled up; all else that is left out is 1."""
    given = {} if isinstance(parallel, str) else {axis: size for axis, size in parallel.items() if size is not None}
    require_known("parallel has no axis", given, MeshSizes._fields)
    for axis, size in given.items():
        require_count(f"parallel.{axis}", size)
    missing = ["shard"] if isinstance(parallel, str) else [axis for axis in ("data", "shard") if axis not in given]
    known = prod(given.values())
    if len(missing) == 1 and num_ranks % known == 0:
        given[missing[0]] = num_ranks // known
    sizes = MeshSizes(*(given.get(axis, 1) for axis in MeshSizes._fields))
    if prod(sizes) != num_ranks:
        product = " × ".join(f"{axis} {size}" for axis, size in sizes._asdict().items())
        raise UserError(
            f"parallel: {product} = {prod(sizes)} processes, but {num_ranks} were started: "
            f"make the product {num_ranks}, or start {prod(sizes)}"
        )
    return sizes
