"""Original files of named data sets, fetched when a user asks for it and never otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from os import environ
from pathlib import Path
from typing import NamedTuple

from fedloom.errors import ConfigError, DataError, unknown

ENV = "FEDLOOM_DATA"
"""The environment variable that names the folder of data sets."""


class Remote(NamedTuple):
    """Where the files of a data set are to be had.

    Attributes:
        folder: of the data set in the folder of data sets.
        mirrors: addresses of folders that have all files, in the order in which they are tried.
        files: digest of every file, with its algorithm, by name.
    """

    folder: str
    mirrors: tuple[str, ...]
    files: Mapping[str, str]


REMOTE: dict[str, Remote] = {
    "mnist": Remote(
        "mnist",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        {
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion-mnist": Remote(
        "fashion-mnist",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        {
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
}
"""Data sets with a public address. The digests are SHA-256 of the original files; the addresses were not tried where
this was written, which had no network. What they give is refused unless its digest is the one here."""


def fetch(
    name: str, data_dir: str | Path | None = None, *, mirrors: tuple[str, ...] = (), timeout: float = 60.0
) -> Path:
    """Fetch the original files of a named data set; those that are there with the right digest are left alone.

    Args:
        name: of `REMOTE`.
        data_dir: folder of data sets; None: the environment variable FEDLOOM_DATA.
        mirrors: further addresses of folders with the files, tried first.
        timeout: seconds without an answer after which an address is given up.

    Returns:
        The folder that has them, which `fedloom.load` finds.

    Raises:
        ConfigError: there is no such data set, no folder for it, or the extra ``fetch`` is not installed.
        DataError: no address gives a file, or what it gives has another digest.
    """
    if name not in REMOTE:
        raise unknown("data set to fetch", name, REMOTE)
    if find_spec("pooch") is None:
        raise ConfigError("fetching needs the extra fetch; run: pip install 'fedloom[fetch]'")
    root = data_dir if data_dir is not None else environ.get(ENV)
    if root is None:
        raise ConfigError(f"{name}: say where data sets are kept: set {ENV}, or give data_dir (--data-dir)")
    remote = REMOTE[name]
    place = Path(root).expanduser() / remote.folder
    for file, digest in remote.files.items():
        _fetch(name, file, digest, (*mirrors, *remote.mirrors), place, timeout)
    return place


def _fetch(name: str, file: str, digest: str, mirrors: tuple[str, ...], place: Path, timeout: float) -> None:
    import pooch
    from requests import RequestException

    pooch.get_logger().setLevel("ERROR")
    failures = []
    for mirror in mirrors:
        address = f"{mirror.rstrip('/')}/{file}"
        try:
            pooch.retrieve(
                address, f"sha256:{digest}", fname=file, path=place, downloader=pooch.HTTPDownloader(timeout=timeout)
            )
            return
        except RequestException as error:
            failures.append(f"{address}: {type(error).__name__}")
        except ValueError:
            failures.append(f"{address}: what it gives has another SHA-256 than {digest[:12]}..., so it was not kept")
        except OSError as error:
            raise DataError(f"{name}: {place / file} cannot be written: {error}") from error
    raise DataError(
        f"{name}: {file} was not fetched ({'; '.join(failures)}); is this machine offline? Put the original file into "
        f"{place} by hand"
    )
