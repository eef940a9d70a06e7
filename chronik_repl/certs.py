"""`chronik certs`: a CA of the cluster's own and a certificate a node, for those who have none.

    ca.pem, ca.key            the cluster's authority; the key stays with the operator, off the nodes
    node-<id>.pem, .key       what CHRONIK_REPLICATION_TLS_CERT and _KEY name; _CA is ca.pem

Keys are Ed25519, written with mode 0600, never over a file that is there. A second run with the same directory uses
the CA that it finds, so that nodes can be added later.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from chronik_repl.errors import Refused

CA_DAYS = 3650
NODE_DAYS = 825
HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
BACKDATED = datetime.timedelta(hours=1)  # clocks differ a little


def make(folder: Path, nodes: Sequence[str], *, hosts: Sequence[str] = (), days: int = NODE_DAYS) -> list[Path]:
    """Certificates for these nodes (names such as "node-1"), and the CA if there is none. Returns the files made."""
    alternatives = [_host(host) for host in hosts or ("localhost", "127.0.0.1", "::1")]
    if not 1 <= days <= CA_DAYS:
        raise Refused(f"--days {days}: from 1 to {CA_DAYS}, which is how long the CA is good")
    if folder.exists() and not folder.is_dir():
        raise Refused(f"{folder} is not a directory: name one, or one that is to be made")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for there in (file for node in dict.fromkeys(nodes) for file in _files(folder, node) if file.exists()):
        raise Refused(f"{there} is there already; remove it first if it is to be replaced. Nothing was changed")
    ca_file, ca_key_file = folder / "ca.pem", folder / "ca.key"
    made: list[Path] = []
    if ca_file.exists() != ca_key_file.exists():
        raise Refused(f"of {ca_file} and {ca_key_file} only one is there: restore the other, or use an empty folder")
    if not ca_file.exists():
        key = ed25519.Ed25519PrivateKey.generate()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "chronik-repl cluster CA")])
        ca = _certificate(name, name, key.public_key(), key, CA_DAYS, authority=True)
        _write_new(ca_key_file, _private_bytes(key), 0o600)
        _write_new(ca_file, ca.public_bytes(serialization.Encoding.PEM), 0o644)
        made += [ca_file, ca_key_file]
    ca, ca_key = _load_ca(ca_file, ca_key_file)
    for node in dict.fromkeys(nodes):
        key = ed25519.Ed25519PrivateKey.generate()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
        certificate = _certificate(
            name, ca.subject, key.public_key(), ca_key, days, authority=False, names=alternatives
        )
        cert_file, key_file = _files(folder, node)
        _write_new(key_file, _private_bytes(key), 0o600)
        _write_new(cert_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        made += [cert_file, key_file]
    return made


def _files(folder: Path, node: str) -> tuple[Path, Path]:
    return folder / f"{node}.pem", folder / f"{node}.key"


def _load_ca(file: Path, key_file: Path) -> tuple[x509.Certificate, CertificateIssuerPrivateKeyTypes]:
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise Refused(
            f"{file} and {key_file} cannot be read as a CA and its key: restore them, or use an empty folder"
        ) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise Refused(
            f"{key_file} is not a key that this command made; sign the nodes' certificates with your own tools"
        )
    return certificate, key


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: ed25519.Ed25519PublicKey,
    signer: CertificateIssuerPrivateKeyTypes,
    days: int,
    *,
    authority: bool,
    names: Sequence[x509.GeneralName] = (),
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(_usage(authority), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    if not authority:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    issuer_key = signer.public_key()
    assert isinstance(issuer_key, ed25519.Ed25519PublicKey)
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    algorithm: hashes.HashAlgorithm | None = None  # Ed25519 brings its own
    return builder.sign(signer, algorithm)  # type: ignore[arg-type]


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not HOST.fullmatch(host):
            raise Refused(f"--host {host}: a DNS name or an IP address is expected, without a port") from None
        return x509.DNSName(host)


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _private_bytes(key: ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_new(file: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise Refused(f"{file} was made by somebody else just now; try again") from None
    with os.fdopen(descriptor, "wb") as out:
        out.write(data)
