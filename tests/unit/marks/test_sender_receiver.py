# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Sender and receiver over a real socket on localhost."""

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from verl_gpumonitor.model.marks import MarkScope
from verl_gpumonitor.stages.sources.mark_sender import Whereabouts, whereabouts
from verl_gpumonitor.stages.sources.marks import (
    HELD_AGAIN_SECONDS,
    HELD_SECONDS,
    MAX_HELD,
    MAX_TAKEN,
    MarkReceiver,
    MarkSender,
)

GPU = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.fixture
def receiver() -> Iterator[MarkReceiver]:
    receiver = MarkReceiver(0)
    assert receiver.problem is None
    yield receiver
    receiver.close()


def sender_to(receiver: MarkReceiver, **environ: str) -> MarkSender:
    return MarkSender(port=receiver.port, environ=environ)


def test_a_block_is_an_interval(receiver: MarkReceiver) -> None:
    sender = sender_to(receiver)
    with sender.stage("gen", role="rollout", step=3):
        [running] = receiver.word(time.time()).intervals
    [over] = receiver.word(time.time()).intervals
    assert (running.stage, running.role, running.step, running.end) == ("gen", "rollout", 3, None)
    assert over.end is not None
    assert over.pid == os.getpid()
    sender.close()


def test_the_end_is_marked_when_the_block_raises(receiver: MarkReceiver) -> None:
    sender = sender_to(receiver)
    with pytest.raises(KeyError), sender.stage("gen"):
        raise KeyError
    [over] = receiver.word(time.time()).intervals
    assert over.end is not None
    sender.close()


def test_nobody_listens_and_nothing_is_felt(receiver: MarkReceiver) -> None:
    sender = sender_to(receiver)
    receiver.close()
    for _ in range(100):
        with sender.stage("gen"):
            sender.point("here")
    sender.close()


def test_the_sidecar_may_come_later() -> None:
    first = MarkReceiver(0)
    sender = sender_to(first)
    port = first.port
    assert port is not None
    first.close()
    span = sender.begin("gen")
    sender.point("lost too, maybe")
    later = MarkReceiver(port)
    sender.end(span)
    [over] = later.word(time.time()).intervals
    assert (over.stage, over.end is not None) == ("gen", True)
    sender.close()
    later.close()


@pytest.mark.parametrize("stage", ["", "x" * 500, "a\nb", "\ud800"], ids=["empty", "long", "line break", "half a pair"])
def test_odd_labels_never_raise(receiver: MarkReceiver, stage: str) -> None:
    sender = sender_to(receiver)
    sender.end(sender.begin(stage, role=stage, step=-1))
    sender.point(stage)
    assert receiver.poll() >= 0
    sender.close()


