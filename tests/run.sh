#!/usr/bin/env bash
# The README's test command: lint, types and tests in the project's own environment. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
HF_HUB_OFFLINE=1 exec "$PYTHON" -m pytest "$@"
