"""A recorded forward waits for external events, once for each bucket, independent of waits outside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8_megatron.graphs import exchanges
from fp8_megatron.sharding import weight_gather
from fp8_megatron.sharding.weight_gather import WeightGather


class World:
    """Streams and events as a list of what happened."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.stream = "main"
        self.num_events = 0

    def event(self, *, external: bool) -> Any:
        assert external, "others cannot be awaited across a launch"
        name = f"event {self.num_events}"
        self.num_events += 1
        return SimpleNamespace(name=name, record=lambda: self.happened.append(f"{self.stream} records {name}"))

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_event=lambda event: self.happened.append(f"graph awaits {event.name}"))

    @contextmanager
    def side_stream(self, device: torch.device) -> Iterator[None]:
        self.stream = "side"
        yield
        self.stream = "main"

    def gather_each(self, pairs: list[Any], group: object) -> list[Any]:
        return [
            SimpleNamespace(wait=lambda index=index: self.happened.append(f"{self.stream} awaits {index}"))
            for index in range(len(pairs))
        ]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(torch.cuda, "Event", world.event)
    monkeypatch.setattr(torch.cuda, "current_stream", world.current_stream)
    monkeypatch.setattr(weight_gather, "side_stream", world.side_stream)
    monkeypatch.setattr(weight_gather, "all_gather_each", world.gather_each)
    monkeypatch.setattr(exchanges, "_recordables", {})
    return world


def make() -> WeightGather:
    """Two buckets of one storage."""
    bucket = SimpleNamespace(of_space=lambda storage, block: storage, of_shard=lambda shard, block: shard)
    replicas = SimpleNamespace(group=object())
    space = SimpleNamespace(buckets=[bucket, bucket], device=torch.device("cpu"), replicas=replicas)
    return WeightGather(space, [(torch.zeros(4), 1)])  # type: ignore[arg-type]


def happened(world: World) -> list[str]:
    """What happened since the last call."""
    events, world.happened = world.happened, []
    return events


def test_a_forward_awaits_each_bucket_once_in_a_recording(world: World) -> None:
    gather = make()
    gather.start([torch.ones(2)])
    gather.wait_for(0)
    assert happened(world) == ["main awaits 0"]
    gather.before_recording()
    assert happened(world) == ["main awaits 1", "main records event 0", "main records event 1"]
    with exchanges.recording():
        for bucket in (0, 1, 0, 1):  # two micro-batches
            gather.wait_for(bucket)
    assert happened(world) == ["graph awaits event 0", "graph awaits event 1"]


def test_what_is_sent_after_it_is_announced_to_launches_and_to_others(world: World) -> None:
    gather = make()
    gather.before_recording()
    happened(world)
    gather.start([torch.ones(2)])
    announced = ["side awaits 0", "side records event 0", "side awaits 1", "side records event 1"]
    assert happened(world) == announced
    gather.wait_for(1)  # validation, between launches
    gather.wait()
    assert happened(world) == ["main awaits 1", "main awaits 0"]
    gather.before_recording()  # of another kind of step
    with exchanges.recording():
        gather.wait_for(1)
    assert happened(world)[-1] == "graph awaits event 1" and world.num_events == 2


def test_without_a_recording_nothing_is_announced(world: World) -> None:
    gather = make()
    gather.start([torch.ones(2)])
    assert happened(world) == []


def test_shards_of_recorded_steps_have_room_that_lasts(world: World) -> None:
    """The allocator would give a shard's memory away before a launch has waited for its bytes."""
    gather = make()
    assert gather.room(8, torch.uint8).data_ptr() != (other := gather.room(8, torch.uint8)).data_ptr()
    gather.before_recording()
    room = gather.room(8, torch.uint8)
    assert room.shape == other.shape and room.dtype == other.dtype
    gather.start([room])
    happened(world)
    assert gather.room(8, torch.uint8) is room
    assert happened(world) == ["main awaits 0", "main awaits 1"]
