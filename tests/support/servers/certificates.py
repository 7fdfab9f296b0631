"""Certificates for the tests' servers and clients, from an authority that is made for the occasion."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Certificate(NamedTuple):
    """A certificate and its key (PKCS#8), as PEM."""

    certificate: str
    key: str


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self) -> None:
        """Make the authority's own key and certificate."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority of the tests")])
        is_authority = x509.BasicConstraints(ca=True, path_length=None)
        made = self._builder(self._name, self._key).add_extension(is_authority, critical=True)
        self._certificate = made.sign(self._key, hashes.SHA256())

    @property
    def pem(self) -> str:
        """Return its certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def certify(self, name: str) -> Certificate:
        """Return a certificate for a server or a client on this machine."""
        key = ec.generate_private_key(ec.SECP256R1())
        who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = self._builder(who, key).add_extension(here, critical=False).sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Certificate(made.public_bytes(serialization.Encoding.PEM).decode(), private.decode())

    def _builder(self, who: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=who,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(hours=1),
            not_valid_after=now + timedelta(days=1),
        )
