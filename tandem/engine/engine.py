"""A thread that drives one engine. Any thread may submit and abort; results come back through a queue per request.

A step that fails ends the requests that were in it, with the error; those that wait are unharmed and go on, unless
planning itself fails with nothing running.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from queue import SimpleQueue
from weakref import WeakSet

from tandem.engine.lockstep import Delta, Lockstep
from tandem.errors import EngineFailure
from tandem.request import Request
from tandem.threads import keep_threads, torch_threads

__all__ = ["Engine"]


_open: WeakSet[Engine] = WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is inside native code when the interpreter goes away takes the process down with it."""
    for engine in list(_open):
        engine.close()


def _left_behind() -> None:
    """In a forked process: the engines' threads are not there."""
    for engine in list(_open):
        engine._changed = threading.Condition()  # the old one may be held by one of them
        engine._closing = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_left_behind)


class Engine:
    """Runs a driver in a thread of its own until `close`, or until the process ends."""

    def __init__(self, driver: Lockstep, threads: int) -> None:
        """`threads` is how many torch computes with in the engine's thread."""
        self.driver = driver
        self.threads = threads
        self._changed = threading.Condition()
        self._inbox: deque[Request] = deque()
        self._aborts: deque[Request] = deque()
        self._results: dict[Request, SimpleQueue[Delta | Exception]] = {}
        self._closing = False
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="tandem-engine", daemon=True)
        with torch_threads(threads):  # who sets its number in one thread sets that of threads to come
            self._thread.start()
            self._settled.wait()
        _open.add(self)

    def submit(self, *requests: Request) -> SimpleQueue[Delta | Exception]:
        """Queue requests together; their deltas arrive in the queue returned. The last delta of each is
        marked `ended`; an exception in the queue ends one of them.

        Raises:
            EngineFailure: the engine is closed.
        """
        results: SimpleQueue[Delta | Exception] = SimpleQueue()
        with self._changed:
            if self._closing:
                raise EngineFailure("the engine is closed")
            for request in requests:
                self._results[request] = results
                self._inbox.append(request)
            self._changed.notify()
        return results

    def abort(self, request: Request) -> None:
        """End a request at the next step border with finish reason "abort". Does nothing if it has ended."""
        with self._changed:
            self._aborts.append(request)
            self._changed.notify()

    def stop(self) -> None:
        """Let the thread abort what runs and end, without waiting for it."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self) -> None:
        """Abort what runs and wait for the thread's end."""
        self.stop()
        self._thread.join()

    def _loop(self) -> None:
        busy = False
        try:
            try:
                keep_threads(self.threads)
            finally:
                self._settled.set()
            while self._receive(wait=not busy):
                try:
                    for delta in self.driver.turn():
                        self._send(delta)
                except Exception as error:  # noqa: BLE001 -- whatever a step raises must reach its requests
                    self._fail(error)
                scheduler = self.driver.scheduler
                busy = bool(scheduler.running or scheduler.waiting)
            for request in list(self._results):
                self._end(request)
        finally:
            self._abandon()

    def _receive(self, wait: bool) -> bool:
        """Take in new requests and aborts. False: the engine is to stop."""
        with self._changed:
            while wait and not (self._inbox or self._aborts or self._closing):
                self._changed.wait()
            arrived, self._inbox = self._inbox, deque()
            aborts, self._aborts = self._aborts, deque()
        for request in arrived:
            self.driver.scheduler.add(request)
        for request in aborts:
            self._end(request)
        return not self._closing

    def _end(self, request: Request) -> None:
        if request in self._results and request.finish_reason is None:
            request.finish_reason = "abort"
            self._send(self.driver.end(request))

    def _send(self, delta: Delta) -> None:
        if delta.request.finish_reason == "error":
            self._break(delta.request, "the model's numbers are not finite for this request", None)
            return
        results = self._results[delta.request]
        if delta.ended:
            del self._results[delta.request]
        results.put(delta)

    def _fail(self, error: Exception) -> None:
        """End all that the failed step had touched: a request whose results are open and that does not wait."""
        scheduler = self.driver.scheduler
        with self._changed:
            known = [r for r in self._results if r not in self._inbox]
        for request in [r for r in known if r not in scheduler.waiting] or known:
            scheduler.drop(request)
            self._break(request, f"the step failed: {error}", error)

    def _abandon(self) -> None:
        """Nothing may wait for a thread that is gone, however it went."""
        with self._changed:
            self._closing = True
        for request in list(self._results):  # nobody submits any more
            self._break(request, "the engine's thread has ended", None)

    def _break(self, request: Request, message: str, cause: Exception | None) -> None:
        request.finish_reason = "error"
        failure = EngineFailure(message)
        failure.__cause__ = cause
        self._results.pop(request).put(failure)
