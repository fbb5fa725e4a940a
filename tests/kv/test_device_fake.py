"""The fake GPU finds what a real one would punish: each fault is seen once."""

from __future__ import annotations

import pytest

from tests.kv.device_fake import DeviceFault, Machine
from xpyd_core.errors import XpydError
from xpyd_kv.memory.device import DeviceError, DeviceView


@pytest.fixture
def machine():
    return Machine(latest=2)


@pytest.fixture
def gpu(machine):
    return machine.device("p")


def done(event):
    assert event.wait(1.0)


def test_bytes_go_from_the_model_through_pinned_memory_to_another_place(machine, gpu):
    cache, other, slab = gpu.allocate(64), gpu.allocate(64), gpu.allocate_pinned(32)
    gpu.fill(cache, bytes(range(64)))
    gpu.compute(cache[32:48], b"the model wrote\n")
    stream = gpu.stream()
    stream.wait(gpu.compute_stream().record())
    stream.copy([slab], [cache[32:48], cache[:16]])
    out = stream.record()
    assert bytes(slab) == b"\xdd" * 32
    done(out)
    assert bytes(slab) == b"the model wrote\n" + bytes(range(16))
    stream.copy([other[8:24], other[40:56]], [slab])
    landed = stream.record()
    done(landed)
    assert gpu.read(other[8:24]) == b"the model wrote\n"
    for memory in (cache, other):
        gpu.free(memory)
    gpu.free_pinned(slab)
    stream.close()
    machine.check()


def test_an_event_is_done_late_and_runs_only_what_it_needs(gpu):
    a, b, source = gpu.allocate(8), gpu.allocate(8), gpu.allocate(8)
    gpu.fill(source, b"12345678")
    one, two = gpu.stream(), gpu.stream()
    one.copy([a], [source])
    first = one.record()
    two.copy([b], [source])
    second = two.record()
    seen = [second.is_done() for _ in range(4)]
    assert seen == sorted(seen)
    assert seen[-1]
    assert gpu.read(b) == b"12345678"
    assert (one.has_run, two.has_run) == (0, 1)
    done(first)


# --- each fault, once


def test_a_copy_before_its_event_is_a_fault(gpu):
    cache, slab = gpu.allocate(16), gpu.allocate_pinned(16)
    gpu.compute(cache, bytes(16))
    with pytest.raises(DeviceFault, match="copy does not wait for the event of: the model"):
        gpu.stream().copy([slab], [cache])


def test_an_event_recorded_too_early_orders_nothing(gpu):
    cache, slab = gpu.allocate(16), gpu.allocate_pinned(16)
    early = gpu.compute_stream().record()
    gpu.compute(cache, bytes(16))
    stream = gpu.stream()
    stream.wait(early)
    with pytest.raises(DeviceFault, match="does not wait"):
        stream.copy([slab], [cache])


def test_two_streams_that_write_the_same_bytes_are_a_fault_and_disjoint_ones_are_not(gpu):
    target, source = gpu.allocate(16), gpu.allocate(16)
    one, two = gpu.stream(), gpu.stream()
    one.copy([target[:8]], [source[:8]])
    two.copy([target[8:]], [source[:8]])
    with pytest.raises(DeviceFault, match="does not wait"):
        two.copy([target[4:8]], [source[8:12]])


def test_the_model_writing_over_what_is_still_read_is_a_fault(gpu):
    cache, slab = gpu.allocate(16), gpu.allocate_pinned(16)
    gpu.stream().copy([slab], [cache])
    with pytest.raises(DeviceFault, match="the model does not wait for the event of: copy"):
        gpu.compute(cache[4:8], bytes(4))


@pytest.mark.parametrize("which", ["device", "pinned"])
def test_a_free_before_its_event_is_a_fault(machine, gpu, which):
    cache, slab = gpu.allocate(16), gpu.allocate_pinned(16)
    stream = gpu.stream()
    stream.copy([slab], [cache])
    event = stream.record()
    free = {"device": lambda: gpu.free(cache), "pinned": lambda: gpu.free_pinned(slab)}[which]
    with pytest.raises(DeviceFault, match="freed before the event of: copy"):
        free()
    done(event)
    free()
    assert machine.faults


