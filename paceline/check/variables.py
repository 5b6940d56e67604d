"""What is known of environment variables: who reads each, what it takes, where that is written.

Plain data for the rules in lint.py. A new variable is one row; nothing here looks at a machine.
Checked against NCCL's guide and sources up to 2.31, and against torch 2.13.
"""

from dataclasses import dataclass, field

from paceline.check.values import Values

Row = tuple[str, str] | tuple[str, str, Values]


@dataclass(frozen=True)
class Variable:
    """One row: `does` is what its reader does with it, `source` where that is written."""

    name: str
    does: str
    values: Values | None = None  # None: any text
    reader: str = field(kw_only=True)
    source: str = field(kw_only=True)


@dataclass(frozen=True)
class Costly:
    """Values that do what they say, at a price."""

    at: tuple[str, ...]
    cost: str
    across_nodes: bool = False  # free on one host


def _number(low: int, high: int, otherwise: str = "") -> Values:
    return Values(numbers=range(low, high + 1), otherwise=otherwise)


# NCCL reads numbers by strtoll (src/misc/param.cc): a word becomes 0, without a complaint.
AS_ZERO = "NCCL takes a number here, and any word as 0"
FLAG, TRISTATE = _number(0, 1, AS_ZERO), _number(0, 2, AS_ZERO)
AUTO_FLAG = _number(-2, 1, AS_ZERO)
ON_OFF = _number(0, 1)
CHECKED = _number(0, 1, "torch ignores it")  # check_env in c10/util/env.h
COUNT = Values(numbers=range(1, 2**31), otherwise=AS_ZERO)
IB_TIMEOUT = _number(0, 31, "more than 31 is no timeout at all")
# ncclGetLevel (src/graph/paths.cc) compares by strcmp and lets unknown words pass; a number
# above 5 counts as 5.
LEVEL = Values(
    ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS"),
    range(2**31),
    capitals=True,
    otherwise="NCCL ignores it (capitals matter)",
)
FAMILY = Values(("AF_INET", "AF_INET6"), capitals=True, otherwise="NCCL ignores it")
# parseList (src/graph/tuning.cc): since 2.24 one unknown word is ncclInvalidUsage.
REFUSED = "NCCL since 2.24 refuses it, and no communicator is made"
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
ALGO = Values(ALGORITHMS, form="per function", otherwise=REFUSED, refused=True)
PROTO = Values(("LL", "LL128", "Simple"), form="per function", otherwise=REFUSED, refused=True)
DEBUG_LEVEL = Values(
    ("VERSION", "WARN", "ATTN", "INFO", "ABORT", "TRACE"), otherwise="NCCL logs nothing"
)
SUBSYSTEM_NAMES = (
    "INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "ALLOC_HOST", "CALL",
    "PROXY", "NVLS", "BOOTSTRAP", "REG", "PROFILE", "RAS", "DESTROY", "ALL",
)  # fmt: skip
SUBSYSTEM = Values(SUBSYSTEM_NAMES, form="list", otherwise="NCCL ignores it")
# getCvarBool and getCvarInt (torch/csrc/distributed/c10d/Utils.hpp) raise on anything else.
YES = ("1", "y", "yes", "t", "true")
NO_GROUP = "torch refuses to make a process group"
SWITCH = Values((*YES, "0", "n", "no", "f", "false"), None, "word", False, NO_GROUP, True, False)
INTEGER = Values((), range(-(2**31), 2**31), "word", False, NO_GROUP, True, False)
HANDLING = Values((), range(4), "word", False, NO_GROUP, True, False)
DETAIL = Values(("OFF", "INFO", "DETAIL"), None, "word", False, NO_GROUP, True, False)
PLACE = Values((), range(2**31), "whole", otherwise="torch cannot read it", refused=True)
PORT = Values((), range(1, 2**16), "whole", otherwise="ranks cannot meet there", refused=True)
THREADS = Values(
    numbers=range(1, 2**31),
    form="counts",
    otherwise="OpenMP ignores it, and takes every core",
    refused=True,
)
MKL_THREADS = Values((), range(1, 2**31), "whole", otherwise="torch then uses one thread")
LOG_LEVEL = Values(("INFO", "WARNING", "ERROR", "FATAL"), range(4), otherwise="torch ignores it")

NCCL_GUIDE = "docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
TORCH_NCCL = "docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
TORCH_CUDA = "docs.pytorch.org/docs/stable/cuda_environment_variables.html"
C10D = "torch/csrc/distributed/c10d/"


