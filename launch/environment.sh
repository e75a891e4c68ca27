# Sourced by bash scripts: sets PYTHON to an interpreter with this checkout and everything it needs, and puts its scripts
# on PATH. The first use on a machine installs them, which takes minutes; ADAPTIVE_PYTHON=FILE takes that
# interpreter as it is and installs nothing.

_launch_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

_base_python() {
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or later is on PATH: install python3.11, or set ADAPTIVE_PYTHON." >&2
    return 1
}

if [ -n "${ADAPTIVE_PYTHON:-}" ]; then
    PYTHON=$ADAPTIVE_PYTHON
else
    _base=$(_base_python) || exit 1
    PYTHON=$("$_base" "$_launch_folder/environment.py") || exit 1
fi
PATH=$(dirname "$PYTHON"):$PATH
export PYTHON PATH
