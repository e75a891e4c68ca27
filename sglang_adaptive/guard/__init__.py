"""Guards against a host that is not the one the plugin was written for."""

from sglang_adaptive.guard.fingerprints import check, require

__all__ = ["check", "require"]
