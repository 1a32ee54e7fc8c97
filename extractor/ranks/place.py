"""Which rank this process is, and of which replica."""

from dataclasses import dataclass

from extractor.errors import SharedUsageError
from extractor.torchrun import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of this process among the ranks, from torchrun's variables; Slurm's are never read.

    Attributes:
        rank, world_size: number of this rank and count of ranks, over all nodes.
        local_rank: number of this rank on its node; the index of its GPU.
        tp: how many ranks hold one copy of the model together.
        restart: how often this node's torchrun has restarted its ranks.
        nodes: how many torchrun agents the world has.
        local_size: how many ranks this node has.
    """

    rank: int
    world_size: int
    local_rank: int
    tp: int
    restart: int = 0
    nodes: int = 1
    local_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.tp:
            raise SharedUsageError(
                f"--tp {self.tp} does not divide the world of {self.world_size} ranks: "
                f"start {self.tp} ranks, or a multiple of that"
            )

    @classmethod
    def from_environment(cls, tp: int | None) -> "Place":
        """Read torchrun's variables. tp: as in the class; None for all ranks.

        Raises UsageError for variables that do not fit together, and when tp does not divide the
        world."""
        launch = Launch.from_environment()
        return cls(
            rank=launch.rank,
            world_size=launch.world_size,
            local_rank=launch.local_rank,
            tp=tp or launch.world_size,
            restart=launch.restart,
            nodes=launch.nodes,
            local_size=launch.local_size,
        )

    @property
    def replica(self) -> int:
        """Number of the replica that this rank belongs to: tp successive ranks form one."""
        return self.rank // self.tp

    @property
    def replicas(self) -> int:
        return self.world_size // self.tp

    @property
    def local_writers(self) -> int:
        """How many replicas write from this node."""
        return max(self.local_size // self.tp, 1)

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def is_writer(self) -> bool:
        """Whether this rank hands out its replica's batches and writes its files: tp rank 0 does."""
        return self.tp_rank == 0
