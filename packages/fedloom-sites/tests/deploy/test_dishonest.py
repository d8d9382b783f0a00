"""A dishonest server under secure aggregation, playing every attack that is known: no honest site opens a sum for it.

The sites are real; what they are asked is made up here. An attack works if the shares that come back are enough to take
the masks off, so there is a control in which the same steps are asked honestly.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.data import DATA_PARTS
from fedloom.errors import Stop
from fedloom.storage import disk
from fedloom_sites.deploy.rehearsal.rogue import RogueServer
from fedloom_sites.deploy.secure import integers
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.protocol import ProtocolBroken
from fedloom_sites.deploy.secure.terms import AnalysisStep, SessionTerms, check_terms
from fedloom_sites.deploy.secure.vectors import MAX_SCORE_TOTAL, ScoreVector, UploadVector
from tests.deploy.scene import Scene
from tests.deploy.sessions import Steps, secured, sum_honestly, terms_of

pytestmark = pytest.mark.attack("also for scores. A dishonest server")

ALL = range(5)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


class Rogue(RogueServer):
    """A server that asks what it likes, and the sites.

    Args:
        here: the deployment.
    """

    def __init__(self, here: Scene) -> None:
        self.here, sites = here, here.clients()
        super().__init__(sites, sites[0].trainer)


@pytest.fixture
def rogue(tmp_path: Path) -> Rogue:
    return rogue_of(tmp_path)


def rogue_of(folder: Path, **agreed: Any) -> Rogue:
    """A dishonest server and five sites of different sizes, with these settings of secure aggregation."""
    cut = {"kind": "dirichlet", "clients": 5, "alpha": 0.5}
    return Rogue(
        secured(
            folder,
            "fedavg",
            client_weights="samples",
            aggregation_weights={"kind": "samples"},
            partition=cut,
            agreed=agreed,
        )
    )


def test_asked_honestly_the_sites_open_the_sum(rogue: Rogue) -> None:
    """The control of all attacks: shares weighted by samples, and the sum is that of the sites' uploads."""
    session = sum_honestly(rogue, 1, rogue.download())
    assert session.told.keys() == {*ALL}
    job = rogue.trainer.job
    uploads = UploadVector(job, rogue.trainer.forms.idle)
    sums, work, clipped = uploads.decode(session.total(rogue.terms(1, rogue.download())), 5, 1.0)
    assert clipped == 0
    assert bool((work > 0).any())
    kept = [s._memory.read(1) for s in rogue.sites]
    expected = sum(k.tensors["reply"].numpy()[:-4] for k in kept if k is not None)
    assert np.array_equal(np.rint(np.ldexp(sums["dw"].numpy(), integers.RESOLUTION_BITS)), expected)
    assert len({s[0] for s in rogue.sizes}) == 5
    assert not rogue.refused


def attacked(rogue: Rogue, asks: Mapping[int, tuple[SessionTerms, bytes]], vectors: Collection[int] = ALL) -> None:
    """A session in which sites are asked different things: some send a vector, and none says a share."""
    session = rogue.begin(1)
    for c, (terms, download) in asks.items():
        session.vector(c, terms, download)
    assert session.vectors.keys() == {*vectors}
    for survivors in ([*session.vectors], [c for c in session.vectors if c], [*session.vectors][:3]):
        for c in session.vectors:
            if c in survivors:
                session.open(c, survivors)
    assert not session.told
    assert rogue.refused


@pytest.mark.parametrize("target", ALL)
def test_shares_that_single_out_a_site(tmp_path: Path, target: int) -> None:
    """The others are told that they hold next to nothing of the samples, or that the target has nearly all.

    Any share of the weight is agreed on here, which would refuse most of these numbers.
    """
    rogue = rogue_of(tmp_path, max_share=1.0)
    download = rogue.download()
    alone = tuple(s if c == target else (1, *s[1:]) for c, s in enumerate(rogue.sizes))
    seen = {c: (rogue.terms(1, download, sizes=alone), download) for c in ALL}
    attacked(rogue, seen, [target])  # the same false sizes for all: the others refuse them
    own = {c: tuple(s if k in (c, target) else (1, *s[1:]) for k, s in enumerate(rogue.sizes)) for c in ALL}
    attacked(rogue, {c: (rogue.terms(1, download, sizes=own[c]), download) for c in ALL})
    huge = {c: tuple((10**9, *s[1:]) if k == target else s for k, s in enumerate(rogue.sizes)) for c in ALL}
    sizes = huge | {target: rogue.sizes}
    attacked(rogue, {c: (rogue.terms(1, download, sizes=sizes[c]), download) for c in ALL})


