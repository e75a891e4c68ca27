"""Where the host is installed and which release it is, found without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from sglang_adaptive import HOST_VERSION
from sglang_adaptive.errors import AdaptiveError

PACKAGE = "sglang"


def root() -> Path:
    """Folder that holds the host's package. Raises AdaptiveError when it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise AdaptiveError(f"SGLang is not installed: pip install sglang=={HOST_VERSION}.")
    return Path(next(iter(spec.submodule_search_locations))).parent


def version() -> str:
    """The installed release. Raises AdaptiveError when there is none."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise AdaptiveError(f"SGLang is not installed: pip install sglang=={HOST_VERSION}.") from None


def require_version() -> None:
    """Raise AdaptiveError unless the installed release is the pinned one."""
    found = version()
    if found != HOST_VERSION:
        raise AdaptiveError(
            f"sglang_adaptive relies on internals of SGLang {HOST_VERSION}, but {found} is installed: "
            f"pip install sglang=={HOST_VERSION}."
        )
