"""A loop that waits is woken by its flag or by a socket, whichever comes first, and never misses either."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from pathlib import Path

from pgqueue.loop import Wake

LONG = 20.0


def test_a_flag_that_was_raised_before_ends_the_wait_at_once_and_is_lowered() -> None:
    wake = Wake()
    wake.set()
    wake.set()
    assert wake.is_set()
    assert wake.wait(LONG)
    assert not wake.is_set()
    assert not wake.wait(0.0)


def test_a_flag_raised_by_another_thread_ends_the_wait() -> None:
    wake, woken = Wake(), threading.Event()

    def loop() -> None:
        if wake.wait(LONG):
            woken.set()

    thread = threading.Thread(target=loop)
    thread.start()
    wake.set()
    assert woken.wait(LONG)
    thread.join()


def test_no_raise_is_missed_between_two_waits() -> None:
    wake, answered = Wake(), Wake()

    def loop() -> None:
        for _ in range(2000):
            assert wake.wait(LONG)
            answered.set()

    thread = threading.Thread(target=loop)
    thread.start()
    for _ in range(2000):
        wake.set()
        assert answered.wait(LONG)
    thread.join()


def test_a_socket_that_can_be_read_ends_the_wait_though_the_flag_is_down() -> None:
    wake = Wake()
    here, there = socket.socketpair()
    with here, there:
        there.send(b"!")
        began = time.monotonic()
        assert not wake.wait(LONG, here.fileno())
        assert time.monotonic() - began < LONG / 2
        here.recv(1)
        assert not wake.wait(0.01, here.fileno())


def test_a_wait_lasts_as_long_as_it_is_told_whatever_was_raised_too_late_for_the_one_before() -> None:
    wake = Wake()
    os.write(wake._writer, b"!")  # raised by a thread that saw the last wait, after that had ended
    began = time.monotonic()
    assert not wake.wait(0.05)
    assert time.monotonic() - began >= 0.05


def test_a_flag_that_is_gone_keeps_no_file_open() -> None:
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        Wake().set()
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
