"""For tests: `ranks(n)` runs a function on n real processes joined by a real process group."""

from lockstep.testing.failures import RankFailure, RanksFailed, RanksTimeout
from lockstep.testing.harness import Ranks, ranks
from lockstep.testing.pool import close_pool, pool_pids

__all__ = ["RankFailure", "Ranks", "RanksFailed", "RanksTimeout", "close_pool", "pool_pids", "ranks"]
