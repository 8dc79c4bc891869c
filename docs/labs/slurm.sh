#!/usr/bin/env bash
# One lab on every GPU of some nodes: sbatch --nodes 2 --gpus-per-node 8 docs/labs/slurm.sh l2 --tokens 131072
# Everything after the script's name is given to `ringlab lab`; results go to results/ on a file system that all nodes see.
# Submit it from the checkout, with ringlab's environment active: SLURM takes PATH along. RINGLAB_JOIN: seconds for
# all nodes to come, 120 by default. The port follows from the number of the job; a taken one is passed over.
#SBATCH --job-name=ringlab-lab
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=00:45:00
#SBATCH --output=ringlab-%j.log
set -euo pipefail
nodes=${SLURM_JOB_NUM_NODES:-1}
join=${RINGLAB_JOIN:-120}
read -r head_node < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?run me with sbatch}")
lab=${1:?which lab: preflight, l1, l2 or l3}
shift
# torchrun starts ringlab when all nodes have come, so who cannot come is to be found before.
srun --kill-on-bad-exit=1 bash -c 'command -v torchrun >/dev/null ||
    { echo "$(hostname): no torchrun on PATH; activate the environment before sbatch" >&2; exit 1; }'
port=$((29500 + SLURM_JOB_ID % 1000))
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done # this is the head node
where=(--transport nccl --nodes "$nodes")
case $lab in
    preflight) ;;
    # A lab ends before its job does, and says where it was.
    l3) mkdir -p results && where+=(--timeout 2400 --output "results/l3-$SLURM_JOB_ID") ;;
    *) mkdir -p results && where+=(--timeout 2400 --output "results/$lab-$SLURM_JOB_ID.json") ;;
esac
# One task a node has one CPU unless more are asked for, and all its ranks would share that CPU.
exec srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --cpu-bind=none torchrun \
    --nnodes "$nodes" --nproc-per-node gpu \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head_node:$port" \
    --rdzv-conf "join_timeout=$join,timeout=$join" \
    -m ringlab lab "$lab" "${where[@]}" "$@"
