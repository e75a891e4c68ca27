"""The host's preparation of a decode step with our edit gives what it gave without."""

from __future__ import annotations

import inspect
import textwrap

import torch
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

from sglang_adaptive.patches import decode_lengths
from sglang_adaptive.patches.registry import edited_source


def test_arrays_write_into_the_tensors():
    tensors = [torch.zeros(3, dtype=dtype) for dtype in (torch.int32, torch.int64)]
    for array in decode_lengths.arrays(*tensors):
        array[1] = 7
    assert [tensor.tolist() for tensor in tensors] == [[0, 7, 0]] * 2


def test_no_element_of_a_tensor_is_written_by_the_loop_any_more():
    (patch,) = decode_lengths.PATCHES
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(DFlashDraftInputV2.prepare_for_decode)))
    edited = edited_source(source, patch.edits, patch.target)
    compile(edited, "edited", "exec")
    assert "_t[i] =" in source and "_t[i] =" not in edited
    assert edited.count("_row[i] =") == 3