def _rows(reader: str, source: str, *rows: Row) -> tuple[Variable, ...]:
    return tuple(Variable(*row, reader=reader, source=source) for row in rows)


VARIABLES: tuple[Variable, ...] = (
    *_rows(
        "nothing",
        "NCCL's guide and sources, torch's sources",
        ("NCCL_TIMEOUT", "a collective's timeout is an argument of torch's process group"),
        ("NCCL_IB_GDR_LEVEL", "was renamed in NCCL 2.4"),
        ("NCCL_IB_CUDA_SUPPORT", "was removed in NCCL 2.4"),
        ("NCCL_LL_THRESHOLD", "was removed in NCCL 2.5"),
        ("NCCL_TREE_THRESHOLD", "was removed in NCCL 2.5"),
        ("NCCL_SINGLE_RING_THRESHOLD", "was removed in NCCL 2.3"),
        ("TORCH_USE_CUDA_DSA", "is a switch for building torch (CUDADeviceAssertionHost.cpp)"),
    ),
    *_rows(
        "NCCL",
        NCCL_GUIDE,
        ("NCCL_SOCKET_IFNAME", "interfaces for sockets: prefixes, =exact names, ^all but these"),
        ("NCCL_SOCKET_FAMILY", "IPv4 or IPv6 only", FAMILY),
        ("NCCL_SOCKET_NTHREADS", "threads per socket connection", _number(1, 16)),
        ("NCCL_NSOCKS_PERTHREAD", "sockets per such thread", COUNT),
        ("NCCL_SOCKET_RETRY_CNT", "retries of a refused connection", COUNT),
        ("NCCL_NET", "network by name: IB, Socket or a plugin's"),
        ("NCCL_NET_PLUGIN", "network plugin: suffix or file"),
        ("NCCL_TUNER_PLUGIN", "tuner plugin: suffix or file"),
        ("NCCL_CROSS_NIC", "may a ring use another network card on the next host", TRISTATE),
        ("NCCL_IB_DISABLE", "no InfiniBand or RoCE", FLAG),
        ("NCCL_IB_HCA", "InfiniBand cards: prefixes, =exact names, ^all but these"),
        ("NCCL_IB_TIMEOUT", "InfiniBand ack timeout, 4 us x 2^value", IB_TIMEOUT),
        ("NCCL_IB_RETRY_CNT", "InfiniBand retries", _number(0, 7)),
        ("NCCL_IB_GID_INDEX", "global id used with RoCE"),
        ("NCCL_IB_ADDR_FAMILY", "address family of that id", FAMILY),
        ("NCCL_IB_ROCE_VERSION_NUM", "RoCE version of that id"),
        ("NCCL_IB_PKEY", "partition, by its index"),
        ("NCCL_IB_SL", "service level"),
        ("NCCL_IB_TC", "traffic class"),
        ("NCCL_IB_FIFO_TC", "traffic class of control messages"),
        ("NCCL_IB_AR_THRESHOLD", "bytes above which adaptive routing is used"),
        ("NCCL_IB_ADAPTIVE_ROUTING", "adaptive routing", FLAG),
        ("NCCL_IB_QPS_PER_CONNECTION", "queue pairs per connection", _number(1, 128)),
        ("NCCL_IB_SPLIT_DATA_ON_QPS", "split each message over queue pairs", FLAG),
        ("NCCL_IB_PCI_RELAXED_ORDERING", "PCI relaxed ordering", TRISTATE),
        ("NCCL_IB_MERGE_NICS", "two ports as one card", FLAG),
        ("NCCL_NET_GDR_LEVEL", "farthest GPU and card that use GPU Direct RDMA", LEVEL),
        ("NCCL_NET_GDR_READ", "GPU Direct RDMA for sending too", FLAG),
        ("NCCL_DMABUF_ENABLE", "dma-buf for GPU Direct RDMA", FLAG),
        ("NCCL_GDRCOPY_ENABLE", "GDRCopy", FLAG),
        ("NCCL_P2P_DISABLE", "no direct GPU to GPU traffic, not even NVLink", FLAG),
        ("NCCL_P2P_LEVEL", "farthest pair of GPUs that talk directly", LEVEL),
        ("NCCL_P2P_NET_CHUNKSIZE", "bytes of a network message of send and receive"),
        ("NCCL_SHM_DISABLE", "no shared memory between GPUs of a host", FLAG),
        ("NCCL_NVLS_ENABLE", "NVLink SHARP", TRISTATE),
        ("NCCL_MNNVL_ENABLE", "NVLink between hosts", TRISTATE),
        ("NCCL_NVB_DISABLE", "no NVLink through another GPU", FLAG),
        ("NCCL_PXN_DISABLE", "no card reached through another GPU", FLAG),
        ("NCCL_COLLNET_ENABLE", "reduction in the network's switches", FLAG),
        ("NCCL_CUMEM_ENABLE", "cuMem allocations", AUTO_FLAG),
        ("NCCL_CUMEM_HOST_ENABLE", "cuMem in place of /dev/shm", AUTO_FLAG),
        ("NCCL_ALGO", "algorithms a collective may use", ALGO),
        ("NCCL_PROTO", "protocols a collective may use", PROTO),
        ("NCCL_BUFFSIZE", "bytes of a buffer between two GPUs", COUNT),
        ("NCCL_NTHREADS", "CUDA threads per channel", Values(numbers=range(64, 513, 32))),
        ("NCCL_MIN_NCHANNELS", "fewest channels; NCCL_MIN_CTAS now", COUNT),
        ("NCCL_MAX_NCHANNELS", "most channels; NCCL_MAX_CTAS now", COUNT),
        ("NCCL_MIN_CTAS", "fewest CUDA blocks", _number(1, 64)),
        ("NCCL_MAX_CTAS", "most CUDA blocks", _number(1, 64)),
        ("NCCL_CGA_CLUSTER_SIZE", "blocks of a cluster", _number(0, 8)),
        ("NCCL_LAUNCH_MODE", "how kernels are launched", Values(("PARALLEL", "GROUP"))),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "communicators in the program's order", FLAG),
        ("NCCL_RUNTIME_CONNECT", "connect peers at first use", FLAG),
        ("NCCL_GRAPH_REGISTER", "register buffers of CUDA graphs", FLAG),
        ("NCCL_IGNORE_CPU_AFFINITY", "bind threads by the GPU alone", FLAG),
        ("NCCL_TOPO_FILE", "topology to load"),
        ("NCCL_TOPO_DUMP_FILE", "where to write the topology found"),
        ("NCCL_RAS_ENABLE", "health service", FLAG),
        ("NCCL_CONF_FILE", "file of further settings"),
        ("NCCL_PSK", "key that encrypts sockets: a secret"),
        ("NCCL_DEBUG", "how much NCCL logs", DEBUG_LEVEL),
        ("NCCL_DEBUG_SUBSYS", "whose log lines", SUBSYSTEM),
        ("NCCL_DEBUG_FILE", "where the log goes; %h is the host, %p the process"),
        ("NCCL_CHECK_POINTERS", "check the pointers of every call", FLAG),
    ),
    *_rows(
        "torch c10d",
        TORCH_NCCL,
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "what ends a failed or late collective", HANDLING),
        ("TORCH_NCCL_BLOCKING_WAIT", "wait() holds the host until a collective ends", SWITCH),
        ("TORCH_NCCL_HIGH_PRIORITY", "collectives on a stream of high priority", SWITCH),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "write what ranks did before a timeout", SWITCH),
        ("TORCH_NCCL_DESYNC_DEBUG", "name the rank that fell behind", SWITCH),
        ("TORCH_NCCL_ENABLE_TIMING", "time every collective", SWITCH),
        ("TORCH_NCCL_ENABLE_MONITORING", "watch the watchdog", SWITCH),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "longest silence of the watchdog", INTEGER),
        ("TORCH_NCCL_COORD_CHECK_MILSEC", "how often other ranks' alarms are read", INTEGER),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "time to write the dump", INTEGER),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "where the dump goes"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "events the flight recorder keeps", INTEGER),
        ("TORCH_NCCL_TRACE_CPP_STACK", "C++ stacks in the flight recorder", SWITCH),
        ("TORCH_NCCL_NAN_CHECK", "look for NaN before every collective", SWITCH),
    ),
    *_rows(
        "torch c10d",
        f"{C10D}ProcessGroupNCCL.hpp, ProcessGroupGloo.hpp, FlightRecorder.hpp",
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", "keep tensors alive by reference", SWITCH),
        ("TORCH_NCCL_CUDA_EVENT_CACHE", "reuse CUDA events", SWITCH),
        ("TORCH_NCCL_PROPAGATE_ERROR", "tell all ranks of an error", SWITCH),
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "the watchdog's errors reach the rank", SWITCH),
        ("TORCH_GLOO_LAZY_INIT", "gloo connects peers at first use", SWITCH),
        ("TORCH_FR_BUFFER_SIZE", "events the flight recorder keeps", INTEGER),
        ("NCCL_ASYNC_ERROR_HANDLING", "what ends a failed or late collective", HANDLING),
        ("NCCL_BLOCKING_WAIT", "wait() holds the host until a collective ends", SWITCH),
        ("NCCL_DESYNC_DEBUG", "name the rank that fell behind", SWITCH),
        ("NCCL_ENABLE_TIMING", "time every collective", SWITCH),
    ),
    *_rows(
        "torch c10d",
        "docs.pytorch.org/docs/stable/distributed.html",
        ("MASTER_ADDR", "host of rank 0"),
        ("MASTER_PORT", "port of rank 0", PORT),
        ("RANK", "number of this rank", PLACE),
        ("WORLD_SIZE", "number of ranks", PLACE),
        ("LOCAL_RANK", "number of this rank on its host", PLACE),
        ("GLOO_SOCKET_IFNAME", "interfaces for gloo: exact names"),
        ("TORCH_DISTRIBUTED_DEBUG", "checks and logs of collectives", DETAIL),
    ),
    *_rows(
        "torchrun",
        "docs.pytorch.org/docs/stable/elastic/run.html, torch/distributed/elastic",
        ("LOCAL_WORLD_SIZE", "number of ranks on this host"),
        ("TORCHELASTIC_ERROR_FILE", "where a rank leaves its error"),
        ("TORCHELASTIC_MAX_RESTARTS", "restarts allowed"),
        ("TORCHELASTIC_RESTART_COUNT", "restarts so far"),
        ("TORCHELASTIC_RUN_ID", "name of the job"),
    ),
    *_rows(
        "torch",
        f"{TORCH_CUDA}, debugging_environment_variables.html",
        ("PYTORCH_ALLOC_CONF", "how GPU memory is cached"),
        ("PYTORCH_CUDA_ALLOC_CONF", "how GPU memory is cached"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "no cache of GPU memory", CHECKED),
        ("PYTORCH_NVML_BASED_CUDA_CHECK", "look for GPUs without CUDA", ON_OFF),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TF32 whatever the program says", CHECKED),
        ("TORCH_SHOW_CPP_STACKTRACES", "C++ stacks in errors", CHECKED),
        ("TORCH_CPP_LOG_LEVEL", "how much torch's C++ side logs", LOG_LEVEL),
        ("CUBLAS_WORKSPACE_CONFIG", "workspace of cuBLAS; :4096:8 makes it deterministic"),
        ("CUBLASLT_WORKSPACE_SIZE", "workspace of cuBLASLt in KiB"),
    ),
    *_rows(
        "torch.compile",
        "torch/_logging, torch/_dynamo/config.py, torch/_inductor",
        ("TORCH_LOGS", "log artifacts of torch.compile and others"),
        ("TORCH_COMPILE_DISABLE", "torch.compile does nothing"),
        ("TORCHDYNAMO_DISABLE", "torch.compile does nothing"),
        ("TORCHINDUCTOR_CACHE_DIR", "compiled kernels"),
    ),
    *_rows(
        "CUDA",
        "docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html",
        ("CUDA_VISIBLE_DEVICES", "GPUs a process sees, in their order"),
        ("CUDA_DEVICE_ORDER", "what GPU 0 is", Values(("FASTEST_FIRST", "PCI_BUS_ID"))),
        ("CUDA_LAUNCH_BLOCKING", "each kernel ends before the next is launched", ON_OFF),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "queues to a GPU", _number(1, 32)),
        ("CUDA_MODULE_LOADING", "when code is loaded", Values(("DEFAULT", "LAZY", "EAGER"))),
        ("CUDA_CACHE_DISABLE", "compile kernels anew each time", ON_OFF),
        ("CUDA_CACHE_PATH", "compiled kernels"),
    ),
    *_rows(
        "OpenMP",
        "gcc.gnu.org/onlinedocs/libgomp/Environment-Variables.html, openmp.llvm.org",
        ("OMP_NUM_THREADS", "threads of a rank", THREADS),
        ("OMP_PROC_BIND", "whether threads stay on their places"),
        ("OMP_PLACES", "cores or sockets that threads are bound to"),
        ("OMP_SCHEDULE", "how loops are shared out"),
        ("OMP_DYNAMIC", "fewer threads under load"),
        ("OMP_WAIT_POLICY", "idle threads spin or sleep", Values(("ACTIVE", "PASSIVE"))),
        ("GOMP_CPU_AFFINITY", "cores of the threads"),
        ("KMP_AFFINITY", "cores of the threads"),
        ("KMP_BLOCKTIME", "how long an idle thread spins"),
    ),
    *_rows(
        "MKL",
        "docs.pytorch.org/docs/stable/threading_environment_variables.html",
        ("MKL_NUM_THREADS", "threads of a rank in MKL, before OMP_NUM_THREADS", MKL_THREADS),
        ("MKL_DYNAMIC", "fewer threads under load"),
    ),
    *_rows(
        "ROCm",
        "rocm.docs.amd.com: HIP, ROCR-Runtime, MIOpen and rccl, environment variables",
        ("HIP_VISIBLE_DEVICES", "GPUs a process sees"),
        ("ROCR_VISIBLE_DEVICES", "GPUs a process sees, below HIP"),
        ("HIP_LAUNCH_BLOCKING", "each kernel ends before the next is launched", ON_OFF),
        ("AMD_SERIALIZE_KERNEL", "wait before (1), after (2) or around (3) it", _number(0, 3)),
        ("AMD_LOG_LEVEL", "how much HIP logs"),
        ("HSA_ENABLE_SDMA", "copy engines", ON_OFF),
        ("HSA_FORCE_FINE_GRAIN_PCIE", "fine-grained memory over PCIe", ON_OFF),
        ("HSA_OVERRIDE_GFX_VERSION", "treat the GPU as another one"),
        ("MIOPEN_USER_DB_PATH", "tuning results: a folder of the job's own"),
        ("MIOPEN_CUSTOM_CACHE_DIR", "compiled kernels: a folder of the job's own"),
        ("MIOPEN_DISABLE_CACHE", "compile kernels anew each time"),
        ("MIOPEN_FIND_MODE", "how convolutions are chosen"),
        ("MIOPEN_FIND_ENFORCE", "tune again although results exist"),
        ("MIOPEN_LOG_LEVEL", "how much MIOpen logs", _number(0, 7)),
        ("RCCL_MSCCL_ENABLE", "MSCCL algorithms", ON_OFF),
    ),
    *_rows(
        "libfabric",
        "libfabric man pages fi_provider(7), fi_cxi(7), fi_efa(7), fi_mr(3)",
        ("FI_PROVIDER", "which provider to use"),
        ("FI_MR_CACHE_MONITOR", "how freed memory is noticed"),
        ("FI_EFA_USE_DEVICE_RDMA", "RDMA of EFA cards", ON_OFF),
        ("FI_CXI_DEFAULT_CQ_SIZE", "completion queue entries on Slingshot"),
        ("FI_CXI_RX_MATCH_MODE", "matching on the card, the host, or both"),
        ("FI_CXI_ATS", "address translation by the card", ON_OFF),
    ),
)

