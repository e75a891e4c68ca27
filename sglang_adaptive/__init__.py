"""Load-aware speculative decoding for SGLang."""

__version__ = "0.1.0"
HOST_VERSION = "0.5.23"
ALGORITHM = "DSPARK_ADAPTIVE"
