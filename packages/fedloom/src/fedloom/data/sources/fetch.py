"""Download of the original files of named data sets, started only when a user requests it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from os import environ
from pathlib import Path
from typing import NamedTuple

from fedloom.errors import ConfigError, DataError
from fedloom.hints import unknown_name_error
from fedloom.outputs import check_output_folder
from fedloom.rundir import as_path
from fedloom.values import check_type

DATA_FOLDER_VARIABLE = "FEDLOOM_DATA"
"""Environment variable that contains the path of the data folder."""


class RemoteFiles(NamedTuple):
    """Addresses and digests of a data set's files.

    Attributes:
        folder: subfolder of the data folder for this data set.
        mirrors: addresses of folders that contain all files, first choice first.
        files: expected digests of the files, keyed by file name, as ``sha256:...`` or ``md5:...``.
    """

    folder: str
    mirrors: tuple[str, ...]
    files: Mapping[str, str]


UCI_ADDRESS = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
REMOTE_SETS: dict[str, RemoteFiles] = {
    "adult": RemoteFiles(
        "adult",
        (f"{UCI_ADDRESS}adult/",),
        {
            "adult.data": "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
            "adult.test": "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        },
    ),
    "cifar-10": RemoteFiles(
        "cifar-10",
        ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"),
        {"cifar-10-binary.tar.gz": "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    ),
    "cifar-100": RemoteFiles(
        "cifar-100",
        ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"),
        {"cifar-100-binary.tar.gz": "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
    ),
    "fashion-mnist": RemoteFiles(
        "fashion-mnist",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        {
            "train-images-idx3-ubyte.gz": "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
    "heart": RemoteFiles(
        "heart",
        (f"{UCI_ADDRESS}heart-disease/",),
        {
            "processed.cleveland.data": "sha256:a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
            "processed.hungarian.data": "sha256:d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
            "processed.switzerland.data": "sha256:834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
            "processed.va.data": "sha256:e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
        },
    ),
    "medical-mnist": RemoteFiles(
        "medical-mnist",
        ("https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/",),
        {"MedNIST.tar.gz": "md5:0bc7306e7427e00ad1c5526a6677552d"},
    ),
    "mnist": RemoteFiles(
        "mnist",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        {
            "train-images-idx3-ubyte.gz": "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "tiny-imagenet": RemoteFiles(
        "tiny-imagenet",
        ("http://cs231n.stanford.edu/", "https://cs231n.stanford.edu/"),
        {"tiny-imagenet-200.zip": "sha256:6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821"},
    ),
}
"""Data sets that can be downloaded from public addresses. The digests were computed from the original files. For CIFAR,
Tiny-ImageNet and MedNIST, they are the digests published with the data. The addresses were entered without network
access and have not been tested. A downloaded file whose digest differs from the expected digest is not kept.
"""

LEAF_HINT = (
    "has no files to fetch, because LEAF's scripts make them (github.com/TalwalkarLab/leaf). Put these into its folder"
)
UNFETCHED_SETS = {
    "digits": "needs no files, because it comes with scikit-learn",
    "docstrings": "needs no files, because it is made from Python's standard library",
    "femnist": f"{LEAF_HINT}, or use source = 'hub:flwrlabs/femnist', users = 'writer_id', y = 'character'",
    "sent140": LEAF_HINT,
    "shakespeare": LEAF_HINT,
    "sklearn": "needs no files, because it comes with scikit-learn",
}
"""Reasons why other named data sets cannot be downloaded, together with advice."""


def fetch(
    name: str, data_dir: str | Path | None = None, *, mirrors: tuple[str, ...] = (), timeout: float = 60.0
) -> Path:
    """Download the original files of a named data set, and return the folder that contains them.

    Files that already exist and have the correct digest are kept.

    Args:
        name: key of `REMOTE_SETS`.
        data_dir: data folder. If None, the environment variable FEDLOOM_DATA is used.
        mirrors: additional addresses of folders that contain the files. These addresses are tried first.
        timeout: seconds to wait for a response before the next address is tried.

    Returns:
        Folder that contains the files, where `fedloom.load` finds them.

    Raises:
        ConfigError: the data set is unknown or has no files to download, no folder is given, an existing file has a
            different digest, or the extra ``fetch`` is not installed.
        DataError: no address provides a file, or a downloaded file has a different digest.
    """
    check_type("name of the data set", name, str)
    if name in UNFETCHED_SETS:
        raise ConfigError(f"{name} {UNFETCHED_SETS[name]}")
    if name not in REMOTE_SETS:
        raise unknown_name_error("data set to fetch", name, REMOTE_SETS)
    if find_spec("pooch") is None:
        raise ConfigError("fetching needs the `fetch` extra. Run: pip install 'fedloom[fetch]'")
    root = environ.get(DATA_FOLDER_VARIABLE) if data_dir is None else as_path(data_dir, "data_dir")
    if not root:
        raise ConfigError(
            f"{name}: the folder of data sets is unknown. Set {DATA_FOLDER_VARIABLE}, or give data_dir (--data-dir)"
        )
    remote = REMOTE_SETS[name]
    place = check_output_folder(Path(root).expanduser() / remote.folder)
    for file, digest in remote.files.items():
        _fetch_file(name, file, digest, (*mirrors, *remote.mirrors), place, timeout)
    return place


def _fetch_file(name: str, file: str, digest: str, mirrors: tuple[str, ...], place: Path, timeout: float) -> None:
    import pooch
    from requests import RequestException

    path = place / file
    if path.exists() and not pooch.hashes.hash_matches(path, digest):
        raise ConfigError(
            f"{path} already exists and does not have the digest {digest[:19]}.... Move this file, then fetch again"
        )
    pooch.get_logger().setLevel("ERROR")
    failures = []
    for mirror in mirrors:
        address = f"{mirror.rstrip('/')}/{file}"
        try:
            pooch.retrieve(address, digest, fname=file, path=place, downloader=pooch.HTTPDownloader(timeout=timeout))
            return
        except RequestException as error:
            failures.append(f"{address}: {type(error).__name__}")
        except ValueError:
            failures.append(f"{address}: the file does not have the digest {digest[:19]}..., so it was not kept")
        except OSError as error:
            raise DataError(f"{name}: {place / file} cannot be written: {error}") from error
    raise DataError(
        f"{name}: {file} could not be fetched ({'; '.join(failures)}). Is this machine offline? Put "
        f"the original file into {place} manually"
    )
