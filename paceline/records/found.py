"""Found: the machine as probed, env.json."""

from pydantic import Field

from paceline.records.base import Part, Record


class Gpu(Part):
    index: int
    name: str
    uuid: str
    compute_capability: str
    memory_bytes: int


class Link(Part):
    """How two GPUs reach each other, as the driver reports it."""

    a: int
    b: int
    kind: str = Field(
        description="nvlink, nvswitch, or the common ancestor: pcie_switch, host_bridge, ..."
    )
    nvlinks: int


class Git(Part):
    commit: str
    branch: str
    dirty: bool


class Env(Record):
    """The machine as probed, before anything is decided."""

    host: str
    os: str
    cpu: str
    cores: int = Field(description="Cores this process may use, which can be fewer than exist.")
    memory_bytes: int
    gpus: list[Gpu]
    links: list[Link]
    driver: str | None
    python: str
    torch: str
    cuda: str | None
    nccl: str | None
    packages: dict[str, str]
    interfaces: list[str] = Field([], description="Network interfaces by name.")
    infiniband: list[str] = Field([], description="InfiniBand and RoCE devices by name.")
    hip: str | None = Field(None, description="torch's ROCm version.")
    git: Git | None
    variables: dict[str, str] = Field(description="Environment variables on the allow-list.")
