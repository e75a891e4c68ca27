"""Entry point ``sglang.srt.plugins``: registration, and nothing else.

The host calls this in every one of its processes, whatever algorithm is selected. It makes the name DSPARK_ADAPTIVE
known and hangs two steps into the resolution of the server arguments; both do nothing for any other algorithm. Nothing
of the host is patched here, and no module beyond this one and ``activation`` is imported.
"""

from __future__ import annotations

_registered = False


def register() -> None:
    """Register the algorithm and the resolution steps. Idempotent."""
    global _registered
    if _registered:
        return
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_adaptive import ALGORITHM, activation

    SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=activation.family_class())(
        activation.worker_class
    )
    # The first step of the resolution: whatever reads the algorithm later reads the drafter's family.
    register_resolution_hook("handle_deprecated_dp_attention")(activation.resolve_family)
    register_resolution_hook("handle_speculative_decoding")(activation.check_after_resolution)
    _registered = True
