#!/usr/bin/env bash
# One lab on machines that ssh reaches without a password: docs/labs/ssh.sh "node0 node1" l2 --tokens 131072
# ringlab and its environment lie at the same path on all of them; activate the environment here. The first machine
# writes results/. RINGLAB_JOIN: seconds for all machines to come, 120 if not said. RINGLAB_GPUS: processes of each.
# RINGLAB_PORT: a free port of the first machine, 29500 if not said.
set -euo pipefail
read -ra hosts <<<"${1:?the machines, in quotes}"
lab=${2:?which lab: preflight, l1, l2 or l3}
shift 2
join=${RINGLAB_JOIN:-120}
torchrun=$(command -v torchrun) || { echo "no torchrun on PATH: activate ringlab's environment" >&2; exit 1; }
read -ra ssh <<<"${RINGLAB_SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10}"
here=$(printf %q "$(pwd)")

# torchrun starts ringlab when all machines have come, so who cannot come is to be found before.
asked=()
for host in "${hosts[@]}"; do
    "${ssh[@]}" "$host" "cd $here && test -x $(printf %q "$torchrun")" </dev/null &
    asked+=($!)
done
missing=()
for number in "${!hosts[@]}"; do
    wait "${asked[$number]}" || missing+=("${hosts[$number]}")
done
if ((${#missing[@]})); then
    echo "not ready: ${missing[*]}: ssh does not get there, or $(pwd) or $torchrun is not there" >&2
    exit 1
fi
port=${RINGLAB_PORT:-29500}
if "${ssh[@]}" "${hosts[0]}" "bash -c '(exec 3<>/dev/tcp/127.0.0.1/$port) 2>/dev/null'" </dev/null; then
    echo "port $port of ${hosts[0]} is taken, perhaps by another lab: RINGLAB_PORT=$((port + 1)) chooses another" >&2
    exit 1
fi

# The line that every ssh holds: when this script ends, however it does, it breaks, and torchrun is ended over there.
line=$(mktemp -u)
mkfifo -m 600 "$line"
trap 'rm -f "$line"' EXIT
exec 9<>"$line"
started=()
for number in "${!hosts[@]}"; do
    words=("$torchrun" --nnodes "${#hosts[@]}" --node-rank "$number" --nproc-per-node "${RINGLAB_GPUS:-gpu}"
        --master-addr "${hosts[0]}" --master-port "$port" --rdzv-conf "timeout=$join"
        -m ringlab lab "$lab" --transport "${RINGLAB_TRANSPORT:-nccl}" --nodes "${#hosts[@]}" "$@")
    there="cd $here || exit
exec 3<&0
$(printf '%q ' "${words[@]}") </dev/null 3<&- & lab=\$!
{ cat <&3 >/dev/null; kill \$lab; } 2>/dev/null & line=\$!
wait \$lab; status=\$?
kill \$line 2>/dev/null
exit \$status"
    "${ssh[@]}" "${hosts[$number]}" "bash -c $(printf %q "$there")" <"$line" 9>&- &
    started+=($!)
done
for _ in "${hosts[@]}"; do
    status=0
    wait -n -p ended "${started[@]}" || status=$?
    for number in "${!hosts[@]}"; do
        if [[ ${started[$number]:-} == "$ended" ]]; then
            unset "started[$number]"
            if ((status)); then
                echo "${hosts[$number]}: ended with status $status; the others are ended" >&2
                exit "$status"
            fi
        fi
    done
done
