"""KV memory that costs nothing until it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the kernel maps at first touch; ``torch.zeros`` writes every one of them at once."""
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


class LazyKVPool(MHATokenToKVPool):
    """The host's pool on lazily mapped memory: a server starts seconds earlier and small tests stay small."""

    def __init__(self, *args: Any, enable_kv_cache_copy: bool = False, **kwargs: Any):
        # The host moves slots with a Triton kernel when asked to prepare for it, and by plain indexing otherwise.
        super().__init__(*args, enable_kv_cache_copy=False, **kwargs)
        self.use_native_move_kv_cache = True

    def _create_buffers_normal(self) -> None:
        k_shape, v_shape = self._kv_buffer_shapes()
        self.k_buffer = [lazy_zeros(k_shape, self.store_dtype) for _ in range(self.layer_num)]
        self.v_buffer = [lazy_zeros(v_shape, self.store_dtype) for _ in range(self.layer_num)]
