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
room=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo 2>/dev/null || true)
room=${room:-0}
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || true)
if [[ $limit =~ ^[0-9]+$ ]] && ((limit >> 30 < room)); then room=$((limit >> 30)); fi
if [ $# -gt 0 ] || [ -n "${PYTEST_ADDOPTS:-}" ] || [ "$(nproc 2>/dev/null || echo 1)" -lt 2 ] || [ "$room" -lt 18 ]; then
    exec "$PYTHON" -m pytest "$@"
fi

output=$(mktemp)
export ADAPTIVE_TEST_THREADS=1
set -m # each in a group of its own, so that it can be ended as a whole
"$PYTHON" -m pytest --durations=12 "${half[@]}" >"$output" 2>&1 </dev/null &
first=$!
"$PYTHON" -m pytest --durations=12 "${half[@]/#/--ignore=}" </dev/null &
second=$!
set +m
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'kill -INT -- "-$first" "-$second" 2>/dev/null || true; wait; rm -f "$output"' EXIT
status=0
wait "$second" || status=$?
echo "The half that ran beside it:"
wait "$first" || status=$?
cat "$output"
exit "$status"
