#!/usr/bin/env bash
# Starts Ray on one workstation, on the loopback interface only.
# Usage: ray_configs/start.sh [OBJECT_STORE_BYTES]      (`megatrain-ray plan CONFIG --json` prints object_store_bytes)
set -euo pipefail
object_store_bytes=${1:-4000000000}
# Token authentication: Ray makes a token in the home directory at the first start; the job command sends it (submit.sh).
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
token_file=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
if [ "$RAY_AUTH_MODE" = token ] && [ ! -s "$token_file" ]; then
  ray get-auth-token --generate >/dev/null
  chmod 600 "$token_file" # Ray leaves it readable to all
fi
# Every socket on 127.0.0.1. Ray replaces a loopback node address by the host's own and then listens on all interfaces,
# metrics included; with this switch, which Ray has for laptops, it does not.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
# `ray job stop` sends SIGTERM and, this many seconds later (Ray's own value is 3), SIGKILL: time for a step and a save.
export RAY_JOB_STOP_WAIT_TIME_S=${RAY_JOB_STOP_WAIT_TIME_S:-600}
# The plan keeps memory in bounds; Ray's monitor, which kills processes, is only the last resort.
export RAY_memory_usage_threshold=${RAY_memory_usage_threshold:-0.98}
# Freed values leave the object store at once: their pages, warm, serve the next ones, and memory stays what was planned.
export RAY_free_objects_period_milliseconds=20
# The store is as large as the plan says: being 80% full is no reason to copy values to disk.
export RAY_object_spilling_threshold=1.0
cd "$HOME" # Ray's dashboard imports from its working directory: not from a project
exec ray start --head --node-ip-address 127.0.0.1 --port "${RAY_PORT:-6379}" \
  --dashboard-host 127.0.0.1 --dashboard-port "${RAY_DASHBOARD_PORT:-8265}" \
  --num-cpus 2 --object-store-memory "$object_store_bytes" --disable-usage-stats ${RAY_START_OPTIONS:-}
