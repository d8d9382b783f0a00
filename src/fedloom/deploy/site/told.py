"""Sentences that may leave a site.

A server can craft a message whose answer depends on one sample. If the site then refuses, the refusal answers a
question about that sample, and so does the choice of the sentence. A sentence therefore leaves a site only if it was
made where no sample can be read. `telling` marks such places. Any other error goes to the site's own log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fedloom.errors import FedloomError

_is_telling = ContextVar("is_telling", default=False)


class Told(FedloomError):
    """A refusal whose sentence may leave the site. Only `telling` raises it."""


@contextmanager
def telling() -> Iterator[None]:
    """Mark a place that reads no samples, so that the sentences of its errors may leave the site.

    Raises:
        Told: in place of any of fedloom's errors.
    """
    token = _is_telling.set(True)
    try:
        yield
    except FedloomError as error:
        raise Told(str(error)) from error
    finally:
        _is_telling.reset(token)


def check_untold() -> None:
    """Forbid samples where sentences may leave; every access to the samples of a site begins with this call.

    Raises:
        RuntimeError: the call comes from a place that `telling` marks.
    """
    if _is_telling.get():
        raise RuntimeError("samples were read in a place whose errors leave the site; read them before it")
