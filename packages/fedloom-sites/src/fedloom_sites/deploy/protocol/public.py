"""Sentences that may leave a site.

A server can craft a message whose answer depends on one sample. If the site then refuses, the refusal answers a
question about that sample, and so does the choice of the sentence. A sentence therefore leaves a site only if it was
made where no sample can be read. `publish_reasons` marks such places. Any other error goes to the site's own log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fedloom.errors import FedloomError

_is_public = ContextVar("is_public", default=False)


class PublicReason(FedloomError):
    """A refusal whose sentence may leave the site. Only `publish_reasons` raises it."""


@contextmanager
def publish_reasons() -> Iterator[None]:
    """Mark a place that reads no samples, so that the sentences of its errors may leave the site.

    Raises:
        PublicReason: in place of any of fedloom's errors.
    """
    token = _is_public.set(True)
    try:
        yield
    except FedloomError as error:
        raise PublicReason(str(error)) from error
    finally:
        _is_public.reset(token)


def check_private() -> None:
    """Forbid samples where sentences may leave. Every access to the samples of a site begins with this call.

    Raises:
        RuntimeError: the call comes from a place that `publish_reasons` marks.
    """
    if _is_public.get():
        raise RuntimeError("samples were read in a place whose errors leave the site; read them before it")
