"""Keys and certificates of a deployment: an authority, the server's certificate, and two key pairs per site."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedloom.errors import ConfigError

CERTIFICATE_BACKDATE = timedelta(hours=1)
"""A certificate is valid from this time before its creation, because clocks differ."""
EXPIRY_NOTICE = timedelta(days=30)
"""A certificate is reported as expiring soon from this time before its expiry."""
_OTHER_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("encipher_only", "decipher_only"),
)


class KeyPair(NamedTuple):
    """A private key as an OpenSSH file, and the corresponding public key as one OpenSSH line."""

    private: bytes
    public: str


class Authority(NamedTuple):
    """Certificate authority of a single deployment."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def load(cls, key: bytes, certificate: bytes) -> Authority:
        """Load the authority from two PEM files.

        Raises:
            ValueError, TypeError, cryptography.exceptions.UnsupportedAlgorithm: the files do not contain a certificate
                and a key of a supported kind.
        """
        private = load_pem_private_key(key, password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise TypeError("the key has a different type")
        return cls(private, x509.load_pem_x509_certificate(certificate))

    def pem(self) -> bytes:
        """Return the public certificate in PEM format."""
        return self.certificate.public_bytes(Encoding.PEM)

    def private(self) -> bytes:
        """Return the private key in PEM format."""
        return _pem_bytes(self.key)


class ServerCertificate(NamedTuple):
    """A certificate and its private key, both in PEM format."""

    certificate: bytes
    key: bytes


def make_key_pair(kind: Literal["connection", "signing"]) -> KeyPair:
    """Return a site's new key pair: ECDSA P-384 for its connection (as Flower requires), Ed25519 for replies."""
    key = ec.generate_private_key(ec.SECP384R1()) if kind == "connection" else ed25519.Ed25519PrivateKey.generate()
    return KeyPair(
        key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode(),
    )


def make_authority(name: str, days: int, now: datetime | None = None) -> Authority:
    """Create and return an authority that can sign only server certificates, valid for ``days`` days from ``now``."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = _x509_name(f"{name} authority")
    usage = x509.KeyUsage(key_cert_sign=True, crl_sign=True, **dict.fromkeys(_OTHER_USES, False))
    certificate = (
        _certificate_builder(subject, subject, key, days, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA384())
    )
    return Authority(key, certificate)


def issue_server_certificate(
    ca: Authority, names: Sequence[str], days: int, now: datetime | None = None
) -> ServerCertificate:
    """Issue and return a server certificate for host names and IP addresses.

    Raises:
        ConfigError: the list of names is empty.
    """
    if not names:
        raise ConfigError("a server certificate needs at least one host name or IP address")
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _certificate_builder(_x509_name(names[0]), ca.certificate.subject, key, days, now)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in dict.fromkeys(names)]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key()), critical=False)
        .sign(ca.key, hashes.SHA384())
    )
    return ServerCertificate(certificate.public_bytes(Encoding.PEM), _pem_bytes(key))


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, now: datetime | None
) -> x509.CertificateBuilder:
    start = now or datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - CERTIFICATE_BACKDATE)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _x509_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _pem_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
