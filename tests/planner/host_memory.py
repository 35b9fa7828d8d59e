"""Host memory and copies of offload that PyTorch's profiler does not take for those of the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from reference_torch.offload.link import Copy, Link


def _allocate_outside(link: Link, nbytes: int) -> torch.UntypedStorage:
    """Memory that PyTorch did not allocate."""
    return torch.from_numpy(np.empty(nbytes, np.uint8)).untyped_storage()


def _copy_here(link: Link, target: torch.UntypedStorage, source: torch.UntypedStorage) -> Copy:
    """Copy on this thread: the profiler does not see what another one frees."""
    as_bytes = [torch.empty(0, dtype=torch.uint8).set_(each) for each in (target, source)]
    as_bytes[0].copy_(as_bytes[1])
    copy = Copy(None)
    copy.finish(None)
    return copy


@contextmanager
def uncounted_host() -> Iterator[None]:
    """Count the memory of the device alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "host_memory", _allocate_outside)
        patch.setattr(Link, "copy", _copy_here)
        yield
