#!/usr/bin/env bash
# Submits a training run to the Ray that start.sh has started and follows its log; exits 0 when the run succeeded.
# Usage: ray_configs/submit.sh CONFIG [OPTION ...]       (from the folder that holds configuration and data)
set -euo pipefail
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
exec ray job submit --address "http://127.0.0.1:${RAY_DASHBOARD_PORT:-8265}" --working-dir . \
  --runtime-env-json '{"excludes": [".git", ".venv", ".cache", "runs", "*.safetensors"]}' \
  -- megatrain-ray train "$@"
