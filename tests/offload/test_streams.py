"""Copies that still run after wait(), as those of a GPU's stream do."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from reference_torch.offload.link import Copy, Link, OffloadError, StreamCopy
from reference_torch.offload.statistics import OffloadStatistics
from reference_torch.offload.storage import OffloadedStorage, host_value
from tests.offload.support import LAYERS, batch, build


class LateLink(Link):
    """A link whose copies run, in order, when one of them is synchronized; each takes its source at once."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waiting: list = []

    def copy(self, target, source):
        bytes_now = source.clone() if source.nbytes() else source
        self.waiting.append(lambda: target.copy_(bytes_now))
        return LateCopy(self)


class LateCopy(Copy):
    def __init__(self, link: LateLink) -> None:
        super().__init__()
        self._link = link

    def wait(self) -> None:
        """Return at once: only the stream waits."""

    def synchronize(self) -> None:
        for run in self._link.waiting:
            run()
        self._link.waiting.clear()


def on_host(link: LateLink) -> tuple[nn.Parameter, OffloadedStorage]:
    """Return a parameter that was written and evicted, and its storage."""
    parameter = nn.Parameter(torch.zeros(8))
    storage = OffloadedStorage("weight", [parameter], link)
    with torch.no_grad():
        parameter.add_(1.0)
    assert storage.evict() == storage.nbytes
    storage.finish_eviction()
    return parameter, storage


def test_a_host_copy_is_read_and_written_after_the_copy_to_it_has_ended():
    link = LateLink()
    parameter, _ = on_host(link)
    seen = host_value(parameter)
    assert torch.equal(seen, torch.ones(8))
    seen.fill_(3.0)
    LateCopy(link).synchronize()
    assert torch.equal(host_value(parameter), torch.full((8,), 3.0)), "a late copy has overwritten it"


def test_a_host_copy_is_written_after_the_copy_from_it_has_ended():
    link = LateLink()
    parameter, storage = on_host(link)
    host_value(parameter)
    storage.fetch()
    storage.wait_for_fetch()
    storage._host_versions = storage._version
    assert storage.evict() == 0, "unchanged"
    host_value(parameter)
    assert not link.waiting


def test_a_copy_that_fails_when_the_host_copy_is_read_is_repeated():
    """Otherwise the next eviction would take the old host copy for the current one, and drop the written value."""
    parameter = nn.Parameter(torch.zeros(8))
    link = Link(torch.device("cpu"))
    storage = OffloadedStorage("weight", [parameter], link)
    with torch.no_grad():
        parameter.add_(1.0)
    link.delay = lambda nbytes: "no number"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(OffloadError, match="copy: expected to move bytes"):
        storage.host_view(parameter)
    link.delay = None
    storage.evict()
    storage.finish_eviction()
    assert torch.equal(host_value(parameter), torch.ones(8))


def test_the_stream_of_the_copied_device_waits(monkeypatch):
    """Another GPU may be the current one."""
    asked = []
    stream = SimpleNamespace(wait_event=lambda event: asked.append(event))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: asked.append(device) or stream)
    device = torch.device("cuda", 1)
    StreamCopy("event", device).wait()
    assert asked == [device, "event"]


def test_the_waits_of_a_device_are_measured_in_its_stream(monkeypatch):
    """Those that have ended are added without waiting for the others."""
    device = torch.device("cuda", 1)
    synchronized = []
    numbers = itertools.count()

    class Event:
        def __init__(self, enable_timing):
            self.stream = None

        def record(self, stream=None):
            self.stream = stream

        def query(self):
            """Every second event has not ended when it is asked first."""
            self.asked = getattr(self, "asked", 0) + 1
            return self.asked > 1 or next(numbers) % 2 == 0

        def synchronize(self):
            synchronized.append(self)

        def elapsed_time(self, end):
            assert self.stream == end.stream == device
            return 1000.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    statistics = OffloadStatistics()
    for _ in range(1001):
        with statistics.measure_wait(device):
            pass
    assert not synchronized
    assert statistics._waited == 501
    assert statistics.seconds_waited == 1001


@pytest.mark.gpu
def test_trained_on_a_gpu_with_slow_copies_the_parameters_are_the_same(managers):
    """Host copies are read right after the step, while the copies to the host still run."""
    plain, ours = build().cuda(), build().cuda()
    manager = managers(ours, 1, optimizer_state=True, gradients=True)
    manager.set_link_delay(lambda nbytes: 1e-3)
    for model in (plain, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            optimizer.zero_grad()
            model(batch(number).cuda()).square().sum().backward()
            optimizer.step() if model is plain else manager.step(optimizer)
    for number in range(LAYERS):
        for name, expected in plain.layers[number].named_parameters():
            assert torch.equal(host_value(ours.layers[number].get_parameter(name)).cpu(), expected.cpu()), name
