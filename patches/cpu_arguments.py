"""CPU platform, the host's argument handling: applied in the launcher, before speculative arguments are resolved."""

from typing import Any

from sglang_adaptive.patches.registry import Edit, Patch


def _leave_overlap(original: Any, server_args: Any) -> None:
    return None


def _refuse_trees(result: None, server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_adaptive.platform_cpu.chains import refuse_tree

    refuse_tree(resolving_view(server_args).speculative_eagle_topk)


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
    Patch(
        target="sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility",
        why="It refuses LoRA adapters where requests verify different numbers of tokens; the CPU platform's LoRA "
        "backend takes each request's own.",
        remove_when="the host asks the LoRA backend.",
        depends=("sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch",),
        kind="edit",
        edits=(Edit(old='cfg.speculative_algorithm == "DSPARK" and ragged_mode != "static"', new="False"),),
    ),
    Patch(
        target="sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu",
        why="It turns overlapped scheduling off for EAGLE on every CPU; the CPU platform serves it, as it does DSpark.",
        remove_when="the host asks an out-of-tree platform whether it overlaps speculative decoding.",
        hook=_leave_overlap,
        kind="around",
    ),
    Patch(
        target="sglang.srt.arg_groups.speculative_hook._handle_eagle_family",
        why="It proposes draft trees for some targets by default; the CPU platform drafts chains and says so at once.",
        remove_when="the CPU platform drafts trees.",
        hook=_refuse_trees,
        kind="after",
    ),
]
