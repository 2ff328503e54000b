#!/bin/bash
# Starts MaxText with this package's data on GKE, with xpk, on one or more TPU slices.
#
#     CLUSTER=my-cluster IMAGE=registry.example/maxtext-olmo:latest ./xpk_maxtext.sh first \
#         dataset_type=olmo_grain olmo_index_path=gs://bucket/olmo-mix/index.json \
#         base_output_directory=gs://bucket/runs model_name=olmo3-7b max_target_length=8192 \
#         per_device_batch_size=1
#
# The first argument is the name of the run; the others go to MaxText, which connects the processes
# itself. When a host is reclaimed or fails, xpk starts all hosts again, up to --max-restarts times,
# and the run resumes from its last checkpoint.
set -eu

: "${CLUSTER:?the name of the GKE cluster}"
: "${IMAGE:?a container image with MaxText and maxtext_olmo}"
name=${1:?usage: $0 RUN_NAME key=value...}
shift

exec xpk workload create \
  --cluster="$CLUSTER" \
  --workload="$name" \
  --docker-image="$IMAGE" \
  --tpu-type="${TPU_TYPE:-v5litepod-256}" \
  --num-slices="${SLICES:-1}" \
  --max-restarts="${RESTARTS:-100}" \
  --restart-on-exit-codes=75 \
  --termination-grace-period-seconds=300 \
  --command="exec maxtext-olmo maxtext train base.yml run_name=$name$(printf ' %q' "$@")"
