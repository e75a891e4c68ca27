"""What the start-up profile takes for the time of a call on a GPU, on a made-up host and device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_adaptive.runtime import profiler


class World:
    """A host that launches and a device that works through what was launched; times in ms."""

    def __init__(self, host_ms: float, device_ms: float, slow_launches: tuple[int, ...] = ()) -> None:
        self.host_ms, self.device_ms, self.slow_launches = host_ms, device_ms, slow_launches
        self.now = self.device_done = 0.0
        self.calls = 0

    def call(self) -> None:
        # Launched bit by bit: the device begins when it is free, and ends no sooner than the last launch.
        begin = max(self.device_done, self.now)
        self.now += self.host_ms * (20.0 if self.calls in self.slow_launches else 1.0)
        self.device_done = max(begin + self.device_ms, self.now)
        self.calls += 1

    def sleep(self, cycles: int) -> None:
        self.device_done = max(self.device_done, self.now) + cycles / profiler._CYCLES_PER_MS

    def synchronize(self) -> None:
        self.now = max(self.now, self.device_done)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        made = SimpleNamespace(at=0.0, synchronize=self.synchronize)
        made.record = lambda: setattr(made, "at", max(self.now, self.device_done))
        made.elapsed_time = lambda other: other.at - made.at
        return made


def measured(world: World, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr(profiler, "_broadcast", lambda value: value)
    monkeypatch.setattr(profiler, "time", SimpleNamespace(perf_counter=lambda: world.now / 1e3))
    cuda = SimpleNamespace(Event=world.event, _sleep=world.sleep, synchronize=world.synchronize)
    monkeypatch.setattr(profiler.torch, "cuda", cuda)
    timer = object.__new__(profiler._Timer)
    timer._cuda, timer._calls = True, {"draft": lambda count, kv_length: world.call}
    return timer._time("draft", 1, 0)


@pytest.mark.parametrize(("host_ms", "device_ms"), [(3.0, 1.0), (1.0, 5.0), (2.0, 2.0)])
def test_it_is_the_longer_one_of_the_two(host_ms, device_ms, monkeypatch):
    times = measured(World(host_ms, device_ms), monkeypatch)
    assert times == pytest.approx([max(host_ms, device_ms)] * len(times))
    assert len(times) == profiler.DEVICE_REPLAYS


def test_a_launch_that_was_interrupted_does_not_count(monkeypatch):
    """The first one gives the head start; a later one lets the device wait, which the median drops."""
    assert set(measured(World(1.0, 4.0, slow_launches=(1,)), monkeypatch)) == {4.0}
    times = measured(World(1.0, 4.0, slow_launches=(3,)), monkeypatch)
    assert sorted(times)[len(times) // 2] == 4.0
