"""Testing: `ranks(n)` runs a function on n processes that are joined by a gloo process group."""

from lockstep.testing.failures import RankFailure, RanksFailed, RanksTimeout
from lockstep.testing.ranks_harness import Ranks, ranks
from lockstep.testing.worker_pool import close_pool, pool_pids

__all__ = ["RankFailure", "Ranks", "RanksFailed", "RanksTimeout", "close_pool", "pool_pids", "ranks"]