# The guide and the headers above say what each costs.
COSTLY: dict[str, Costly] = {
    "CUDA_LAUNCH_BLOCKING": Costly(("1",), "the host waits for every kernel: nothing overlaps"),
    "HIP_LAUNCH_BLOCKING": Costly(("1",), "the host waits for every kernel: nothing overlaps"),
    "AMD_SERIALIZE_KERNEL": Costly(("1", "2", "3"), "kernels wait for each other: none overlap"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Costly(("1",), "every tensor asks the driver for memory"),
    "NCCL_P2P_DISABLE": Costly(("1",), "GPUs of a host talk through its memory, not by NVLink"),
    "NCCL_SHM_DISABLE": Costly(("1",), "GPUs without a direct path talk over the network instead"),
    "NCCL_IB_DISABLE": Costly(("1",), "hosts talk over TCP sockets", across_nodes=True),
    "NCCL_CHECK_POINTERS": Costly(("1",), "every collective checks its pointers first"),
    "NCCL_DEBUG": Costly(("TRACE",), "every call is written to the log"),
    "TORCH_DISTRIBUTED_DEBUG": Costly(("DETAIL",), "ranks compare notes before every collective"),
    "TORCH_NCCL_BLOCKING_WAIT": Costly(YES, "the host waits for every collective"),
    "TORCH_NCCL_NAN_CHECK": Costly(YES, "one more kernel runs before every collective"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Costly(
        ("0",), "nothing ends a hung collective: launch.collective_timeout_s has no effect"
    ),
}

# What to use in place of a variable that nothing reads, or that goes by another name now.
INSTEAD: dict[str, str] = {
    "NCCL_TIMEOUT": "launch.collective_timeout_s",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "TORCH_USE_CUDA_DSA": "PYTORCH_USE_CUDA_DSA, with a torch built for it",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
}
# Torch warned of this name from 2.9 to 2.11; since 2.12 it is an alias for good (c10/core,
# AllocatorConfig.h), so it is worth no more than a note.
ALIASES = frozenset({"PYTORCH_CUDA_ALLOC_CONF"})

# Real too, but not worth a row: they must not pass for misspellings of those above.
OTHER_NAMES = frozenset(
    """
    NCCL_ALLOC_P2P_NET_LL_BUFFERS NCCL_CHECKS_DISABLE NCCL_CHECK_MODE NCCL_COLLNET_NODE_THRESHOLD
    NCCL_COMM_BLOCKING NCCL_COMM_ID NCCL_CTA_POLICY NCCL_DEBUG_LEVELS NCCL_DEBUG_TIMESTAMP_FORMAT
    NCCL_DEBUG_TIMESTAMP_LEVELS NCCL_ENV_PLUGIN NCCL_GIN_PLUGIN NCCL_RMA_PLUGIN NCCL_HOSTID
    NCCL_IB_ADDR_RANGE NCCL_IB_ECE_ENABLE NCCL_IB_OOO_RQ NCCL_IB_PKEY_VALUE NCCL_IB_RAIL_POLICY
    NCCL_IB_RETURN_ASYNC_EVENTS NCCL_LL128_NTHREADS NCCL_LOCAL_REGISTER NCCL_MAX_NRINGS
    NCCL_MIN_NRINGS NCCL_NETDEVS_POLICY NCCL_NET_FORCE_FLUSH NCCL_NET_GDR_C2C NCCL_NET_SHARED_COMMS
    NCCL_NET_MERGE_LEVEL NCCL_NET_SHARED_BUFFERS NCCL_OOB_NET_ENABLE NCCL_OOB_NET_IFNAME
    NCCL_P2P_DIRECT_DISABLE NCCL_P2P_LL_THRESHOLD NCCL_P2P_PXN_LEVEL NCCL_PXN_C2C NCCL_PAT_ENABLE
    NCCL_PROFILER_PLUGIN NCCL_RAS_ADDR NCCL_SET_THREAD_NAME NCCL_SOCKET_POLL_TIMEOUT_MSEC
    NCCL_SOCKET_RETRY_SLEEP_MSEC NCCL_VERSION NCCL_WIN_ENABLE TORCH_NCCL_BCAST_UNIQUEID
    TORCH_NCCL_DEBUG_INFO_PIPE_FILE TORCH_NCCL_RANKS_PER_ROOT TORCH_NCCL_USE_COMM_NONBLOCKING
    TORCH_FR_CPP_STACK TORCH_HOME TORCH_CUDA_ARCH_LIST TORCHINDUCTOR_COMPILE_THREADS NODE_RANK
    GROUP_RANK ROLE_RANK ROLE_WORLD_SIZE GROUP_WORLD_SIZE TORCHELASTIC_USE_AGENT_STORE
    PYTORCH_HIP_ALLOC_CONF PYTORCH_USE_CUDA_DSA CUDA_CACHE_MAXSIZE NVIDIA_TF32_OVERRIDE
    GLOO_DEVICE_TRANSPORT OMP_STACKSIZE KMP_STACKSIZE GOMP_STACKSIZE KMP_SETTINGS OMP_THREAD_LIMIT
    MKL_CBWR HSA_ENABLE_PEER_SDMA AMD_SERIALIZE_COPY GPU_MAX_HW_QUEUES RCCL_MSCCLPP_ENABLE
    FI_CXI_DEFAULT_TX_SIZE FI_LOG_LEVEL
    """.split()
)
# Other makers' libraries use NCCL's names under their own initial: HCCL_BUFFSIZE and the like.
OTHER_LIBRARIES = ("HCCL_", "MCCL_", "XCCL_")
KNOWN: dict[str, Variable] = {variable.name: variable for variable in VARIABLES}
