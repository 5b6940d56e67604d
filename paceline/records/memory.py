"""mem_<moment>.json: what held a rank's memory at a moment, with its largest owners by module."""

from pydantic import Field

from paceline.records.base import Part, Record
from paceline.records.words import size, table

MAX_OWNERS = 10


class Owner(Part):
    """A module and what it holds: `kind` is parameters, gradients, optimizer or activations."""

    module: str
    kind: str
    num_bytes: int


class MemoryDump(Record):
    """Memory of one rank. `counted_bytes` is what the allocator has handed out, or on a CPU the
    resident set; what no owner explains of it are activations, workspaces and the runtime."""

    rank: int
    moment: str = Field(description="boot, step1, ..., peak or oom.")
    step: int
    device: str
    counted_bytes: int
    peak_bytes: int
    limit_bytes: int | None = Field(description="Of the device or the machine.")
    by_kind: dict[str, int]
    owners: list[Owner] = Field(description="The ten largest.")
    inside: str = Field("", description="The module whose forward pass ran when memory ran out.")
    stats: dict[str, int] = Field({}, description="torch.cuda.memory_stats, where there is CUDA.")

    @property
    def unexplained_bytes(self) -> int:
        return max(0, self.counted_bytes - sum(self.by_kind.values()))

    def sentence(self) -> str:
        """Say in a line what held most."""
        kinds = ", ".join(f"{kind} {size(held)}" for kind, held in self.by_kind.items() if held)
        owners = [f"{o.module} ({o.kind}, {size(o.num_bytes)})" for o in self.owners[:1]]
        most = "".join(f"; the largest owner is {owner}" for owner in owners)
        where = f"in the forward pass of {self.inside}: " if self.inside else ""
        rest = f", the rest {size(self.unexplained_bytes)}" if self.unexplained_bytes else ""
        return f"{where}{size(self.counted_bytes)} held: {kinds}{rest}{most}"

    def to_text(self) -> str:
        rows = [(o.module, o.kind, size(o.num_bytes)) for o in self.owners]
        return (
            f"rank {self.rank}, {self.moment}, step {self.step}, {self.device}: {self.sentence()}\n"
            f"peak {size(self.peak_bytes)}"
            + (f" of {size(self.limit_bytes)}" if self.limit_bytes else "")
            + f"\n\n{table(('module', 'holds', 'bytes'), rows)}\n"
        )
