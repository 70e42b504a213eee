#!/usr/bin/env bash
# A real SLURM on this one machine, for tests and for trying things out. Needs root and Debian's
# packages: slurmctld slurmd slurm-client munge (start installs them where they are missing).
#
#   eval "$(slurm/dev_cluster.sh start)"     starts it and sets SLURM_CONF and BENCH_DEV_CLUSTER
#   slurm/dev_cluster.sh stop                stops the one that BENCH_DEV_CLUSTER names
#
# Two nodes with one pretend GPU each, a partition `main` and a partition `high` that preempts it.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }

install() {
  command -v slurmctld slurmd munged squeue >/dev/null && return
  say "installing SLURM"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq >&2
  apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge >&2
}

configure() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/MemTotal/ {print int($2 / 1024 / 2)}' /proc/meminfo)
  for node in 1 2; do mknod "$place/nvidia$node" c 1 3; done
  cat >"$place/gres.conf" <<CONF
AutoDetect=off
NodeName=dev1 Name=gpu Type=h100 File=$place/nvidia1
NodeName=dev2 Name=gpu Type=h100 File=$place/nvidia2
CONF
  cat >"$place/slurm.conf" <<CONF
ClusterName=dev
SlurmctldHost=$(hostname)
SlurmctldPort=$((port))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$place/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation=$place/state
SlurmdSpoolDir=$place/spool-%n
SlurmctldPidFile=$place/slurmctld.pid
SlurmdPidFile=$place/slurmd-%n.pid
SlurmctldLogFile=$place/slurmctld.log
SlurmdLogFile=$place/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=3
MessageTimeout=30
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
NodeName=dev1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=$cores RealMemory=$memory Gres=gpu:h100:1 State=UNKNOWN
NodeName=dev2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=$cores RealMemory=$memory Gres=gpu:h100:1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=10
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
CONF
}

start() {
  install
  place=$(mktemp -d -t dev-cluster-XXXXXX)
  chmod 755 "$place"
  mkdir "$place/state" "$place/spool-dev1" "$place/spool-dev2"
  port=$((20000 + RANDOM % 20000))
  configure
  dd if=/dev/urandom of="$place/munge.key" bs=1024 count=1 status=none
  chmod 600 "$place/munge.key"
  munged --force --key-file="$place/munge.key" --socket="$place/munge.socket" \
    --pid-file="$place/munge.pid" --log-file="$place/munge.log" --seed-file="$place/munge.seed" >&2
  export SLURM_CONF=$place/slurm.conf
  slurmctld -c -f "$SLURM_CONF" >&2
  for node in dev1 dev2; do slurmd -N "$node" -f "$SLURM_CONF" >&2; done
  for _ in $(seq 60); do
    if [ "$(sinfo -h -N -p main -t idle -o %N 2>/dev/null | wc -l)" = 2 ]; then
      printf 'export SLURM_CONF=%q BENCH_DEV_CLUSTER=%q\n' "$SLURM_CONF" "$place"
      return
    fi
    sleep 0.5
  done
  say "the nodes did not come up; see the logs in $place"
  BENCH_DEV_CLUSTER=$place stop
  exit 1
}

# Only what this cluster started, by the pid files it wrote.
stop() {
  local place=${BENCH_DEV_CLUSTER:?names the folder of the cluster to stop} pid
  export SLURM_CONF=$place/slurm.conf
  scancel --user=root >/dev/null 2>&1 || true
  for name in slurmd-dev1 slurmd-dev2 slurmctld munge; do
    [ -s "$place/$name.pid" ] || continue
    pid=$(<"$place/$name.pid")
    kill "$pid" 2>/dev/null || continue
    for _ in $(seq 40); do kill -0 "$pid" 2>/dev/null || break; sleep 0.25; done
    kill -9 "$pid" 2>/dev/null || true
  done
  rm -rf "$place"
}

case ${1:-} in
  start) start ;;
  stop) stop ;;
  *) say "usage: $0 start|stop"; exit 2 ;;
esac
