#!/usr/bin/env bash
# Install everything, serve SmolLM2-135M-Instruct without and with DSPARK_ADAPTIVE, ask the same questions, compare.
# Options are those of launch/quickstart.py; ADAPTIVE_PYTHON=FILE uses that interpreter and installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
HF_HUB_OFFLINE=1 exec "$PYTHON" -m sglang_adaptive.launch.quickstart "$@"
