"""Forward passes under a mesh contain collectives: every rank must run as many as the others, or they wait for ever."""

from lockstep.data.foreign import ForeignLoader, Loader
from lockstep.errors import UserError
from lockstep.world.world import World


def require_equal_work(loader: Loader, data_world: World, name: str, num_copies: int) -> None:
    """`num_copies`: ranks that run the same lanes."""
    shares, count = loader.lanes.shares, loader.lanes.count
    if len(shares) != data_world.size:
        raise UserError(
            f"parallel={name}: the loader was made for {len(shares)} processes, and {data_world.size} have samples of "
            "their own: make it by run.loader(…)"
        )
    if len({len(share) for share in shares}) > 1:
        sizes = ", ".join(str(len(share)) for share in shares)
        raise UserError(
            f"parallel={name}: all processes must run equally many lanes, and lanes={count} on {len(shares)} makes "
            f"{sizes}: use a multiple of {len(shares)} lanes, without lanes_per_rank"
        )
    if isinstance(loader, ForeignLoader):
        if num_copies > 1:
            raise UserError(
                f"parallel={name}: {num_copies} processes each must see the same samples, and this DataLoader has an "
                "order of its own: give run.loader(…) the data set"
            )
    elif loader.may_leave_lanes_empty:
        raise UserError(
            f"parallel={name}: tail={loader.tail} can leave lanes without samples, and all processes must run equally "
            "many: use tail=drop, or with a map-style data set tail=pad"
        )
