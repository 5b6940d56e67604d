"""Environment variables that people set, and those that cost them nights: plain data for the rules
in lint.py. Names are from NCCL's guide and sources up to 2.31, torch 2.13, CUDA, OpenMP, MKL, ROCm
and libfabric, not all of them: docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html,
docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html and the pages beside them.
"""

# Real names: a name that is one letter off one of them is a slip.
REAL = frozenset(
    """
    AMD_SERIALIZE_KERNEL CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER
    CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_VISIBLE_DEVICES FI_CXI_ATS
    FI_CXI_DEFAULT_CQ_SIZE FI_CXI_RX_MATCH_MODE FI_EFA_USE_DEVICE_RDMA FI_PROVIDER
    GLOO_SOCKET_IFNAME HIP_LAUNCH_BLOCKING HIP_VISIBLE_DEVICES HSA_ENABLE_SDMA
    HSA_OVERRIDE_GFX_VERSION KMP_AFFINITY LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
    MIOPEN_CUSTOM_CACHE_DIR MIOPEN_DISABLE_CACHE MIOPEN_FIND_ENFORCE MIOPEN_FIND_MODE
    MIOPEN_LOG_LEVEL MIOPEN_USER_DB_PATH MKL_NUM_THREADS NCCL_ALGO NCCL_BUFFSIZE
    NCCL_CHECK_POINTERS NCCL_COLLNET_ENABLE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE
    NCCL_CUMEM_HOST_ENABLE NCCL_DEBUG NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_DMABUF_ENABLE
    NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_ADDR_FAMILY NCCL_IB_AR_THRESHOLD NCCL_IB_DISABLE
    NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_PKEY
    NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL NCCL_IB_TC
    NCCL_IB_TIMEOUT NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_NET
    NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NET_PLUGIN NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS
    NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_P2P_NET_CHUNKSIZE NCCL_PROTO NCCL_PSK
    NCCL_PXN_DISABLE NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS
    NCCL_SOCKET_RETRY_CNT NCCL_TOPO_DUMP_FILE NCCL_TOPO_FILE NCCL_TUNER_PLUGIN OMP_NUM_THREADS
    OMP_PLACES OMP_PROC_BIND OMP_WAIT_POLICY PYTORCH_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING
    RANK RCCL_MSCCL_ENABLE ROCR_VISIBLE_DEVICES TORCHDYNAMO_DISABLE TORCHELASTIC_ERROR_FILE
    TORCHELASTIC_RUN_ID TORCHINDUCTOR_CACHE_DIR TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    TORCH_COMPILE_DISABLE TORCH_CPP_LOG_LEVEL TORCH_DISTRIBUTED_DEBUG TORCH_LOGS
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT
    TORCH_NCCL_DEBUG_INFO_TEMP_FILE TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_DUMP_ON_TIMEOUT
    TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC
    TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_NAN_CHECK TORCH_NCCL_PROPAGATE_ERROR
    TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_TRACE_CPP_STACK TORCH_SHOW_CPP_STACKTRACES
    WORLD_SIZE
    """.split()
)
# Other makers' libraries use NCCL's names under their own initial: HCCL_BUFFSIZE and the like.
OTHER_LIBRARIES = ("HCCL_", "MCCL_", "XCCL_")

# Names that people set and nothing reads: why, and what to use in their place.
UNREAD: dict[str, tuple[str, str]] = {
    "NCCL_TIMEOUT": (
        "a collective's timeout is an argument of torch's process group",
        "launch.collective_timeout_s",
    ),
    "NCCL_IB_GDR_LEVEL": ("it was renamed in NCCL 2.4", "NCCL_NET_GDR_LEVEL"),
    "NCCL_IB_CUDA_SUPPORT": ("it was removed in NCCL 2.4", "NCCL_NET_GDR_LEVEL"),
    "NCCL_LL_THRESHOLD": ("it was removed in NCCL 2.5", "NCCL_PROTO"),
    "NCCL_TREE_THRESHOLD": ("it was removed in NCCL 2.5", "NCCL_ALGO"),
    "TORCH_USE_CUDA_DSA": ("it is a switch for building torch", "PYTORCH_USE_CUDA_DSA"),
}
# Old names that torch still reads. The last is an alias for good since torch 2.12.
RENAMED: dict[str, str] = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
}
ALIASES = ("PYTORCH_CUDA_ALLOC_CONF",)

# Values that do what they say, at a price that NCCL's guide and torch's headers state.
YES = ("1", "y", "yes", "t", "true")
COSTLY: dict[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "the host waits for every kernel: nothing overlaps"),
    "HIP_LAUNCH_BLOCKING": (("1",), "the host waits for every kernel: nothing overlaps"),
    "AMD_SERIALIZE_KERNEL": (("1", "2", "3"), "kernels wait for each other: none overlap"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "every tensor asks the driver for memory"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs of a host talk through its memory, not by NVLink"),
    "NCCL_SHM_DISABLE": (("1",), "GPUs without a direct path talk over the network instead"),
    "NCCL_IB_DISABLE": (("1",), "hosts talk over TCP sockets"),
    "NCCL_CHECK_POINTERS": (("1",), "every collective checks its pointers first"),
    "NCCL_DEBUG": (("trace",), "every call is written to the log"),
    "TORCH_DISTRIBUTED_DEBUG": (("detail",), "ranks compare notes before every collective"),
    "TORCH_NCCL_BLOCKING_WAIT": (YES, "the host waits for every collective"),
    "TORCH_NCCL_NAN_CHECK": (YES, "one more kernel runs before every collective"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        ("0",), "nothing ends a hung collective: launch.collective_timeout_s has no effect"
    ),
}  # fmt: skip
ACROSS_NODES = ("NCCL_IB_DISABLE",)  # costs nothing on one host

# Where the first is 1, the others do nothing.
SWITCHED_OFF: dict[str, tuple[str, ...]] = {
    "NCCL_P2P_DISABLE": ("NCCL_P2P_LEVEL",),
    "NCCL_IB_DISABLE": ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT", "NCCL_IB_TC"),
}
# What NCCL_ALGO and NCCL_PROTO are made of. Since NCCL 2.24 one unknown word is an error (parseList
# in src/graph/tuning.cc).
FUNCTIONS = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
NCCL_WORDS: dict[str, tuple[str, ...]] = {
    "NCCL_ALGO": ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"),
    "NCCL_PROTO": ("LL", "LL128", "Simple"),
}
