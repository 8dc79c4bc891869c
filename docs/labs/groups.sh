#!/usr/bin/env bash
# One lab for several groups at once, each on its own GPUs of this machine: docs/labs/groups.sh 2 l1 --dtype bfloat16
# 2 is the number of GPUs of a group. Group 1 has the first two GPUs and writes results/group-1/, and so on.
# RINGLAB_GPUS: the number of GPUs to share out, by default all. RINGLAB_TRANSPORT: nccl by default. With gloo no GPU is
# needed, and RINGLAB_GPUS is the number of processes.
set -euo pipefail
each=${1:?the number of GPUs of a group}
lab=${2:?which lab: preflight, l1, l2 or l3}
shift 2
command -v ringlab >/dev/null || { echo "no ringlab on PATH: activate ringlab's environment" >&2; exit 1; }
transport=${RINGLAB_TRANSPORT:-nccl}
if [ -n "${RINGLAB_GPUS:-}" ]; then
    mapfile -t gpus < <(seq 0 $((RINGLAB_GPUS - 1)))
elif [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
elif [ "$transport" != gloo ] && command -v nvidia-smi >/dev/null; then
    mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader)
else
    echo "needed: GPUs that nvidia-smi lists; without a GPU: RINGLAB_TRANSPORT=gloo RINGLAB_GPUS=4, the number of processes" >&2
    exit 1
fi
if ! [[ $each =~ ^[0-9]+$ ]] || ((each < 2 || ${#gpus[@]} < each)); then
    echo "needed: groups of 2 GPUs or more, at most as many as there are; got: groups of $each, ${#gpus[@]} GPUs" >&2
    exit 1
fi
if ((idle = ${#gpus[@]} % each)); then
    echo "groups of $each leave $idle of ${#gpus[@]} GPUs idle" >&2
fi
trap 'trap - INT TERM; kill 0' INT TERM # ends every group
started=()
for ((first = 0; first + each <= ${#gpus[@]}; first += each)); do
    folder=results/group-$((first / each + 1))
    mkdir -p "$folder"
    output=()
    case $lab in
        preflight) ;;
        l3) output=(--output "$folder/l3") ;;
        *) output=(--output "$folder/$lab.json") ;;
    esac
    devices=$(IFS=, && echo "${gpus[*]:first:each}")
    if [ "$transport" = gloo ]; then echo "$folder: $each processes"; else echo "$folder: GPUs $devices"; fi
    CUDA_VISIBLE_DEVICES=$devices ringlab lab "$lab" --transport "$transport" --ranks "$each" "${output[@]}" "$@" \
        >>"$folder/$lab.log" 2>&1 & # a second run keeps the log of the first, as it keeps its results
    started+=($!)
done
failed=0
for number in "${!started[@]}"; do
    if ! wait "${started[$number]}"; then
        failed=1
        echo "group $((number + 1)) failed; results/group-$((number + 1))/$lab.log ends with:" >&2
        tail -n 4 "results/group-$((number + 1))/$lab.log" >&2
    fi
done
exit $failed
