"""Calls side by side, captures alone."""

from __future__ import annotations

import threading
import time

from onchip.runtime.gate import Gate


def test_a_capture_is_alone_and_ends_even_if_every_caller_wants_one() -> None:
    gate, inside, alone, problems = Gate(), [], [], []

    def work(k: int) -> None:
        for n in range(20):
            with gate:
                inside.append(k)
                if alone and alone != [k]:
                    problems.append("a call ran beside another thread's capture")
                inside.remove(k)
                if (n + k) % 5 == 0:
                    with gate.alone():
                        alone.append(k)
                        if inside:
                            problems.append("a capture ran beside a call")
                        with gate:  # the captured model may call the program
                            time.sleep(0.0005)
                        alone.remove(k)

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=30)
    assert not any(t.is_alive() for t in threads), "threads wait for each other"
    assert not problems, problems[0]


def test_calls_run_side_by_side() -> None:
    gate, meet = Gate(), threading.Barrier(2, timeout=10)

    def work() -> None:
        with gate:
            meet.wait()  # both are inside at once, or the barrier breaks

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not meet.broken


def test_a_capture_waits_for_the_calls_that_run() -> None:
    gate, entered, leave, order = Gate(), threading.Event(), threading.Event(), []

    def call() -> None:
        with gate:
            entered.set()
            leave.wait(10)
            order.append("the call ends")

    def capture() -> None:
        with gate, gate.alone():
            order.append("the capture begins")

    threads = [threading.Thread(target=f, daemon=True) for f in (call, capture)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    time.sleep(0.05)  # time enough for a capture that does not wait
    leave.set()
    for t in threads:
        t.join(timeout=30)
    assert order == ["the call ends", "the capture begins"]
