#!/bin/bash
# Trains on several hosts that are reached by ssh, one process per host; the first host coordinates.
#
#     ./train_ssh.sh host-a host-b -- --config=my_config.py --config.checkpoint_dir=/shared/runs/first
#
# Everything after `--` goes to `maxtext-olmo train`. The hosts need the same environment and paths:
# this script runs the command in the current directory of each host. SIGTERM to this script stops
# the run, which saves and can be started again (exit code 75). The batch (global_batch_size_to_load)
# must be a multiple of the number of GPUs.
set -u

port=${PORT:-8476}
command=${COMMAND:-maxtext-olmo train}
hosts=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
  hosts+=("$1")
  shift
done
if [ ${#hosts[@]} -eq 0 ] || [ $# -eq 0 ]; then
  echo "usage: $0 HOST... -- TRAINER FLAGS" >&2
  exit 2
fi
shift

run="olmo-$$-$RANDOM"
flags=$(printf ' %q' "$@")
directory=$(printf '%q' "$PWD")

# Starts one process on a host. Its shell writes down its process id and then becomes the trainer.
start() {
  local host=$1 process=$2
  ssh -o BatchMode=yes "$host" "cd $directory && echo \$\$ > /tmp/$run-$process.pid \
    && exec env JAX_COORDINATOR_ADDRESS=${hosts[0]}:$port JAX_NUM_PROCESSES=${#hosts[@]} \
    JAX_PROCESS_ID=$process $command$flags"
}

# Sends a signal to the processes on all hosts, which ssh does not do.
send() {
  for i in "${!hosts[@]}"; do
    ssh -o BatchMode=yes "${hosts[$i]}" "kill -$1 \$(cat /tmp/$run-$i.pid)" 2> /dev/null &
  done
}

interrupted=
trap 'interrupted=1; send TERM' TERM INT
sessions=()
for i in "${!hosts[@]}"; do
  start "${hosts[$i]}" "$i" &
  sessions+=($!)
done

code=0
for session in "${sessions[@]}"; do
  while
    interrupted=
    wait "$session"
    status=$?
    [ "$interrupted" ]  # A signal interrupts `wait` but not the session.
  do :; done
  if [ "$code" -eq 0 ]; then
    code=$status
  fi
done
for i in "${!hosts[@]}"; do
  ssh -o BatchMode=yes "${hosts[$i]}" "rm -f /tmp/$run-$i.pid"
done
if [ "$code" -eq 75 ]; then
  echo "stopped by SIGTERM and saved; start again to continue" >&2
fi
exit "$code"
