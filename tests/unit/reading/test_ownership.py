# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whose GPUs: the order of witnesses, and what stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.vocabulary import Ownership
from verl_gpumonitor.reading.ownership import Evidence, Owned, own_gpus

NODE = [f"GPU-{n}" for n in range(8)]
MINE, THEIRS = tuple(NODE[2:6]), tuple(NODE[:2] + NODE[6:])

CASES = [
    pytest.param(
        Evidence(requested=0, visible=NODE, ray_agent=NODE),
        Ownership.NONE_REQUESTED,
        (),
        id="CPU-only heads own none",
    ),
    pytest.param(
        Evidence(requested=4, visible=NODE, ray_agent=MINE, ray_head=THEIRS),
        Ownership.RAY_AGENT,
        MINE,
        id="agent",
    ),
    pytest.param(Evidence(requested=4, visible=NODE, ray_head=MINE), Ownership.RAY_HEAD, MINE, id="then the head"),
    pytest.param(
        Evidence(requested=4, visible=NODE, ray_agent=NODE, ray_head=MINE),
        Ownership.RAY_HEAD,
        MINE,
        id="an agent that names more than requested is not believed",
    ),
    pytest.param(
        Evidence(requested=4, visible=NODE, ray_agent=NODE), Ownership.UNKNOWN, (), id="nor does it name too many"
    ),
    pytest.param(Evidence(requested=8, visible=NODE), Ownership.WHOLE_NODE, tuple(NODE), id="the whole node"),
    pytest.param(Evidence(requested=4, visible=NODE), Ownership.UNKNOWN, (), id="half a node, and nobody names any"),
    pytest.param(Evidence(requested=4), Ownership.UNKNOWN, (), id="nothing to be seen"),
    pytest.param(Evidence(requested=4, visible=NODE, marks=MINE), Ownership.MARKS, MINE, id="marks"),
    pytest.param(
        Evidence(requested=4, visible=NODE, processes=MINE), Ownership.PROCESSES, MINE, id="processes of the pod"
    ),
    pytest.param(
        Evidence(requested=4, visible=NODE, processes=NODE), Ownership.UNKNOWN, (), id="processes on too many GPUs"
    ),
    pytest.param(
        Evidence(requested=4, ray_agent=MINE), Ownership.RAY_AGENT, MINE, id="also where the sidecar sees no GPU itself"
    ),
    pytest.param(
        Evidence(requested=4, ray_agent=[*MINE, *MINE]), Ownership.RAY_AGENT, MINE, id="named twice is named once"
    ),
    pytest.param(
        Evidence(requested=4, ray_agent=MINE[:3]), Ownership.RAY_AGENT, MINE[:3], id="three of four are three"
    ),
]


@pytest.mark.parametrize(("evidence", "by", "uuids"), CASES)
def test_whose(evidence: Evidence, by: Ownership, uuids: tuple[str, ...]) -> None:
    assert own_gpus(evidence) == Owned(by=by, uuids=uuids)


def test_what_is_settled_stays_when_a_gpu_disappears() -> None:
    known = own_gpus(Evidence(requested=4, visible=NODE, ray_agent=MINE))
    assert own_gpus(Evidence(requested=4, visible=NODE[:5], ray_agent=MINE[:3]), known) == known
    assert own_gpus(Evidence(requested=4), known) == known
    assert own_gpus(Evidence(requested=4, visible=THEIRS), known) == known, "four others left are not ours"


def test_processes_add_up_as_ranks_start_and_end() -> None:
    known = Owned()
    for seen in [MINE[:1], MINE[1:3], (), MINE[3:]]:
        known = own_gpus(Evidence(requested=4, visible=NODE, processes=seen), known)
    assert known == Owned(by=Ownership.PROCESSES, uuids=MINE)


def test_a_better_witness_replaces_a_guess_that_is_not_whole() -> None:
    known = own_gpus(Evidence(requested=4, visible=NODE, processes=MINE[:2]))
    assert own_gpus(Evidence(requested=4, visible=NODE, ray_agent=MINE), known).by is Ownership.RAY_AGENT


def test_a_worse_witness_must_agree() -> None:
    known = own_gpus(Evidence(requested=4, ray_agent=MINE[:3]))
    assert own_gpus(Evidence(requested=4, processes=THEIRS), known) == known
    assert own_gpus(Evidence(requested=4, processes=MINE), known) == Owned(by=Ownership.PROCESSES, uuids=MINE)


names = st.one_of(st.none(), st.lists(st.sampled_from(NODE), max_size=10))
WITNESSES = ("visible", "ray_agent", "ray_head", "marks", "processes")
testimony = st.fixed_dictionaries(dict.fromkeys(WITNESSES, names))


@given(requested=st.integers(0, 8), sequence=st.lists(testimony, max_size=12))
def test_never_more_than_requested_and_never_fewer_than_before(
    requested: int, sequence: list[dict[str, list[str] | None]]
) -> None:
    known = Owned()
    for said in sequence:
        named = {uuid for uuids in said.values() for uuid in uuids or ()}
        before, known = known, own_gpus(Evidence(requested=requested, **said), known)
        assert len(known.uuids) <= requested
        assert len(set(known.uuids)) == len(known.uuids)
        assert len(known.uuids) >= len(before.uuids)
        assert set(known.uuids) <= named | set(before.uuids), "what nobody said is not invented"
        if requested and before.settled(requested):
            assert known == before