@pytest.mark.parametrize("target", ALL)
def test_a_dead_model_for_all_but_one(rogue: Rogue, target: int) -> None:
    """With the digest of what each gets, and with that of what the target gets."""
    live, dead = rogue.download(), rogue.download(1e6)
    attacked(rogue, {c: (rogue.terms(1, x), x) for c in ALL for x in [live if c == target else dead]})
    attacked(rogue, {c: (rogue.terms(1, live), live if c == target else dead) for c in ALL}, [target])


@pytest.mark.parametrize("target", ALL)
def test_scores_of_one_site_only(rogue: Rogue, target: int) -> None:
    """Models to be scored come to one site alone, or the others are said to have no samples of a part."""
    download, model = rogue.download(), rogue.model()
    session = rogue.begin(1)
    asked = rogue.terms(1, download, [model], scored=0, common=True)
    for c in ALL:
        session.vector(c, *((asked, download, model) if c == target else (rogue.terms(1, download), download)))
    for c in session.vectors:
        session.open(c)
    assert not session.told
    sizes = tuple(s if c == target else (s[0], 0, 0) for c, s in enumerate(rogue.sizes))
    session = rogue.begin(1)
    for c in ALL:
        session.vector(c, rogue.terms(1, download, [model], scored=0, common=True, sizes=sizes), download, model)
    assert session.vectors.keys() == {target}
    session.open(target)
    assert not session.told
    assert not [r for r in rogue.refused if "the message is for" in r]


@pytest.mark.parametrize("target", ALL)
def test_figures_that_one_site_has_alone(rogue: Rogue, target: int) -> None:
    """All sites are said to have what the target has, or all figures; or each is told the truth about itself alone."""
    download, model = rogue.download(), rogue.model()
    true = tuple(s.answers.figures for s in rogue.sites)
    more = {"scored": 0, "common": True}
    fewer = tuple(f if c == target else f"{int(f, 16) >> 1:x}" for c, f in enumerate(true))
    own = {c: tuple(f if k == c else f"{int(f, 16) | 1 << 40:x}" for k, f in enumerate(true)) for c in ALL}
    for lies, answering in ((dict.fromkeys(ALL, fewer), {target}), (own, {*ALL})):
        session = rogue.begin(1)
        for c in ALL:
            session.vector(c, rogue.terms(1, download, [model], **more | {"figures": lies[c]}), download, model)
        assert session.vectors.keys() == answering
        for survivors in ([*session.vectors], [target, *[c for c in session.vectors if c != target][:2]]):
            for c in survivors:
                session.open(c, survivors)
        assert not session.told
    assert any("that its samples allow" in reason for reason in rogue.refused)
    short = rogue.terms(1, download, [model], **more | {"figures": true[:2]})
    session = rogue.begin(1)
    session.vector(target, short, download, model)
    assert not session.vectors


@pytest.mark.parametrize("unable", [1, 4])
@pytest.mark.parametrize("trains", [False, True])
def test_scores_that_few_sites_can_compute(rogue: Rogue, unable: int, trains: bool) -> None:
    """The model overflows at one site or at all but one: the sum, or its difference to another, would be of one site.

    The loss of a part leaves the range of a sum where its rows are long enough in a direction. A loss clipped to that
    range would be a number that the server knows. The upload of a session that scores too stays closed with it.
    """
    job, longest = rogue.trainer.job, []
    direction = torch.from_numpy(np.random.default_rng(3).random(64))
    for c, site in enumerate(rogue.sites):
        fed = site.trainer.fed
        parts = [fed.indices(part, c) for part in DATA_PARTS]
        losses = [(fed.fetch(rows).double().reshape(-1, 64) @ direction)[fed.targets(rows) > 0] for rows in parts]
        longest.append(max(float(loss.sum()) for loss in losses))
    order = sorted(longest, reverse=True)
    middle = (order[unable - 1] + order[unable]) / 2
    model = job.algorithm.global_model(rogue.trainer.node.server) * 0
    tree = job.oracle.layout.tree(model.reshape(1, -1).clone())
    next(part for part in tree.values() if part.dim() == 3)[0, 0] = direction / middle * MAX_SCORE_TOTAL
    crafted = rogue.trainer.forms.write_model(torch.cat([part.flatten() for part in tree.values()]))
    for scored, shown in ((rogue.model(), (5, 5, 0)), (crafted, (5, 5 if trains else 5 - unable, unable))):
        download, t = rogue.download() if trains else None, 2 if scored is crafted else 1
        session = rogue.begin(t)
        terms = rogue.terms(t, download, [scored], scored=t - trains, common=True)
        for c in ALL:
            session.vector(c, terms, download, scored)
        for c in ALL:
            session.open(c)
        assert session.counts(terms) == shown
        assert bool(session.told) is (shown[2] == 0)
    assert {*rogue.refused} <= {
        f"{unable} of the sites could not answer. The difference between this sum and a sum that "
        "includes their answers would reveal these answers",
        "only 1 site answered from their samples, but a sum needs 3 to be decrypted",
    }
    assert len({*rogue.refused}) == 1


