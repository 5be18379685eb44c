"""Slots: places, visibility, threads, and admission by memory."""

from __future__ import annotations

from typing import Any

import pytest

from auto_research.evolve import slots as module
from auto_research.evolve.records import RunConfig
from auto_research.evolve.slots import MIB, Memory, Slot, Slots, memory_of, parse_gpus, slots_for
from auto_research.runtime.errors import DeviceAbsent, UserError

SMI = "GPU-aaa, 24576, 20000\nGPU-bbb, 81920, 81000\n"


def config(device: str = "cpu", **where: Any) -> RunConfig:
    return RunConfig(run="r", workflow="w", generations=0, population=1, seeds=[0], device=device, where=where)


def test_cpu_slots_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: 2)
    made = slots_for(config(workers=2)).slots
    assert [(slot.device, slot.share, slot.threads) for slot in made] == [("cpu", 0.5, 1)] * 2
    assert made[0].environment == {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert slots_for(config()).slots[0].threads == 2
    assert slots_for(config(workers=2, cpu_threads=4)).slots[0].threads == 4


@pytest.mark.parametrize("bad", [0, -1, "two", 1.5, True])
def test_numbers_of_workers_are_checked(bad: object) -> None:
    with pytest.raises(UserError, match="workers"):
        slots_for(config(workers=bad))


def test_gpu_slots_name_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpus", lambda: parse_gpus(SMI))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = slots_for(config("cuda", gpu_slots=2)).slots
    assert [(slot.device, slot.share) for slot in made] == [
        ("GPU-aaa", 0.5), ("GPU-bbb", 0.5), ("GPU-aaa", 0.5), ("GPU-bbb", 0.5),
    ]  # fmt: skip
    assert made[1].environment["CUDA_VISIBLE_DEVICES"] == "GPU-bbb"
    assert [slot.device for slot in slots_for(config("cuda:1", workers=2)).slots] == ["GPU-bbb"] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [slot.device for slot in slots_for(config("cuda")).slots] == ["GPU-bbb"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    assert [slot.device for slot in slots_for(config("cuda:0")).slots] == ["GPU-aaa"]
    with pytest.raises(DeviceAbsent, match="cuda:1"):
        slots_for(config("cuda:1"))


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpus", dict)
    with pytest.raises(DeviceAbsent, match="0 GPUs"):
        slots_for(config("cuda"))


def test_ray_places_cells_itself() -> None:
    made = slots_for(config("cuda", executor="ray", workers=3))
    assert [slot.visible for slot in made.slots] == [None] * 3
    assert made.slots[0].environment == {"OMP_NUM_THREADS": "1"}
    assert made.take(10**15) is not None  # memory is looked after where the cell runs


def test_what_does_not_fit_waits() -> None:
    free = {"a": 1000}
    places = [Slot(i, "a", 0.5, 1, "a") for i in range(2)]
    slots = Slots(places, lambda device: Memory(2000, free[device]))
    first = slots.take(500)  # 575 with the margin
    assert first == places[0]
    free["a"] = 990  # it has allocated next to nothing yet, and is promised all the same
    assert slots.take(500) is None
    assert slots.take(300) == places[1]
    assert slots.busy == 2
    assert slots.take(0) is None  # no slot
    slots.give(first)
    free["a"] = 100  # another program came
    assert slots.take(500) is None
    free["a"] = 1000
    assert slots.take(500) == places[0]


def test_what_can_never_fit_is_said() -> None:
    slots = Slots([Slot(0, "a", 1.0, 1, "a")], lambda device: Memory(100 * MIB, 50 * MIB))
    assert slots.too_large(80 * MIB) == ""
    assert slots.too_large(100 * MIB) == "needs 115 MB with margin and the largest device has 100 MB"


def test_another_device_takes_what_one_cannot() -> None:
    memory = {"a": Memory(100, 100), "b": Memory(1000, 1000)}
    slots = Slots([Slot(0, "a", 1.0, 1, "a"), Slot(1, "b", 1.0, 1, "b")], memory.__getitem__)
    taken = slots.take(500)
    assert taken is not None
    assert taken.device == "b"


def test_the_host_says_what_it_has() -> None:
    found = memory_of("cpu")
    assert found is not None
    assert 0 < found.free <= found.total
    assert memory_of("GPU-unknown") is None
