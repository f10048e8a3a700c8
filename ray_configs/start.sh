#!/usr/bin/env bash
# Starts Ray on one workstation, on the loopback interface only, and waits until it takes jobs.
# Usage: ray_configs/start.sh [OBJECT_STORE_BYTES]      (`megatrain-ray plan CONFIG --json` prints object_store_bytes)
# Environment: RAY_PORT (6379), RAY_DASHBOARD_PORT (8265), RAY_TEMP_DIR (/tmp/ray), RAY_START_OPTIONS (of `ray start`).
set -euo pipefail
object_store_bytes=${1:-4000000000}
# Token authentication: a token in the home directory, made at the first start; the job command sends it (submit.sh).
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
if [ "$RAY_AUTH_MODE" = token ] && [ -z "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] && [ ! -s "$HOME/.ray/auth_token" ]; then
  (umask 077 && ray get-auth-token --generate >/dev/null) # nobody else may read it
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
dashboard=http://127.0.0.1:${RAY_DASHBOARD_PORT:-8265}

# Ray's job agent is ready some seconds after `ray start` has returned; until then a submission fails.
await_agent() {
  local deadline=$((SECONDS + 120)) job said
  until job=start-check-$$-$SECONDS && said=$(timeout 60 ray job submit --address "$dashboard" --submission-id "$job" -- true 2>&1); do
    if ((SECONDS > deadline)); then
      printf 'error: Ray at %s takes no jobs; its logs are in %s/session_latest/logs. The last answer:\n%s\n' \
        "$dashboard" "${RAY_TEMP_DIR:-/tmp/ray}" "$(tail -n 3 <<<"$said")" >&2
      return 1
    fi
    sleep 1
  done
  ray job delete --address "$dashboard" "$job" >/dev/null 2>&1 || true
  echo "Ray takes jobs at $dashboard"
}

# RAY_START_OPTIONS may open Ray to others: that is said.
for option in dashboard-host node-ip-address; do
  [[ " ${RAY_START_OPTIONS:-}" =~ .*[[:space:]]--$option[[:space:]=]+([^[:space:]]+) ]] || continue # the last one counts
  host=${BASH_REMATCH[1]}
  [[ $host =~ ^(127\.[0-9.]+|localhost|::1)$ ]] ||
    echo "warning: --$option $host is not the loopback interface: anyone who reaches its ports runs code as you" >&2
done

cd "$HOME" # Ray's dashboard imports from its working directory: not from a project
start=(ray start --head --node-ip-address 127.0.0.1 --port "${RAY_PORT:-6379}"
  --dashboard-host 127.0.0.1 --dashboard-port "${RAY_DASHBOARD_PORT:-8265}" --dashboard-agent-listen-port 0 --temp-dir "${RAY_TEMP_DIR:-/tmp/ray}"
  --num-cpus 2 --object-store-memory "$object_store_bytes" --disable-usage-stats ${RAY_START_OPTIONS:-})
if [[ " ${RAY_START_OPTIONS:-} " == *" --block "* ]]; then # as a service: Ray is this process
  await_agent &
  exec "${start[@]}"
fi
"${start[@]}"
await_agent