def test_marks_that_were_not_sent_use_nothing_up(receiver: MarkReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that refuses for a time: whatever begins and ends then does not count as open afterwards."""
    sender = sender_to(receiver)
    sender.point("here")
    this = sender._this_process()
    with monkeypatch.context() as refusing:
        refusing.setattr(type(this), "send", lambda *_: (_ for _ in ()).throw(OSError))
        for _ in range(20):
            sender.end(sender.begin("lost"))
        late = sender.begin("gen")
    assert list(this.open) == [late]
    sender.end(late)
    [over] = receiver.word(time.time()).intervals
    assert (over.stage, over.end is not None) == ("gen", True)
    sender.close()


def test_deep_nesting_is_cut_off(receiver: MarkReceiver) -> None:
    sender = sender_to(receiver)
    begun = [sender.begin(f"level_{n}") for n in range(20)]
    assert begun[16:] == [0, 0, 0, 0]
    for span in reversed(begun):
        sender.end(span)
    intervals = receiver.word(time.time()).intervals
    assert len(intervals) == 16
    assert all(i.end is not None for i in intervals)
    sender.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_a_process_of_its_own(receiver: MarkReceiver) -> None:
    sender = sender_to(receiver)
    outer = sender.begin("gen")
    child = os.fork()
    if child == 0:
        sender.end(outer)  # the parent's: not for the child to end
        sender.begin("ref")
        os._exit(0)
    os.waitpid(child, 0)
    intervals = receiver.word(time.time()).intervals
    assert [(i.stage, i.end, i.pid) for i in intervals] == [("gen", None, os.getpid()), ("ref", None, child)]
    sender.close()


def test_threads_may_mark_at_once(receiver: MarkReceiver) -> None:
    sender = sender_to(receiver)

    def work(name: str) -> None:
        for _ in range(20):
            with sender.stage(name):
                time.sleep(0.0005)

    threads = [threading.Thread(target=work, args=(f"stage_{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    intervals = receiver.word(time.time()).intervals
    assert len(intervals) == 80
    assert all(i.end is not None for i in intervals)
    sender.close()


def test_garbage_on_the_port_is_counted_and_passed_over(receiver: MarkReceiver) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for datagram in (b"", b"hello", b"{" * 60000, b"\x00" * 2000):
            stranger.sendto(datagram, ("127.0.0.1", receiver.port))
    sender = sender_to(receiver)
    sender.begin("gen")
    assert [i.stage for i in receiver.word(time.time()).intervals] == ["gen"]
    assert receiver.dropped == 4
    sender.close()


def test_one_look_takes_a_bounded_number(receiver: MarkReceiver) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for _ in range(5000):
            stranger.sendto(b"x", ("127.0.0.1", receiver.port))
    assert receiver.poll() <= MAX_TAKEN


def test_a_taken_port_is_said_and_tried_again() -> None:
    now = [0.0]
    first = MarkReceiver(0)
    port = first.port
    assert port is not None
    second = MarkReceiver(port, monotonic=lambda: now[0])
    assert second.problem is not None
    assert second.word(100.0).intervals == ()
    first.close()
    second.poll()
    assert second.problem is not None
    now[0] = 31.0
    second.poll()
    assert second.port == port
    assert second.word(100.0).intervals == ()
    second.close()


def test_only_localhost_is_listened_on(receiver: MarkReceiver) -> None:
    assert receiver._socket is not None
    assert receiver._socket.getsockname()[0] == "127.0.0.1"


def test_host_memory_and_gpus_reach_the_sidecar(receiver: MarkReceiver) -> None:
    sender = sender_to(receiver, NVIDIA_VISIBLE_DEVICES=GPU)
    sender.point("start", memory_used_bytes=10, memory_limit_bytes=20)
    receiver.poll()
    now = time.time()
    assert receiver.own_uuids(now) == (GPU,)
    host = receiver.host_sample(now)
    assert host is not None
    assert (host.memory_used_bytes, host.memory_limit_bytes, host.source) == (10, 20, "marks")
    assert host.taken_at is not None
    assert 0 <= time.monotonic() - host.taken_at < 5
    sender.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, Whereabouts(), id="no rank: the driver"),
        pytest.param(
            {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"},
            Whereabouts(scope=MarkScope.RANK, rank=9, local_rank=1),
            id="torchrun",
        ),
        pytest.param(
            {"RANK": "13", "LOCAL_RANK": "0", "WG_BACKEND": "ray", "RAY_LOCAL_WORLD_SIZE": "8"},
            Whereabouts(scope=MarkScope.RANK, rank=13, local_rank=5),
            id="a worker of verl",
        ),
        pytest.param(
            {"RANK": "x", "LOCAL_RANK": "-1", "NVIDIA_VISIBLE_DEVICES": "all"}, Whereabouts(), id="nothing of use"
        ),
        pytest.param(
            {"NVIDIA_VISIBLE_DEVICES": f"{GPU}, GPU-short,0"}, Whereabouts(gpus=(GPU,)), id="GPUs by whole UUID alone"
        ),
    ],
)
def test_whereabouts(environ: dict[str, str], expected: Whereabouts) -> None:
    assert whereabouts(environ) == expected


def test_marks_of_a_process_that_is_not_known_yet_are_held() -> None:
    """A job may begin a stage before it is on a GPU; what it marks then counts once it is."""
    wanted: set[int] = set()
    now, at = time.time(), 1000.0
    receiver = MarkReceiver(0, monotonic=lambda: at, wanted=wanted.__contains__)
    sender = sender_to(receiver)
    sender.begin("gen")
    assert receiver.words(now) == ()
    at += HELD_AGAIN_SECONDS
    now += HELD_SECONDS / 2
    assert receiver.words(now) == ()
    wanted.add(os.getpid())
    assert receiver.words(now) == (), "it is asked anew now and then alone"
    at += HELD_AGAIN_SECONDS
    [word] = receiver.words(now)
    assert [(each.stage, each.end) for each in word.intervals] == [("gen", None)]
    sender.close()
    receiver.close()


def test_of_strangers_marks_some_are_held_for_some_time() -> None:
    at, now = 1000.0, time.time()
    receiver = MarkReceiver(0, monotonic=lambda: at, wanted=lambda _: False)
    sender = sender_to(receiver)
    for _ in range(3):
        for _ in range(MAX_HELD // 4):
            with sender.stage("gen"):
                pass
        receiver.poll(now)
    assert len(receiver._held) == MAX_HELD
    at += HELD_AGAIN_SECONDS
    receiver.poll(now + HELD_SECONDS + 1)
    assert len(receiver._held) == 0
    assert receiver.taken == 0
    sender.close()
    receiver.close()
