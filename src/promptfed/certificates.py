"""Keys and certificates of a consortium: an authority and a server certificate for TLS, a key pair for each site.

Private keys are files that only their owner can read, and stay where they were made.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .errors import UserError

CA, CA_KEY, SERVER, SERVER_KEY = "ca.pem", "ca.key", "server.pem", "server.key"
KEY, PUBLIC = "site.key", "site.pub"
_LOCAL = ("localhost", "127.0.0.1")


def write_private(path: Path, content: bytes) -> None:
    """A new file for its owner alone, from its first byte on."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    except FileExistsError:
        raise UserError(f'"{path}" is there already; move it away if there is to be a new one') from None


def make_authority(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """ca.pem, server.pem and their keys. The certificate holds for the hosts and for this machine itself."""
    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca_name = _name("promptfed consortium")
    ca = (
        _certificate(ca_name, ca_name, ca_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    names = [_general(host) for host in dict.fromkeys([*hosts, *_LOCAL])]
    server = (
        _certificate(_name(hosts[0]), ca_name, server_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(folder / CA_KEY, _pem(ca_key))
    write_private(folder / SERVER_KEY, _pem(server_key))
    (folder / CA).write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / SERVER).write_bytes(server.public_bytes(serialization.Encoding.PEM))


def make_pair(folder: Path) -> Path:
    """A site's key pair, as Flower reads it; -> the public key, which is to be sent to the server's engineer."""
    key = ec.generate_private_key(ec.SECP384R1())
    content = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    write_private(folder / KEY, content)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / PUBLIC).write_bytes(public + b"\n")
    return folder / PUBLIC


def read_public(path: Path) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise UserError(f'"{path}" cannot be read: {error.strerror}') from None
    except Exception:  # of several kinds, by what is wrong with it
        raise UserError(f'"{path}" is not a public key of a site ({PUBLIC})') from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f'"{path}" is not an elliptic-curve key, as a site makes it ({PUBLIC})')
    return key


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise UserError(f'--host = "{host}" must be a name in ASCII or an address; xn--... for other letters') from None


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=10))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign,
        crl_sign=sign,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem
