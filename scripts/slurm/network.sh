# shellcheck shell=bash
# Settings of NCCL for the network between nodes, each with its reason. A variable that is set stays as it is.
# FABRIC: ib, roce, efa, tcp, or auto (default): what /sys/class/infiniband of the first node shows.
# SOCKET_IFNAME: the interface of NCCL's and Gloo's first contact, where a node has several that do not reach the others.

fabric=${FABRIC:-auto}
if [ "$fabric" = auto ]; then
  fabric=tcp
  for device in /sys/class/infiniband/*; do
    case $(cat "$device/ports/1/link_layer" 2>/dev/null) in
      InfiniBand) fabric=ib ;;
      Ethernet) fabric=roce ;;
      Unspecified) fabric=efa ;; # EFA's ports are neither
    esac
  done
fi

# Sets a variable unless it is set.
default() { export "$1=${!1:-$2}"; }

# Warnings only. INFO shows which network NCCL has chosen: look for it once on a new cluster.
default NCCL_DEBUG WARN
if [ -n "${SOCKET_IFNAME:-}" ]; then
  default NCCL_SOCKET_IFNAME "$SOCKET_IFNAME"
  default GLOO_SOCKET_IFNAME "$SOCKET_IFNAME"
fi

case $fabric in
  ib | roce)
    # A link that flaps is back within seconds. 4.096 µs · 2^22 = 17 s a try and 7 tries (NCCL_IB_RETRY_CNT): training
    # waits instead of ending. Two minutes are below --distributed-timeout-minutes.
    default NCCL_IB_TIMEOUT 22
    # Fabrics of several switch levels hash each queue pair to a path. Several pairs a connection use several paths.
    default NCCL_IB_QPS_PER_CONNECTION 4
    # RoCE: the traffic class that the switches treat as lossless is the site's; set NCCL_IB_TC. NCCL finds the GID.
    ;;
  efa)
    # libfabric's EFA provider through the plugin aws-ofi-nccl, which must be in the container.
    default FI_PROVIDER efa
    # GPU memory goes to the adapter directly. Older libfabric asks for it on P4d; newer ones do it by themselves.
    default FI_EFA_USE_DEVICE_RDMA 1
    # Loader processes are forked. Pages that EFA has registered must survive that on kernels before 5.15.
    default FI_EFA_FORK_SAFE 1
    # Huge pages of the provider make such a fork fail with "Cannot allocate memory".
    default FI_EFA_USE_HUGE_PAGE 0
    # The container bridge reaches no other node. A single node stays at its loopback interface.
    if [ "${SLURM_JOB_NUM_NODES:-2}" -gt 1 ]; then
      default NCCL_SOCKET_IFNAME '^docker,lo,veth'
    fi
    ;;
  tcp) ;;
  *)
    echo "error: FABRIC=$fabric is none of ib, roce, efa, tcp, auto" >&2
    exit 2
    ;;
esac

# Adapters register memory, which locks it. Batch jobs often begin below the limit that they may have.
ulimit -S -l "$(ulimit -H -l)"
