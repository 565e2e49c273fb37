"""Two routines of a process that take turns: while the exchange of one is under way, the other launches its work.

Only one of them runs at a time, and it runs until it waits for an exchange, or ends. So the order of all that both do
depends on nothing but the two, and is the same in every run and on all ranks that run the same two. On CUDA both launch
on one stream: no kernel runs beside another that it might disturb, and memory is reused as by one routine.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Semaphore, Thread, get_ident
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """Who may run. Outside of `alternate` there is one routine, and nobody to wait for."""

    def __init__(self) -> None:
        self._pair: _Pair | None = None

    def exchange(self) -> Turn:
        """Called by a routine where an exchange starts."""
        return Turn(self._pair)

    def alternate(self, first: Callable[[], T], second: Callable[[], object]) -> T:
        """The result of `first`, on this thread; `second` runs on another one, from the first turn that it gets.

        What autograd calls for `second` on a thread of its own belongs to it. If one fails, the other ends where it
        waits, and that error is raised here.
        """
        assert self._pair is None, "two routines are alternating"
        pair = _Pair()
        thread = Thread(target=pair.run_second, args=(second,), name="second routine", daemon=True)
        thread.start()
        self._pair = pair
        try:
            result = first()
        except BaseException as error:
            pair.error = error
            raise
        finally:
            pair.end(0)
            thread.join()
            self._pair = None
        if pair.error is not None:
            raise pair.error
        return result


class Turn:
    """What the other routine gets while an exchange is under way."""

    def __init__(self, pair: _Pair | None) -> None:
        self._pair = pair
        self._num_given = 0 if pair is None else pair.num_given()

    def wait(self) -> None:
        """Called where the exchange would be waited for: the other routine runs until it waits, too, or ends. If it has
        run since the exchange started, nothing happens.

        Raises:
            BaseException: the error of the other routine, which has ended by it.
        """
        if self._pair is not None and self._pair.num_given() == self._num_given:
            self._pair.give()


class _Stopped(BaseException):
    """Ends the second routine after the first one failed."""


class _Pair:
    """Two routines, 0 on the thread that made this and 1 elsewhere.

    Attributes:
        error: what ended one of them.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._thread = get_ident()
        self._wakes = (Semaphore(0), Semaphore(0))
        self._are_over, self._given = [False, False], [0, 0]

    def _own(self) -> int:
        return 0 if get_ident() == self._thread else 1

    def num_given(self) -> int:
        """Turns that the calling routine has given to the other one."""
        return self._given[self._own()]

    def give(self) -> None:
        """See `Turn.wait`."""
        own = self._own()
        self._given[own] += 1
        if self.error is None and not self._are_over[1 - own]:
            self._wakes[1 - own].release()
            self._wakes[own].acquire()
        if self.error is not None:
            raise self.error if own == 0 else _Stopped

    def run_second(self, second: Callable[[], object]) -> None:
        """The second routine's thread, from its first turn on."""
        self._wakes[1].acquire()
        try:
            if self.error is None:
                second()
        except BaseException as error:
            self.error = self.error or error
        finally:
            self.end(1)

    def end(self, own: int) -> None:
        """A routine is over: the other one goes on alone."""
        self._are_over[own] = True
        self._wakes[1 - own].release()
