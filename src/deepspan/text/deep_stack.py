"""Runs work of a library that recurses as deep as a client wants it to, and would take the process down with it.

Rules and references that lead from one to the next make the grammar library call itself once per step; on the usual
stack a chain of a few thousand, which fits into a request, overflows it. Used by `text.grammar`.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from deepspan.errors import InputError

T = TypeVar("T")

STACK_BYTES = 256 * 1024 * 1024  # address space, not memory; enough for the longest chain in `MAX_SOURCE_BYTES`
_starting = threading.Lock()  # the size is set for the whole process while a thread starts


def with_deep_stack(work: Callable[[], T]) -> T:
    """Result of `work`, done in a thread of its own with a large stack. Raises what it raises.

    A panic of a library written in Rust is no ordinary exception; it becomes an InputError.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="deepspan-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    try:
        return done.result()
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise InputError("it is too large or too complex for the library") from error
        raise
