"""The course that made the shipped weights, stage by stage."""

from shoal.engines.toy.training.network import Options
from shoal.engines.toy.training.stages import Stage

DENSE, LEARNING = Options(), Options(learns_index=True)
SPARSE = Options(is_sparse=True, learns_index=True)
# The drafter sees the trunk as it is served.
FROZEN = Options(is_sparse=True)

COURSE = (
    Stage("short", "short", 512, 16, 8, 2000, (2e-3, 2e-3), warm_up=100, options=DENSE),
    Stage("medium", "medium", 2048, 4, 8, 260, (2e-3, 1.5e-3), options=LEARNING),
    Stage("sparse", "medium", 2048, 4, 8, 220, (1.5e-3, 1e-3), options=SPARSE),
    Stage("long", "long", 4096, 2, 8, 280, (1e-3, 2e-5), options=SPARSE),
    Stage("drafter", "short", 512, 16, 8, 800, (2e-3, 2e-5), warm_up=50, options=FROZEN, drafter=True),
)
