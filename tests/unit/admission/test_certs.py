# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The plan of certificates, under virtual time: years of it, with every bundle that a verifier may still hold."""

import functools
import random
import ssl
from collections import deque
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_gpumonitor_operator import certs
from verl_gpumonitor_operator.certs import Rotation, plan, server_names

START = datetime(2030, 1, 1, tzinfo=UTC)
NAMES = server_names("gpumonitor", "gpumonitor-system")
QUICK = Rotation(
    ca_life=timedelta(days=120), leaf_life=timedelta(days=9), bundle_wait=timedelta(days=2), backdate=timedelta(hours=1)
)
DAY = timedelta(days=1)


@functools.cache
def chain(bundle: bytes, leaf_pem: bytes) -> tuple[datetime, datetime]:
    """When a verifier with this bundle takes the leaf: from, until. An empty span if it never does."""
    leaf = x509.load_pem_x509_certificate(leaf_pem)
    for ca in x509.load_pem_x509_certificates(bundle):
        try:
            leaf.verify_directly_issued_by(ca)
        except (ValueError, InvalidSignature):
            continue
        return (
            max(leaf.not_valid_before_utc, ca.not_valid_before_utc),
            min(leaf.not_valid_after_utc, ca.not_valid_after_utc),
        )
    return START, START - DAY


def accepts(bundle: bytes, leaf_pem: bytes, now: datetime) -> bool:
    begin, end = chain(bundle, leaf_pem)
    return begin <= now <= end


def step(data: dict[str, bytes] | None, now: datetime, published: bytes | None = None) -> dict[str, bytes] | None:
    return plan(data, now=now, names=NAMES, published=published, rotation=QUICK)


def made(now: datetime = START) -> dict[str, bytes]:
    data = step(None, now)
    assert data is not None
    return data


@pytest.mark.slow
@pytest.mark.parametrize("configuration", [True, False], ids=["with a webhook configuration", "without one"])
@pytest.mark.parametrize("seed", range(2))
def test_every_bundle_within_the_waiting_time_accepts_the_served_leaf(seed: int, configuration: bool) -> None:
    """Sixteen months in irregular steps; the API server's bundle lags one step, sidecars up to the waiting time."""
    draw = random.Random(seed)  # noqa: S311 - a walk through time, no secret
    data = made()
    now, published, authorities = START, data[certs.CA_BUNDLE], set()
    held: deque[tuple[datetime, bytes]] = deque([(now, data[certs.CA_BUNDLE])])
    while now < START + 500 * DAY:
        now += timedelta(minutes=draw.randint(1, 1400))
        serving = data[certs.LEAF]
        data = step(data, now, published if configuration else None) or data
        # A replica may still serve the leaf of the step before, until it polls the Secret again.
        while held[0][0] < now - QUICK.bundle_wait:
            held.popleft()
        for served in {serving, data[certs.LEAF]}:
            assert accepts(published, served, now)
            assert all(accepts(bundle, served, now) for bundle in {bundle for _, bundle in held})
        published = data[certs.CA_BUNDLE]
        held.append((now, published))
        authorities.add(published.split(b"-----END")[0])
        assert len(x509.load_pem_x509_certificates(published)) <= 3
    assert len(authorities) > 4


def test_a_next_ca_waits_until_the_api_server_carries_it() -> None:
    data = made()
    late = START + 0.9 * QUICK.ca_life
    data = step(data, late, data[certs.CA_BUNDLE]) or data  # a young leaf first
    old_bundle = data[certs.CA_BUNDLE]
    announced = step(data, late, old_bundle)
    assert announced is not None
    assert certs.NEXT_CA in announced
    for hours in range(0, 24 * 6, 12):
        assert certs.NEXT_CA_SINCE not in (step(announced, late + timedelta(hours=hours), old_bundle) or announced)
    waiting = step(announced, late, announced[certs.CA_BUNDLE])
    assert waiting is not None
    assert step(waiting, late + QUICK.bundle_wait - timedelta(seconds=1), waiting[certs.CA_BUNDLE]) is None
    switched = step(waiting, late + QUICK.bundle_wait, waiting[certs.CA_BUNDLE])
    assert switched is not None
    assert switched[certs.CA_BUNDLE].startswith(waiting[certs.NEXT_CA])
    assert certs.NEXT_CA not in switched


def test_a_bundle_erased_by_an_upgrade_holds_the_switch_back() -> None:
    data = made()
    late = START + 0.9 * QUICK.ca_life
    for _ in range(3):
        data = step(data, late, data[certs.CA_BUNDLE]) or data
    assert certs.NEXT_CA_SINCE in data
    after = late + QUICK.bundle_wait
    assert step(data, after, b"") is None
    assert step(data, after, data[certs.CA_BUNDLE]) is not None


def test_nothing_is_written_while_all_is_right() -> None:
    data = made()
    assert step(data, START + timedelta(hours=5), b"") is None


@pytest.mark.parametrize(
    ("share", "renewed"),
    [
        pytest.param(0.6, False, id="a leaf below two thirds of its life stays"),
        pytest.param(0.7, True, id="a leaf past two thirds of its life is renewed"),
        pytest.param(1.5, True, id="a leaf that expired while nobody watched is renewed"),
    ],
)
def test_leaf_renewal(share: float, renewed: bool) -> None:
    data = made()
    after = step(data, START + share * QUICK.leaf_life, data[certs.CA_BUNDLE])
    assert (after is not None) is renewed
    if after is not None:
        assert after[certs.CA_BUNDLE] == data[certs.CA_BUNDLE]
        assert accepts(data[certs.CA_BUNDLE], after[certs.LEAF], START + share * QUICK.leaf_life)


