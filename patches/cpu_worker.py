"""CPU platform, the DSpark worker: applied in the scheduler process before the worker is built."""

from sglang_adaptive.patches.registry import Edit, Patch

PATCHES = [
    Patch(
        target="sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2._forward_decode",
        why="It calls Tensor.record_stream, which rejects CPU streams; nothing on a CPU runs asynchronously.",
        remove_when="the host guards the call by device, as it does in its relay.",
        kind="edit",
        edits=(
            Edit(
                old="    batch.seq_lens.record_stream(\n"
                "        torch.get_device_module(self.device).current_stream()\n"
                "    )\n",
                new="",
            ),
        ),
    ),
]
