"""Messages that may leave a site.

A server can craft a message whose answer depends on one sample. A rejection of this message, and even its wording, then
reveals something about the sample. An error message therefore leaves a site only if it was created in code that cannot
read samples. `publish_reasons` marks such code. All other errors are written only to the site's log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fedloom.errors import FedloomError

_is_public = ContextVar("is_public", default=False)


class PublicReason(FedloomError):
    """Error: a rejection whose message may leave the site. Only `publish_reasons` raises it."""


@contextmanager
def publish_reasons() -> Iterator[None]:
    """Mark code that reads no samples, so that its error messages may leave the site.

    Raises:
        PublicReason: replaces any error of fedloom.
    """
    token = _is_public.set(True)
    try:
        yield
    except FedloomError as error:
        raise PublicReason(str(error)) from error
    finally:
        _is_public.reset(token)


def check_private() -> None:
    """Raise an error if samples are accessed in code whose error messages may leave the site.

    Every piece of code that accesses a site's samples begins with this call.

    Raises:
        RuntimeError: the call comes from code that is marked by `publish_reasons`.
    """
    if _is_public.get():
        raise RuntimeError("samples were read in code whose error messages leave the site. Read the samples earlier")