def test_other_names_make_another_leaf_under_the_same_ca() -> None:
    data = made()
    after = plan(data, now=START, names=server_names("other", "ns"), published=None, rotation=QUICK)
    assert after is not None
    assert after[certs.CA_BUNDLE] == data[certs.CA_BUNDLE]
    leaf = x509.load_pem_x509_certificate(after[certs.LEAF])
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "other-webhook.ns.svc" in names.get_values_for_type(x509.DNSName)
    assert "other-controller.ns.svc" in names.get_values_for_type(x509.DNSName)


def test_a_lost_ca_key_leads_to_a_rotation_without_a_gap() -> None:
    data = made()
    data[certs.CA_KEY] = b"gone"
    announced = step(data, START, data[certs.CA_BUNDLE])
    assert announced is not None
    assert announced[certs.LEAF] == data[certs.LEAF]
    assert certs.NEXT_CA in announced


def test_an_expired_ca_is_replaced_at_once() -> None:
    data = made()
    after = step(data, START + 2 * QUICK.ca_life, data[certs.CA_BUNDLE])
    assert after is not None
    assert accepts(after[certs.CA_BUNDLE], after[certs.LEAF], START + 2 * QUICK.ca_life)
    assert certs.PREVIOUS_CA_UNTIL not in after


def test_a_damaged_next_ca_is_taken_out_and_announced_anew() -> None:
    data = made()
    late = START + 0.9 * QUICK.ca_life
    for _ in range(2):
        data = step(data, late, data[certs.CA_BUNDLE]) or data
    data[certs.NEXT_CA_KEY] = b"damaged"
    dropped = step(data, late, data[certs.CA_BUNDLE])
    assert dropped is not None
    assert certs.NEXT_CA not in dropped
    again = step(dropped, late, dropped[certs.CA_BUNDLE])
    assert again is not None
    assert certs.NEXT_CA in again


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(
            [certs.CA_BUNDLE, certs.CA_KEY, certs.LEAF, certs.LEAF_KEY, certs.NEXT_CA, certs.NEXT_CA_SINCE]
        ),
        st.one_of(st.binary(max_size=40), st.sampled_from(list(made().values()))),
    )
)
def test_whatever_the_secret_holds_it_heals_in_a_few_steps(damage: dict[str, bytes]) -> None:
    data: dict[str, bytes] = {**made(), **damage}
    for _ in range(8):
        data = step(data, START, data.get(certs.CA_BUNDLE, b"")) or data
    assert accepts(data[certs.CA_BUNDLE], data[certs.LEAF], START)
    assert step(data, START, data[certs.CA_BUNDLE]) is None


@pytest.mark.parametrize("age", [0.0, 0.9], ids=["at rest", "with a next CA"])
def test_the_two_parts_are_the_whole_and_share_the_bundle_alone(age: float) -> None:
    data = made()
    for _ in range(3):
        data = step(data, START + age * QUICK.ca_life, data[certs.CA_BUNDLE]) or data
    authority, served = certs.authority_part(data), certs.served_part(data)
    assert certs.joined(authority=authority, served=served) == data == certs.known_part({**data, "other": b""})
    assert set(authority) & set(served) == {certs.CA_BUNDLE}
    assert [key for key in served if b"PRIVATE KEY" in served[key]] == [certs.LEAF_KEY]


@settings(max_examples=40, deadline=None)
@given(
    *2
    * (
        st.dictionaries(
            st.sampled_from([*made(), certs.NEXT_CA, certs.NEXT_CA_KEY, certs.PREVIOUS_CA_UNTIL]),
            st.one_of(st.binary(max_size=40), st.sampled_from([*made().values(), *made().values()])),
        ),
    )
)
def test_whatever_the_two_secrets_hold_they_heal(authority: dict[str, bytes], served: dict[str, bytes]) -> None:
    for _ in range(8):
        held = certs.joined(authority=authority, served=served)
        held = step(held, START, served.get(certs.CA_BUNDLE, b"")) or held
        authority, served = certs.authority_part(held), certs.served_part(held)
    assert accepts(served[certs.CA_BUNDLE], served[certs.LEAF], START)
    assert certs.CA_KEY not in served
    assert step(held, START, served[certs.CA_BUNDLE]) is None


def test_openssl_accepts_the_leaf_by_name() -> None:
    """A real TLS handshake in memory, as the API server would do it."""
    data = plan(None, now=datetime.now(UTC), names=NAMES, published=None)
    assert data is not None
    client = ssl.create_default_context(cadata=certs.bundle(data).decode())
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load(server, data)
    shake_hands(server, client, "gpumonitor-webhook.gpumonitor-system.svc")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, client, "another.svc")


def load(context: ssl.SSLContext, data: dict[str, bytes]) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(data[certs.LEAF] + data[certs.LEAF_KEY])
        file.flush()
        context.load_cert_chain(file.name)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Do a handshake through memory buffers. Raises what the client raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=name)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(5):
        for side in (one, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