def test_the_same_model_in_rounds_that_are_not_agreed(rogue: Rogue) -> None:
    """Rounds beyond the experiment's four, or before its first."""
    download = rogue.download()
    for t in (0, 5, 2000, 2001, 10**9):
        for given in (download, None):
            session = rogue.begin(t)
            more: dict[str, Any] = {} if given is not None else {"scored": t, "common": True}
            if t == 0 and given is None:
                continue  # the first model is scored in round 0
            for c in ALL:
                session.vector(c, rogue.terms(t, given, **more), given)
            assert not session.vectors
    assert all("is not one of the agreed rounds 1 to 4" in reason for reason in rogue.refused)


SCORES = terms_of(3).with_(round=2, trains=False, scored=2, download="", figures=("3", "3", "3"))
STEP = SCORES.with_(scored=-1, question=AnalysisStep.create("regression", 0, b"0.5"))
WRONG: dict[str, tuple[SessionTerms, str]] = {
    "a step of a regression that scores too": (STEP.with_(scored=2), "must not ask for anything else"),
    "a step of a regression that trains too": (STEP.with_(trains=True), "must not ask for anything else"),
    "an analysis that is called uploads": (
        STEP.with_(question=AnalysisStep.create("uploads", 0, b"")), "analysis name"
    ),
    "sizes of fewer sites": (SCORES.with_(sizes=SCORES.sizes[:2]), "must list sites of the agreement"),
    "sizes of more sites": (SCORES.with_(sizes=SCORES.sizes * 2), "must list sites of the agreement"),
    "a site twice": (SCORES.with_(cohort=(0, 1, 1)), "each once and in increasing order"),
    "sites in another order": (SCORES.with_(cohort=(1, 0, 2)), "each once and in increasing order"),
    "a site that is none": (SCORES.with_(cohort=(0, 1, 3)), "each once and in increasing order"),
    "sites without this one": (SCORES.with_(cohort=(1, 2), accepted=(0, 0)), "the terms do not list this site"),
    "figures of fewer sites": (SCORES.with_(figures=("3", "3")), "must list the metrics that every site can compute"),
    "figures of no site in a step": (STEP.with_(figures=()), "must list the metrics that every site can compute"),
    "figures where uploads alone are summed": (
        terms_of(3).with_(figures=("3",) * 3), "must list the metrics that every site can compute"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_terms_that_no_site_accepts(case: str) -> None:
    """Each is refused for what it is, and the terms that it differs from are not."""
    for terms, figures in ((SCORES, "3"), (STEP, "3"), (terms_of(3), "")):
        check_terms(terms, 0, (9, 3, 3), figures, 3, 0)
    terms, sentence = WRONG[case]
    with pytest.raises(ProtocolBroken, match=sentence):
        check_terms(terms, 0, (9, 3, 3), terms.figures[0] if terms.figures else "", 3, 0)


def test_terms_of_another_round_than_the_message(rogue: Rogue) -> None:
    download = rogue.download()
    session = rogue.begin(2)
    for c in ALL:
        session.vector(c, rogue.terms(1, download), download)
        session.vector(c, rogue.terms(2, download, scored=3), download)
    assert not session.vectors
    assert len(rogue.refused) == 10


@pytest.mark.parametrize("gone", [[4], [3, 4]])
def test_the_same_model_again_without_a_site(rogue: Rogue, gone: list[int]) -> None:
    """Within the agreed rounds: of the same sites it is opened again, of others not."""
    download, rest = rogue.download(), [c for c in ALL if c not in gone]
    assert sum_honestly(rogue, 1, download).told
    assert sum_honestly(rogue, 2, download).told.keys() == {*ALL}
    assert not sum_honestly(rogue, 3, download, clients=rest).told
    assert len(rogue.refused) == len(rest)
    assert all(
        "differ. The difference between the two sums would reveal these sites" in reason for reason in rogue.refused
    )
    assert sum_honestly(rogue, 3, rogue.download(0.1), clients=rest).told  # of another model the cohort may be another
    model = rogue.model()
    assert sum_honestly(rogue, 1, None, model).told.keys() == {*ALL}
    assert not sum_honestly(rogue, 2, None, model, clients=rest).told


def test_a_site_is_evicted_after_the_sum_was_opened(rogue: Rogue) -> None:
    """The server provokes an eviction and subtracts: a round of which a share is open is never summed of others."""
    download = rogue.download()
    first = sum_honestly(rogue, 1, download)
    assert first.told.keys() == {*ALL}
    second = sum_honestly(rogue, 1, download, clients=[0, 1, 2, 3])
    assert not second.told
    assert all("were already summed over different sites. The" in reason for reason in rogue.refused)


def test_another_model_in_a_round_that_was_summed(rogue: Rogue) -> None:
    """Of the same sites too: a round has one sum, so crafted models in great number are not answered."""
    model = rogue.model()
    assert sum_honestly(rogue, 1, rogue.download()).told.keys() == {*ALL}
    assert not sum_honestly(rogue, 1, rogue.download(0.1)).told
    assert sum_honestly(rogue, 1, None, model).told.keys() == {*ALL}
    assert not sum_honestly(rogue, 1, None, model, model).told
    assert len(rogue.refused) == 10
    assert all(
        "were already summed for a different model or from different states" in reason for reason in rogue.refused
    )
    assert sum_honestly(rogue, 1, rogue.download()).told.keys() == {*ALL}  # the same again is no news


@pytest.mark.parametrize("target", [0, 4])
def test_one_site_is_asked_from_another_state(rogue: Rogue, target: int) -> None:
    """Its upload changes alone: two sums on one model, in one round or in two, would tell by how much."""
    download, after = rogue.download(), (1,) * 5
    back = tuple(0 if c == target else 1 for c in ALL)
    assert sum_honestly(rogue, 1, download).told.keys() == {*ALL}
    assert sum_honestly(rogue, 2, rogue.download(0.1), accepted=after).told.keys() == {*ALL}
    assert not sum_honestly(rogue, 2, rogue.download(0.1), accepted=back).told
    assert not sum_honestly(rogue, 3, rogue.download(0.1), accepted=back).told
    ahead = tuple(int(c == target) for c in ALL)
    assert not sum_honestly(rogue, 2, download, accepted=ahead).told
    assert all("summed" in reason for reason in rogue.refused)
    session = rogue.begin(3)
    terms = rogue.terms(3, download, accepted=after)
    for c in ALL:
        session.vector(c, terms, download, accepted=back[c])
    assert session.vectors.keys() == {*ALL} - {target}


def test_a_site_is_evicted_before_the_sum_is_opened(rogue: Rogue) -> None:
    """The new session's sum is opened, and that of the session before can be no more."""
    download = rogue.download()
    first, terms = rogue.begin(1), rogue.terms(1, download)
    for c in ALL:
        first.vector(c, terms, download)
    assert first.vectors.keys() == {*ALL}
    second = sum_honestly(rogue, 1, download, clients=[0, 1, 2, 3])
    assert second.told.keys() == {0, 1, 2, 3}
    for c in ALL:
        first.open(c)
    assert first.shown.keys() == {4}  # which has heard of no other session: one share is no secret
    assert not first.told
    with pytest.raises(ProtocolBroken, match="1 site sent their shares, but 3 are required"):
        first.counts(terms)


@pytest.mark.parametrize("t", [0, 4])
def test_scores_of_fewer_sites_after_damage_where_nothing_was_trained(rogue: Rogue, t: int) -> None:
    """No site has the state of a round, but each has its log of the shares that it gave."""
    model, rest = rogue.model(), [0, 1, 2, 3]
    assert sum_honestly(rogue, t, None, model).told.keys() == {*ALL}
    for content in (b"damaged", None):
        for site in rogue.here.sites:
            [file] = site.state.rglob("opened.json")
            file.unlink() if content is None else file.write_bytes(content)
        rogue.sites = rogue.here.clients()
        assert not sum_honestly(rogue, t, None, model, clients=rest).told
    assert len(rogue.refused) == 2 * len(rest)
    assert all(f"round {t} is too long ago: fedloom no longer knows" in reason for reason in rogue.refused)


class Killed(BaseException):
    """A site's process has ended."""


def killed_at(place: int) -> Callable[[str, Path], None]:
    """The end of a process before its step of work on the disk of that number."""
    count = itertools.count(1)

    def hook(_op: str, _path: Path) -> None:
        if next(count) >= place:
            raise Killed

    return hook


@pytest.mark.parametrize("action", ["unmask", "keys"])
@pytest.mark.parametrize("damaged", ["nothing", "session", "opened", "session and opened"])
def test_a_site_killed_at_any_write_opens_one_sum(
    action: str, damaged: str, tmp_path: Path, record_property: Any
) -> None:
    """It ends in the last step or as another session begins; then two lists are asked for, which all have signed."""
    here, tries, opened = secured(tmp_path, "fedavg"), 0, set[int]()
    for order in ([5, 4], [4, 5]):
        for place in itertools.count(1):
            tries, folder, answers = tries + 1, f"{order[0]}-{place}", set[bytes]()
            steps = Steps(here, folder)
            steps.receive(0, ALL)
            steps.masked(0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(disk, "hook", killed_at(place))
                try:
                    answers |= {steps.reveal(0, ALL) if action == "unmask" else steps.sites[0].keys(2, steps.nonce)}
                    done = True
                except Killed:
                    done = False
            steps.sites[0] = steps.member(0)
            for file in steps.settings[0].state.rglob("*.json"):
                if file.stem in damaged:
                    file.write_bytes(b"damaged")
            answers = answers if action == "unmask" else set()
            for count in order:
                try:
                    answers.add(steps.reveal(0, range(count)))
                except ProtocolBroken:
                    continue
                opened.add(count)
            assert len(answers) <= 1, place
            assert damaged != "nothing" or answers or action == "keys", place
            if done:
                break
    assert tries > 2 * 5
    assert opened == (set() if "session" in damaged else {4, 5})
    record_property("tries", tries)


@pytest.mark.parametrize("target", ALL)
def test_another_list_of_shares_for_one_site(rogue: Rogue, target: int) -> None:
    """A split view of who shared: the target has masks with sites that the others say are lost."""
    download, terms = rogue.download(), rogue.terms(1, rogue.download())
    session = rogue.begin(1)
    few = [target, *[c for c in ALL if c != target][:2]]
    for c in ALL:
        session.vector(c, terms, download, peers=few if c == target else None)
    for survivors in (ALL, few, [c for c in ALL if c not in few[1:]]):
        for c in survivors:
            session.open(c, survivors)
    assert not session.told


# ------------------------------------------------------------------------------------------ who survived, at nine sites


def split(tmp_path: Path, threshold: int, colluders: Collection[int]) -> tuple[set[str], Steps]:
    """The lists that nine sites open, of which some are told that all survived, and some that the last was lost.

    Colluding sites sign both lists and say both shares, against their own protocol.
    """
    here = secured(tmp_path, "fedavg", threshold, partition={"kind": "iid", "clients": 9, "max_train_per_client": 24})
    steps = Steps(here)
    honest_ones = [c for c in range(8) if c not in colluders]
    for c in range(9):
        steps.receive(c, range(9))
        steps.masked(c)
    lost = secure.join_parts(dict.fromkeys(range(8), b""))
    half = (len(honest_ones) + 1) // 2
    signers, others = honest_ones[:half], [*honest_ones[half:], 8]
    for c in signers:
        steps.sites[c].agree(1, steps.nonce, lost)
    opened = {"all": len(colluders), "eight": len(colluders)}
    for c in (*signers, *others):
        for name, survivors, signed in (
            ("all", range(9), range(9)),
            ("eight", range(8), [*signers, *colluders]),
        ):
            try:
                steps.reveal(c, survivors, signed)
            except ProtocolBroken:
                continue
            opened[name] += 1
    return {name for name, count in opened.items() if count >= threshold}, steps


@pytest.mark.parametrize(("threshold", "colluders"), [(5, []), (6, [0]), (7, [0, 1]), (7, [0, 1, 2, 3])])
def test_a_split_view_of_nine_sites_opens_one_sum_at_most(threshold: int, colluders: list[int], tmp_path: Path) -> None:
    """Within 2 T > n + c, both the sum of nine and that of eight, whose difference is one upload, are never open."""
    assert len(colluders) <= secure.max_colluders(9, threshold)
    found, _ = split(tmp_path, threshold, colluders)
    assert len(found) <= 1


def test_the_bound_of_a_split_view_is_sharp(tmp_path: Path) -> None:
    """One colluding site more, and both sums are open: the attack above is a real one."""
    assert secure.max_colluders(9, 5) == 0
    found, _ = split(tmp_path, 5, [0])
    assert found == {"all", "eight"}


# -------------------------------------------------------------------------------------------- whose sum a sum really is


def tables(folder: Path, rows: Sequence[int], **changes: Any) -> Scene:
    """Five sites with tables of their own, of so many rows each."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0).normal(size=(max(rows), 2))
    lines = [f"{a},{b},{int(a > b)}\n" for a, b in numbers]
    (folder / "all.csv").write_text("a,b,y\n" + "".join(lines))
    cut = {"kind": "iid", "clients": 5}
    here = secured(folder, "fedavg", data={"source": str(folder / "all.csv")}, partition=cut, **changes)
    sites = []
    for site, count in zip(here.sites, rows, strict=True):
        own = folder / f"{site.site}.csv"
        own.write_text("a,b,y\n" + "".join(lines[:count]))
        sites.append(site.with_(data={"source": str(own)}, share="all"))
    return here._replace(sites=sites)


FEW = "sites of the sum have samples, but 3 are required"


@pytest.mark.parametrize("rows", [(40, 0, 0, 40, 40), (0, 40, 40, 0, 40), (40, 40, 0, 0, 40)])
@pytest.mark.parametrize("what", ["uploads", "scores", "both"])
def test_a_cohort_of_one_site_and_of_sites_without_samples(tmp_path: Path, what: str, rows: tuple[int, ...]) -> None:
    """What sites without samples send can be computed from the download, so a sum with them is that of the others."""
    rogue = Rogue(tables(tmp_path, rows))
    empty, full = ([c for c in ALL if bool(rows[c]) is has] for has in (False, True))
    assert all(not rogue.sizes[c][0] for c in empty)
    download, model = (rogue.download() if what != "scores" else None), rogue.model()
    more: dict[str, Any] = {"scored": 0, "common": True} if what == "both" else {}
    models = [] if what == "uploads" else [model]
    for few in (1, 2):
        clients = sorted([*empty, *full[:few]])
        session = sum_honestly(rogue, 1, download, *models, clients=clients, **more)
        assert not session.vectors
        assert not session.told
        assert {reason for reason in rogue.refused if "sites of the sum have" in reason} == {
            f"{k} of the {len(empty) + k} {FEW}" for k in range(1, few + 1)
        }
    rogue.refused.clear()
    assert sum_honestly(rogue, 1, download, *models, **more).told.keys() == {*ALL}
    assert not rogue.refused


def test_survivors_of_which_one_has_samples(tmp_path: Path) -> None:
    """All five are asked, and the server says that the vectors of two with samples were lost."""
    rogue = Rogue(tables(tmp_path, (40, 0, 0, 40, 40)))
    download = rogue.download()
    session, terms = rogue.begin(1), rogue.terms(1, download)
    for c in ALL:
        session.vector(c, terms, download)
    assert session.vectors.keys() == {*ALL}
    survivors = (0, 1, 2)
    lost = secure.join_parts(dict.fromkeys(survivors, b""))
    for c in survivors:
        assert session.ask(c, "agree", lost) is None
        session.open(c, survivors)
    assert not session.told
    assert {*rogue.refused} == {f"1 of the 3 {FEW}"}
    for c in ALL:
        session.open(c)
    assert session.told.keys() == {*ALL}


@pytest.mark.parametrize("clients", [(0, 1, 2), (0, 2, 3, 4)])
def test_a_site_with_most_of_the_weight(tmp_path: Path, clients: tuple[int, ...]) -> None:
    """At most 80 % are one site's, of the cohort and of the survivors; where more is agreed on, more."""
    weighed: dict[str, Any] = {"client_weights": "samples", "aggregation_weights": {"kind": "samples"}}
    rows = (400, 20, 20, 20, 20)
    for most, opens in ((None, False), (1.0, True)):
        agreed = {} if most is None else {"max_share": most}
        rogue = Rogue(tables(tmp_path / str(most), rows, agreed=agreed, **weighed))
        download = rogue.download()
        session = sum_honestly(rogue, 1, download, clients=clients)
        assert session.told.keys() == ({*clients} if opens else set())
        assert all("client 0 has" in reason or "not reached this step" in reason for reason in rogue.refused)
        assert opens or any(
            "of the weight of the sum, but the agreement allows at most 80%" in reason for reason in rogue.refused
        )
    rogue = Rogue(tables(tmp_path / "survivors", (60, 20, 20, 4, 4), agreed={"max_share": 0.6}, **weighed))
    download = rogue.download()
    session, terms = rogue.begin(1), rogue.terms(1, download)
    for c in ALL:
        session.vector(c, terms, download)
    assert session.vectors.keys() == {*ALL}
    for c in (0, 3, 4):
        assert session.ask(c, "agree", secure.join_parts(dict.fromkeys((0, 3, 4), b""))) is None
    assert all("client 0 has" in reason for reason in rogue.refused)
    for c in ALL:
        session.open(c)
    assert session.told.keys() == {*ALL}


def test_scores_of_a_part_that_is_mostly_one_sites(tmp_path: Path) -> None:
    """Uploads count alike, so the round goes on; figures of a part and groups that one site dominates are zero."""
    rogue = Rogue(tables(tmp_path, (400, 20, 20, 20, 20)))
    terms = rogue.terms(1, rogue.download(), [rogue.model()], scored=0, common=True)
    vector = ScoreVector(rogue.trainer.job)
    parts = [part for part, _ in vector.figures]
    assert not any(terms.summed(3, 0.8, parts))
    assert any(terms.summed(3, 1.0, parts))
    for most, other in ((0.8, 0), (1.0, 1)):
        rogue = Rogue(tables(tmp_path / str(most), (400, 20, 20, 20, 20), agreed={"max_share": most}))
        session = sum_honestly(rogue, 0, None, rogue.model())
        total = session.total(rogue.terms(0, models=[rogue.model()], scored=0, common=True))
        assert session.told.keys() == {*ALL}
        assert bool(total[: vector.length].any()) is bool(other)


def test_a_run_with_too_few_samples_at_its_sites_ends_with_a_sentence(tmp_path: Path) -> None:
    """The honest server asks for no sum that the sites would refuse."""
    for rows, sentence in (
        ((40, 0, 0, 0, 40), "2 sites, but the threshold is 3"),
        ((40, 40, 40, 0, 0), ""),
    ):
        here = tables(tmp_path / str(rows[1]), rows)
        stop = here.serve()
        assert stop is (Stop.TOO_FEW if sentence else Stop.DONE)
        assert sentence in (here.summary()["detail"] or "")
        assert not here.audit("rejected")
    here = tables(
        tmp_path / "most", (400, 20, 20, 20, 20), client_weights="samples", aggregation_weights={"kind": "samples"}
    )
    assert here.serve() is Stop.TOO_FEW
    assert (
        "of the weight of the sum, but the agreement allows at most 80% (key `max_share` in the table `secure`)"
        in here.summary()["detail"]
    )
    assert not here.audit("rejected")


def test_a_cohort_that_is_drawn_and_refused_costs_its_round(tmp_path: Path) -> None:
    """Three of five sites are drawn; with the large site among them the round has no sum, and the run goes on."""
    rows, rounds = (200, 20, 20, 20, 20), 8
    drawn: dict[str, Any] = {"sampler": {"kind": "uniform", "clients": 3}, "rounds": rounds}
    agreed = {"changes": rounds, "steady": 0}  # sums of other sites in each round
    here = tables(
        tmp_path, rows, client_weights="samples", aggregation_weights={"kind": "samples"}, agreed=agreed, **drawn
    )
    assert here.serve() is Stop.DONE
    given_up = {line["round"] for line in here.audit("given up")}
    assert all(
        "of the weight of the sum, but the agreement allows at most 80%" in line["reason"]
        for line in here.audit("given up")
    )
    cohorts = {t: {line["client"] for line in here.audit("accepted", kind="masked", round=t)} for t in range(1, 9)}
    assert {t for t, cohort in cohorts.items() if not cohort} == given_up
    assert 0 < len(given_up) < rounds
    assert all(0 not in cohort for cohort in cohorts.values())
    assert not here.audit("rejected")
