"""Tables of integers that PyTorch's kernels read on a GPU, copied from the host once per content and stream.

A copy from the host waits for the device, and CUDA rejects it in the capture of a graph. A graph therefore reads tables
that were copied before: the calls that warm it up have the same sequence offsets.
"""

from functools import lru_cache
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

_Content = tuple[torch.device, bytes, str, tuple[int, ...]]
_copied: WeakValueDictionary[_Content, Tensor] = WeakValueDictionary()
"""The last copy of each table."""
_read_by_graphs: dict[_Content, Tensor] = {}
"""Tables that captured graphs read. They are never freed, because a graph may be replayed at any time."""


def device_table(x: np.ndarray, device: torch.device) -> Tensor:
    """Return a table on a CUDA device.

    Args:
        x: the table.
        device: the device.

    Raises:
        RuntimeError: a CUDA graph is being captured, and the table was not copied before.
    """
    content = device, x.tobytes(), x.dtype.str, x.shape
    if torch.cuda.is_current_stream_capturing():
        return table_of_graph(*content)
    return copied_table(torch.cuda.current_stream(device).cuda_stream, *content)


@lru_cache(maxsize=256)
def copied_table(stream: int, device: torch.device, content: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Copy a table to a device for use on one stream, in whose order its memory is reused.

    The copy may be saved for a backward even if inference mode is on now.
    """
    del stream
    with torch.inference_mode(False):
        table = torch.from_numpy(np.frombuffer(content, dtype).reshape(shape).copy()).to(device)
    _copied[device, content, dtype, shape] = table
    return table


def table_of_graph(device: torch.device, content: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a table for the graph that is being captured."""
    key = device, content, dtype, shape
    table = _copied.get(key)
    if table is None:
        raise RuntimeError(
            "cu_seqlens: expected the sequence offsets of an earlier call in the capture of a CUDA graph, which cannot "
            "copy tables from the host, got new ones; call the function once with them before the capture"
        )
    _read_by_graphs[key] = table
    return table
