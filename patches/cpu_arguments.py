"""CPU platform, the host's argument handling: applied in the launcher, before DSpark arguments are resolved."""

from sglang_adaptive.patches.registry import Edit, Patch

PATCHES = [
    Patch(
        target="sglang.srt.arg_groups.speculative_hook._handle_dspark",
        why="It refuses every device but CUDA, NPU and XPU; the CPU platform serves DSpark.",
        remove_when="the host asks an out-of-tree platform's supports_speculative_algorithm here, as for DFLASH.",
        kind="edit",
        edits=(
            Edit(
                old='cfg.device.startswith(("cuda", "npu", "xpu"))',
                new='cfg.device.startswith(("cuda", "npu", "xpu", "cpu"))',
            ),
        ),
    ),
]
