#!/usr/bin/env bash
# The README's test command: lint, types and tests in the project's own environment. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
export HF_HUB_OFFLINE=1

# Tests of servers wait much, above all while one starts: two halves run side by side where there is room for the
# servers of both. One has the files that share the adaptive server, the other everything else.
mapfile -t half < <(grep -lwE 'adaptive_server|dear_costs' tests/e2e/test_*.py)
room=$(awk '/^MemAvailable/ {print int($2 / 2 ** 20)}' /proc/meminfo 2>/dev/null || echo 0)
if [ $# -gt 0 ] || [ "$(nproc 2>/dev/null || echo 1)" -lt 2 ] || [ "${room:-0}" -lt 18 ]; then
    exec "$PYTHON" -m pytest "$@"
fi

output=$(mktemp)
# In a group of its own, so that it can be ended as a whole; it yields to the other, where some tests look at the clock.
set -m
nice -n 5 "$PYTHON" -m pytest --durations=12 "${half[@]}" >"$output" 2>&1 </dev/null &
set +m
other=$!
trap 'kill -INT -- "-$other" 2>/dev/null || true; wait "$other" || true; rm -f "$output"' EXIT
status=0
"$PYTHON" -m pytest --durations=12 "${half[@]/#/--ignore=}" || status=$?
echo "The half that ran beside it:"
wait "$other" || status=$?
cat "$output"
exit "$status"
