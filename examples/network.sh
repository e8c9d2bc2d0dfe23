# Network settings of NCCL, RCCL and gloo, for bash to source on each node before a rank starts:
#
#     . examples/network.sh
#
# What is set already stays as it is. No cluster has run this yet: NCCL_DEBUG=INFO tells what NCCL uses.
# NETWORK_ROOT: another root than /, for tests.

_devices=${NETWORK_ROOT:-}/sys/class
if [ -d "$_devices/cxi" ]; then  # HPE Slingshot
  _first=$(cd "$_devices/net" && ls -d hsn* 2>/dev/null | head -n 1 || true)
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-hsn}  # all interfaces whose names begin so
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-${_first:-hsn0}}
  export NCCL_NET=${NCCL_NET:-AWS Libfabric}  # the plugin aws-ofi-nccl must be on LD_LIBRARY_PATH
  export NCCL_CROSS_NIC=${NCCL_CROSS_NIC:-1}
  export FI_PROVIDER=${FI_PROVIDER:-cxi}
  export FI_MR_CACHE_MONITOR=${FI_MR_CACHE_MONITOR:-userfaultfd}
  export FI_CXI_DISABLE_HOST_REGISTER=${FI_CXI_DISABLE_HOST_REGISTER:-1}
  # Many ranks: large queues of completions, and messages that are matched in software where the
  # hardware has no room.
  export FI_CXI_DEFAULT_CQ_SIZE=${FI_CXI_DEFAULT_CQ_SIZE:-131072}
  export FI_CXI_RX_MATCH_MODE=${FI_CXI_RX_MATCH_MODE:-hybrid}
elif [ -n "$(ls "$_devices/infiniband" 2>/dev/null)" ]; then  # InfiniBand, or RoCE
  _first=$(cd "$_devices/net" && ls -d ib* 2>/dev/null | head -n 1 || true)
  if [ -n "$_first" ]; then  # IP over InfiniBand, for what is not RDMA
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$_first}
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$_first}
  fi
  export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}  # longer than a switch's routes take to change
fi
unset _devices _first
