"""Keys and certificates of a consortium: an authority and a server certificate for TLS, a key that signs the server's
requests, a key pair for each site.

Private keys are files that only their owner can read, and stay where they were made.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .. import files
from ..errors import UserError
from .site import KEY as KEY

CA, CA_KEY, SERVER, SERVER_KEY = "ca.pem", "ca.key", "server.pem", "server.key"
PUBLIC = "site.pub"
_LOCAL = ("localhost", "127.0.0.1")
_AUTHORITY_DAYS = 3650
_MADE = "a private key as promptfed flower certs makes it"
_load_key = partial(serialization.load_pem_private_key, password=None)
_load_ssh_key = partial(serialization.load_ssh_private_key, password=None)


def write_private(path: Path, content: bytes) -> None:
    """A new file that only its owner can read."""
    try:
        files.write(path, content, private=True, new=True)
    except FileExistsError:
        raise UserError(f'"{path}" is there already; move it away if there is to be a new one') from None


def make_authority(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """ca.pem, server.pem and their keys. The authority outlives many certificates: sites are given it once."""
    names = _names(hosts)
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("promptfed consortium")
    ca = (
        _certificate(name, name, key.public_key(), _in(_AUTHORITY_DAYS), ca=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(folder / CA_KEY, _pem(key))
    (folder / CA).write_bytes(pem(ca))
    _issue(folder, ca, key, names, days)


def renew(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """Another server.pem from the same authority: sites trust it as they did the last."""
    ca, key = read_authority(folder / CA), _read_key(folder / CA_KEY)
    if key.public_key() != ca.public_key():
        raise UserError(f'"{folder / CA_KEY}" is not the key of {CA}')
    _issue(folder, ca, key, _names(hosts), days)


def _issue(
    folder: Path, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName], days: int
) -> None:
    """server.pem, with the existing key if there is one."""
    if not (folder / SERVER_KEY).exists():
        write_private(folder / SERVER_KEY, _pem(ec.generate_private_key(ec.SECP384R1())))
    key = _read_key(folder / SERVER_KEY).public_key()
    server = (
        _certificate(_name(str(names[0].value)), ca.subject, key, min(_in(days), ca.not_valid_after_utc), ca=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    files.write(folder / SERVER, pem(server))


# ---- read back


def read_certificate(path: Path) -> x509.Certificate:
    return _read(path, x509.load_pem_x509_certificate, "a certificate", x509.Certificate)


def read_authority(path: Path) -> x509.Certificate:
    """An authority's certificate that has not expired."""
    found = read_certificate(path)
    try:
        signs = found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        signs = False
    if not signs:
        raise UserError(f'"{path}" is not the certificate of an authority ({CA})')
    if expired(found):
        raise UserError(
            f'"{path}" expired on {until(found)}: the consortium needs another authority, and every site its {CA}'
        )
    return found


def expired(certificate: x509.Certificate) -> bool:
    return bool(certificate.not_valid_after_utc <= datetime.now(UTC))


def until(certificate: x509.Certificate) -> str:
    return f"{certificate.not_valid_after_utc:%Y-%m-%d}"


def pem(certificate: x509.Certificate) -> bytes:
    content: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return content


def hosts(certificate: x509.Certificate) -> list[str]:
    """The names and addresses that it is valid for."""
    try:
        named = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in named]


def make_pair(folder: Path) -> None:
    """A site's key pair, as Flower reads it."""
    key = ec.generate_private_key(ec.SECP384R1())
    content = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    write_private(folder / KEY, content)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / PUBLIC).write_bytes(public + b"\n")


def check_pair(folder: Path) -> None:
    """Raises UserError if a site's two keys are not a pair: one of them is damaged."""
    private = _read(folder / KEY, _load_ssh_key, "a private key of a site", ec.EllipticCurvePrivateKey)
    if private.public_key() != read_public(folder / PUBLIC):
        raise UserError(
            f'"{folder / KEY}" and "{folder / PUBLIC}" are not a pair: put them back from a copy, or make the '
            "site anew; the server's engineer then admits it with --replace"
        )


def signing_key(path: Path) -> Ed25519PrivateKey:
    """The key that signs the server's requests; made if there is none yet."""
    if not path.exists():
        write_private(path, _pem(Ed25519PrivateKey.generate()))
    return read_signing_key(path)


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    return _read(path, _load_key, _MADE, Ed25519PrivateKey)


def read_public(path: Path) -> ec.EllipticCurvePublicKey:
    kind = f"a public key of a site ({PUBLIC})"
    return _read(path, serialization.load_ssh_public_key, kind, ec.EllipticCurvePublicKey)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """The hosts' names, and this machine's own."""
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys([*hosts, *_LOCAL]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not host.isascii():
                raise UserError(
                    f'--host = "{host}" must be a name in ASCII or an address; xn--... for other letters'
                ) from None
            names.append(x509.DNSName(host))
    return names


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime, ca: bool
) -> x509.CertificateBuilder:
    """`ca`: of an authority, whose key signs certificates."""
    other = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*other, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **unused)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(minutes=10))  # clocks differ
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
    )


def _in(days: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    return _read(path, _load_key, _MADE, ec.EllipticCurvePrivateKey)


_T = TypeVar("_T")


def _read(path: Path, load: Callable[[bytes], object], kind: str, of: type[_T]) -> _T:
    try:
        found = load(path.read_bytes())
    except OSError as error:
        raise UserError(f'"{path}" cannot be read: {error.strerror}') from None
    except Exception:  # of several types, depending on what is wrong with it
        found = None
    if not isinstance(found, of):
        raise UserError(f'"{path}" is not {kind}')
    return found


def _pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem
