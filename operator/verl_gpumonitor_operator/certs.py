# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Certificates of the webhook and of the report server: made, renewed and rotated by ourselves.

Pure: no files, no clock, no network; what is not pure is that new keys are random. It lives in two Secrets: one with
what is served, so that every replica serves the same leaf under the same CA, and one with the CA's keys and where its
rotation stands, which nobody reads but its writer. The writer (the controller that holds the Lease) asks `plan` each
30 s what both are to hold, and sets `caBundle` of the webhook configuration to `bundle(data)`.

`joined` makes one map of the two, `authority_part` and `served_part` take it apart again. The authority's Secret is
written first and read last. So whatever ends the writer between its two writes, the served leaf is one of a CA in the
bundle, and the keys of all that is served are kept: the next round sees a leaf that is not the first CA's and makes
one, or writes the bundle that the authority's Secret has already.

How a new CA comes without one refused handshake: first it only joins the bundle (`ca.crt`). Once the API server's
`caBundle` carries it, a waiting time begins, so that sidecars hear of it in the answers to their reports. After that
it signs the leaf and moves to the front; the CA before it stays in the bundle until no leaf of its can be alive.
A verifier whose bundle is not older than the waiting time thus always trusts the leaf that is served.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .certificates import CA_BUNDLE, LEAF, LEAF_KEY

__all__ = [
    "CA_BUNDLE",
    "CA_KEY",
    "DEFAULT_ROTATION",
    "LEAF",
    "LEAF_KEY",
    "Rotation",
    "authority_part",
    "bundle",
    "joined",
    "known_part",
    "plan",
    "served_part",
    "server_names",
]

CA_KEY: Final = "ca.key"
NEXT_CA: Final = "next-ca.crt"
NEXT_CA_KEY: Final = "next-ca.key"
NEXT_CA_SINCE: Final = "next-ca.since"
"""Moment (RFC 3339) since which the API server's caBundle carries the next CA; absent until then."""
PREVIOUS_CA_UNTIL: Final = "previous-ca.until"
"""Moment (RFC 3339) until which the CA before is trusted; absent when there is none."""

_WITHHELD: Final = (CA_KEY, NEXT_CA, NEXT_CA_KEY, NEXT_CA_SINCE, PREVIOUS_CA_UNTIL)
"""What servers have no need of: it stays in the authority's Secret."""
_AUTHORITY: Final = (CA_BUNDLE, *_WITHHELD)
"""With the bundle, so that the same CA signs on when the served Secret is lost."""
_SERVED: Final = (CA_BUNDLE, LEAF, LEAF_KEY)


class Rotation(msgspec.Struct, frozen=True, kw_only=True):
    """Lives and waiting times."""

    ca_life: timedelta = timedelta(days=3650)
    leaf_life: timedelta = timedelta(days=30)
    renew_at: float = 2 / 3
    """Share of its life after which a certificate is replaced."""
    bundle_wait: timedelta = timedelta(days=7)
    """How old a bundle a verifier may hold and still trust the leaf that is served."""
    backdate: timedelta = timedelta(hours=1)
    """Certificates begin this much before `now`, for clocks that are behind."""


DEFAULT_ROTATION: Final = Rotation()


def server_names(release: str, namespace: str) -> tuple[str, ...]:
    """DNS names that the leaf carries: both Services, in full and short forms. Never empty."""
    return tuple(
        f"{release}-{part}.{namespace}{suffix}"
        for part in ("webhook", "controller")
        for suffix in (".svc", "", ".svc.cluster.local")
    )


def bundle(data: Mapping[str, bytes]) -> bytes:
    """CA certificates (PEM) to trust; what belongs into `caBundle` and into sidecars. Raises KeyError."""
    return data[CA_BUNDLE]


def authority_part(data: Mapping[str, bytes]) -> dict[str, bytes]:
    """What of it belongs into the Secret that the writer alone reads."""
    return _only(_AUTHORITY, data)


def served_part(data: Mapping[str, bytes]) -> dict[str, bytes]:
    """What of it belongs into the Secret that the servers read."""
    return _only(_SERVED, data)


def known_part(data: Mapping[str, bytes]) -> dict[str, bytes]:
    """What of it is ours, whichever Secret it belongs into. What others added is no reason to write."""
    return _only((*_AUTHORITY, LEAF, LEAF_KEY), data)


def joined(*, authority: Mapping[str, bytes], served: Mapping[str, bytes]) -> dict[str, bytes]:
    """Make one map of what both Secrets hold, for `plan`; nothing for one that does not exist.

    The authority's bundle is the one that counts, being written first; where it cannot be read, the served one.
    A served Secret with keys of the CA was written by a release that had this one alone, be it before an upgrade or
    after a return to it: then only that one counts, and the next writes take it apart.
    """
    if any(key in served for key in _WITHHELD):
        return known_part(served)
    data = {**served_part(served), **authority_part(authority)}
    if CA_BUNDLE in served and not _certificates(authority.get(CA_BUNDLE, b"")):
        data[CA_BUNDLE] = served[CA_BUNDLE]
    return data


def plan(
    data: Mapping[str, bytes] | None,
    *,
    now: datetime,
    names: Sequence[str],
    published: bytes | None,
    rotation: Rotation = DEFAULT_ROTATION,
) -> dict[str, bytes] | None:
    """Say what the Secrets are to hold, as one map; None when it is right as it is.

    `data`: what they hold now (`joined`), None if there is nothing yet. `now`: timezone-aware. `names`: DNS names of
    the leaf (see `server_names`). `published`: the caBundle (PEM) that the webhook configuration has now; b"" when it
    has none, None when there is no such configuration (then nobody waits for it). Damaged data is replaced, never
    an exception. Call it again after each change: one call makes one step.
    """
    held = _Held.read(data or {})
    step = _Step(now=now, names=tuple(names), rotation=rotation)
    if not held.leaf_is_good(step):
        return step.replace_leaf(held)
    if held.next_ca is None:
        if NEXT_CA in held.raw:
            return step.drop_next(held)
        return step.announce(held) if held.signer_is_due(step) else step.forget_previous(held)
    known = published is None or _contains(published, held.next_ca.certificate)
    if held.next_since is None:
        return step.start_waiting(held) if known else None
    if known and now >= held.next_since + rotation.bundle_wait:
        return step.switch(held)
    return step.forget_previous(held)