def test_memory_used_after_it_was_freed_is_a_fault(gpu):
    cache, slab = gpu.allocate(16), gpu.allocate_pinned(16)
    gpu.free(cache)
    with pytest.raises(DeviceFault, match="after it was freed"):
        gpu.stream().copy([slab], [cache])


def test_reading_what_has_not_landed_is_a_fault(gpu):
    a, b = gpu.allocate(8), gpu.allocate(8)
    gpu.stream().copy([a], [b])
    with pytest.raises(DeviceFault, match="read before the event of: copy"):
        gpu.read(a)
    assert gpu.read(b) == bytes(8)


def test_pinned_memory_used_again_before_its_copy_has_run_is_a_fault(gpu):
    cache, slab = gpu.allocate(8), gpu.allocate_pinned(8)
    stream = gpu.stream()
    stream.copy([cache], [slab])
    slab[:] = b"the next"
    with pytest.raises(DeviceFault, match="host memory has changed"):
        stream.record().wait(1.0)


def test_host_memory_that_is_not_pinned_is_a_fault(gpu):
    with pytest.raises(DeviceFault, match="no memory"):
        gpu.stream().copy([memoryview(bytearray(8))], [gpu.allocate(8)])


def test_a_transfer_on_the_models_stream_is_a_fault(gpu):
    a, b = gpu.allocate(8), gpu.allocate(8)
    with pytest.raises(DeviceFault, match="model's stream"):
        gpu.compute_stream().copy([a], [b])


@pytest.mark.parametrize("deadline", [None, float("inf")])
def test_a_wait_without_a_deadline_is_a_fault(gpu, deadline):
    with pytest.raises(DeviceFault, match="without a deadline"):
        gpu.stream().record().wait(deadline)


def test_a_handle_used_after_its_close_or_closed_before_its_event_is_a_fault(machine, gpu):
    other = machine.device("d")
    cache, mine = gpu.allocate(8), other.allocate(8)
    gpu.fill(cache, b"12345678")
    theirs = other.open_peer(gpu.export(cache))
    stream = other.stream()
    stream.copy([mine], [theirs])
    with pytest.raises(DeviceFault, match="handle is closed before the event"):
        other.close_peer(theirs)
    done(stream.record())
    assert other.read(mine) == b"12345678"
    other.close_peer(theirs)
    with pytest.raises(DeviceFault, match="closed handle"):
        stream.copy([mine], [theirs])


def test_an_address_of_another_process_is_a_fault(machine, gpu):
    other = machine.device("d")
    with pytest.raises(DeviceFault, match="d uses an address of p"):
        other.stream().copy([other.allocate(8)], [gpu.allocate(8)])


def test_what_is_not_given_back_is_found(machine, gpu):
    memory = gpu.allocate(8)
    with pytest.raises(AssertionError):
        machine.check()
    gpu.free(memory)
    machine.check()
    stream = gpu.stream()
    with pytest.raises(AssertionError):
        machine.check()
    stream.close()
    machine.check()


# --- what is no fault of the code


def test_a_device_that_hangs_or_fails_says_so_in_time(machine, gpu):
    event = gpu.stream().record()
    machine.is_stalled = True
    assert not event.wait(0.0)
    machine.is_stalled, machine.broken = False, "an illegal memory access was encountered"
    with pytest.raises(DeviceError, match="illegal memory"):
        event.is_done()


def test_a_handle_of_memory_that_is_gone_does_not_open(machine, gpu):
    cache = gpu.allocate(8)
    handle = gpu.export(cache)
    gpu.free(cache)
    with pytest.raises(XpydError):
        machine.device("d").open_peer(handle)


def test_which_gpus_reach_each_other_is_asked_by_name(machine, gpu):
    assert gpu.can_reach("GPU-0")
    assert not gpu.can_reach("GPU-1")
    machine.peers.add(frozenset({"GPU-0", "GPU-1"}))
    assert gpu.can_reach("GPU-1")


# --- views


def test_device_memory_is_sliced_like_a_memoryview():
    view, like = DeviceView(1, 1000, 10), memoryview(bytes(range(10)))
    for part in (slice(2, 5), slice(-3, None), slice(None, 4), slice(8, 20), slice(5, 2)):
        cut = view[part]
        assert len(cut) == len(like[part])
        assert cut.device == 1
        if len(cut):
            assert cut.address - 1000 == like[part][0]
    with pytest.raises(ValueError, match="step"):
        view[::2]
