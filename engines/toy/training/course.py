"""The course behind the shipped weights, stage by stage; the README tells the runs."""

from shoal.engines.toy.training.network import Options
from shoal.engines.toy.training.stages import DENSE, Stage, Trains

LEARNING = Options(learns_index=True)
SPARSE = Options(is_sparse=True, learns_index=True)
# The drafter sees the trunk as it is served.
FROZEN = Options(is_sparse=True)

COURSE = (
    Stage("short", "short", 512, 16, 8, 2000, (2e-3, 2e-3), warm_up=100, options=DENSE),
    Stage("index", "short", 512, 8, 1, 250, (3e-3, 3e-4), options=LEARNING, trains=Trains.INDEXER),
    Stage("polish", "polish", 512, 16, 8, 1117, (2e-3, 1.5e-3), warm_up=50, options=SPARSE, pictures_max=24),
    Stage("medium", "medium", 2048, 4, 8, 200, (1.5e-3, 1.2e-3), warm_up=30, options=SPARSE, pictures_max=14),
    Stage("long", "long", 4096, 2, 8, 480, (1.2e-3, 2e-5), options=SPARSE, pictures_max=14),
    Stage(
        "drafter",
        "short",
        512,
        16,
        8,
        800,
        (2e-3, 2e-5),
        warm_up=50,
        options=FROZEN,
        trains=Trains.DRAFTER,
        pictures_max=16,
    ),
)
