"""Load-aware speculative decoding for SGLang."""

from pathlib import Path

__version__ = "0.1.0"
HOST_VERSION = "0.5.23"
ALGORITHM = "DSPARK_ADAPTIVE"

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "patches" / "registry.py").is_file():
    # A checkout: patches, launch and benchmarks stand beside this folder. Whoever starts Python in there imports this
    # folder instead of the installed package, which has them inside.
    __path__.append(str(_checkout))
