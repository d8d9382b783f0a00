"""Signatures of replies, made with the site's key over a nonce that only the requested site knows."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedloom.errors import ConfigError
from fedloom.storage.files import read_content

NONCE_BYTES = 16
"""Length of a nonce in bytes."""


SITE_KEY_HINT = "Restore this site's own key, or ask the coordinator for new keys (fedloom deploy rotate)"
"""Advice about a private key that a site cannot use."""


def new_nonce() -> bytes:
    """Return random bytes from the operating system."""
    return secrets.token_bytes(NONCE_BYTES)


def read_signing_key(path: Path, agreed: str = "") -> Ed25519PrivateKey:
    """Read the private key of a site from its file.

    Args:
        path: file with the private key.
        agreed: OpenSSH line with the site's public key in the agreement. If it is empty, the public key next to the
            private key is used, provided that this file exists.

    Raises:
        ConfigError: the file is missing, is not an Ed25519 key in OpenSSH format, or is another site's key.
    """
    content = read_content(path, "the signing key")
    try:
        key = load_ssh_private_key(content, None)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a private key in OpenSSH format: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an Ed25519 key. Replies must be signed with an Ed25519 key")
    public, line = public_key_path(path), public_key_line(content)
    if agreed and not agreed.startswith(line):
        raise ConfigError(f"{path} is not this site's agreed-upon key. {SITE_KEY_HINT}")
    if not agreed and public.exists() and not read_content(public).decode(errors="replace").startswith(line):
        raise ConfigError(f"{path} is not the private key of {public.name}. {SITE_KEY_HINT}")
    return key


def public_key_path(path: Path) -> Path:
    """Return the path of the public key that matches a private-key file."""
    return path.with_name(f"{path.name}.pub")


def public_key_line(private: bytes) -> str:
    """Return the public key that matches a private key as an OpenSSH line, or "" if the bytes are not a private key."""
    try:
        key = load_ssh_private_key(private, None)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def read_verifying_key(line: str, site: str) -> Ed25519PublicKey:
    """Read a site's public key from its OpenSSH line.

    Raises:
        ConfigError: the line is not an Ed25519 key.
    """
    try:
        key = load_ssh_public_key(line.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"signing_key of {site} is not a public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"signing_key of {site} must be an Ed25519 key (ssh-ed25519 ...)")
    return key


def signed_text(fields: Mapping[str, object]) -> bytes:
    """Encode fields in a canonical representation for signing."""
    return b"fedloom reply\n" + json.dumps(fields, sort_keys=True, default=bytes.hex).encode()


def sign_fields(key: Ed25519PrivateKey, fields: Mapping[str, object]) -> bytes:
    """Sign fields."""
    return key.sign(signed_text(fields))


def is_signed(key: Ed25519PublicKey, fields: Mapping[str, object], signature: bytes) -> bool:
    """Return True if the owner of the key signed exactly these fields."""
    try:
        key.verify(signature, signed_text(fields))
    except InvalidSignature:
        return False
    return True