@dataclass(frozen=True, kw_only=True)
class _Authority:
    """A CA that can sign: its certificate with the key that belongs to it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def pem(self) -> bytes:
        return _pem(self.certificate)


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What the Secrets hold, as far as it can be read; whatever is damaged is None or missing."""

    raw: Mapping[str, bytes]
    trusted: tuple[x509.Certificate, ...]
    """Readable certificates of the bundle, in its order."""
    signer: _Authority | None
    leaf: x509.Certificate | None
    """The leaf, if its key fits and the first CA of the bundle signed it."""
    next_ca: _Authority | None
    next_since: datetime | None
    previous_until: datetime | None

    @classmethod
    def read(cls, data: Mapping[str, bytes]) -> "_Held":
        trusted = _certificates(data.get(CA_BUNDLE, b""))
        return cls(
            raw=data,
            trusted=trusted,
            signer=_authority(trusted, data.get(CA_KEY, b"")),
            leaf=_leaf(data, trusted),
            next_ca=_announced(data, trusted),
            next_since=_moment(data.get(NEXT_CA_SINCE)),
            previous_until=_moment(data.get(PREVIOUS_CA_UNTIL)),
        )

    def leaf_is_good(self, step: "_Step") -> bool:
        """Whether the leaf can be served on: alive, with the right names and a CA that is alive; young, if that signs.

        Where the CA's key is lost, an old leaf gives the next CA the rest of its life to be heard of.
        """
        leaf = self.leaf
        if leaf is None or not (_alive(leaf, step.now) and _alive(self.trusted[0], step.now)):
            return False
        is_old = self.signer is not None and _is_due(leaf, step)
        return not is_old and set(step.names) <= set(_dns_names(leaf))

    def signer_is_due(self, step: "_Step") -> bool:
        """Whether a next CA is to be announced: this one is old, or its key is not there any more."""
        return self.signer is None or _is_due(self.signer.certificate, step)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The changes that one call can make, each as the complete new content of both Secrets."""

    now: datetime
    names: tuple[str, ...]
    rotation: Rotation

    def replace_leaf(self, held: _Held) -> dict[str, bytes]:
        """Make a new leaf under the CA; where that one cannot sign, under the next or a new one, at once."""
        signer = held.signer
        if signer is not None and _alive(signer.certificate, self.now):
            return {**known_part(held.raw), **self._leaf(signer)}
        return self.switch(held)

    def switch(self, held: _Held) -> dict[str, bytes]:
        """Let the announced CA (or a new one, where none is) sign; the others stay trusted for a leaf's life."""
        following = held.next_ca
        if following is None or not _alive(following.certificate, self.now):
            following = self._authority()
        before = [ca for ca in held.trusted if ca != following.certificate and _alive(ca, self.now)]
        data = {
            CA_BUNDLE: b"".join(map(_pem, [following.certificate, *before])),
            CA_KEY: _key_pem(following.key),
            **self._leaf(following),
        }
        if before:
            until = self.now + self.rotation.leaf_life + self.rotation.bundle_wait
            data[PREVIOUS_CA_UNTIL] = until.isoformat().encode()
        return data

    def announce(self, held: _Held) -> dict[str, bytes]:
        """Add a next CA to the bundle; nothing is signed by it yet."""
        following = self._authority()
        return {
            **known_part(held.raw),
            CA_BUNDLE: b"".join(map(_pem, [*held.trusted, following.certificate])),
            NEXT_CA: following.pem(),
            NEXT_CA_KEY: _key_pem(following.key),
        }

    def drop_next(self, held: _Held) -> dict[str, bytes]:
        """Take a damaged next CA out, so that another can be announced."""
        gone = (NEXT_CA, NEXT_CA_KEY, NEXT_CA_SINCE)
        return {key: value for key, value in known_part(held.raw).items() if key not in gone}

    def start_waiting(self, held: _Held) -> dict[str, bytes]:
        return {**known_part(held.raw), NEXT_CA_SINCE: self.now.isoformat().encode()}

    def forget_previous(self, held: _Held) -> dict[str, bytes] | None:
        """Stop trusting the CAs before, once no leaf of theirs can be alive; None while that lasts."""
        if held.previous_until is None or self.now < held.previous_until:
            return None
        trusted = [held.trusted[0], *([held.next_ca.certificate] if held.next_ca else [])]
        data = {**known_part(held.raw), CA_BUNDLE: b"".join(map(_pem, trusted))}
        del data[PREVIOUS_CA_UNTIL]
        return data

    def _authority(self) -> _Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        # The subject is unique: with equal subjects a verifier might try the wrong one of two CAs.
        serial = x509.random_serial_number()
        name = _name(f"gpumonitor CA {serial % 2**32:08x}")
        builder = (
            self._builder(name, issuer=name, key=key.public_key(), until=self.now + self.rotation.ca_life)
            .serial_number(serial)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
        )
        return _Authority(certificate=builder.sign(key, hashes.SHA256()), key=key)

    def _leaf(self, signer: _Authority) -> dict[str, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        until = min(self.now + self.rotation.leaf_life, signer.certificate.not_valid_after_utc)
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key())
        builder = (
            self._builder(_name("gpumonitor"), issuer=signer.certificate.subject, key=key.public_key(), until=until)
            .serial_number(x509.random_serial_number())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(map(x509.DNSName, self.names)), critical=False)
            .add_extension(issuer_key, critical=False)
        )
        return {LEAF: _pem(builder.sign(signer.key, hashes.SHA256())), LEAF_KEY: _key_pem(key)}

    def _builder(
        self, subject: x509.Name, *, issuer: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .not_valid_before(self.now - self.rotation.backdate)
            .not_valid_after(until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )


def _only(keys: Iterable[str], data: Mapping[str, bytes]) -> dict[str, bytes]:
    return {key: data[key] for key in keys if key in data}


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _certificates(pem: bytes) -> tuple[x509.Certificate, ...]:
    try:
        return tuple(x509.load_pem_x509_certificates(pem))
    except ValueError:
        return ()


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey | None:
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _fits(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> bool:
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    try:
        return certificate.public_key().public_bytes(*form) == key.public_key().public_bytes(*form)
    except (ValueError, UnsupportedAlgorithm):
        return False


def _authority(certificates: Sequence[x509.Certificate], key_pem: bytes) -> _Authority | None:
    key = _key(key_pem)
    if not certificates or key is None or not _fits(certificates[0], key):
        return None
    return _Authority(certificate=certificates[0], key=key)


def _announced(data: Mapping[str, bytes], trusted: Iterable[x509.Certificate]) -> _Authority | None:
    """The next CA, if it is whole and in the bundle: one that is not could never have been heard of."""
    authority = _authority(_certificates(data.get(NEXT_CA, b"")), data.get(NEXT_CA_KEY, b""))
    return authority if authority is not None and authority.certificate in trusted else None


def _leaf(data: Mapping[str, bytes], trusted: Sequence[x509.Certificate]) -> x509.Certificate | None:
    certificates, key = _certificates(data.get(LEAF, b"")), _key(data.get(LEAF_KEY, b""))
    if not certificates or not trusted or key is None or not _fits(certificates[0], key):
        return None
    try:
        certificates[0].verify_directly_issued_by(trusted[0])
    except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return certificates[0]


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, ValueError):
        return []
    return extension.value.get_values_for_type(x509.DNSName)


def _moment(text: bytes | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat((text or b"").decode())
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def _alive(certificate: x509.Certificate, now: datetime) -> bool:
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def _is_due(certificate: x509.Certificate, step: _Step) -> bool:
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return step.now >= certificate.not_valid_before_utc + step.rotation.renew_at * life


def _contains(pem: bytes, certificate: x509.Certificate) -> bool:
    return certificate in _certificates(pem)
