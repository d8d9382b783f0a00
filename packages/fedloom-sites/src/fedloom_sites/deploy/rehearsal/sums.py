"""Attacks on secure sums: a dishonest server tries to obtain a sum over one site, or mostly over one site."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom_sites.deploy.rehearsal.combinations import Row, find_isolated
from fedloom_sites.deploy.rehearsal.copies import RehearsedSite, StandInSite
from fedloom_sites.deploy.rehearsal.outcomes import AttackOutcome, InapplicableAttack, judge_attack
from fedloom_sites.deploy.rehearsal.rogue import RogueServer, RogueSession
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.changes import MAX_CHANGES
from fedloom_sites.deploy.secure.protocol import SIGNATURE_BYTES
from fedloom_sites.deploy.secure.terms import SessionTerms
from fedloom_sites.deploy.secure.vectors import ScoreVector
from fedloom_sites.deploy.settings import MAX_SAFE_SHARE, SecureSettings

HEAVY_SHARES = (0.81, 0.9, 0.99)
"""Shares of the weight that the server claims for the site."""
SERIES_SECONDS = 120.0
"""Time limit for a series of sums, in seconds. The number was chosen so that a person can wait for a rehearsal to
end."""
UNMASKED_REASON = "uploads leave this site without masks. See the row on single uploads"


def agreed_secure_settings(site: RehearsedSite) -> SecureSettings:
    """Return the agreed settings of secure sums.

    Raises:
        InapplicableAttack: the agreement does not include secure sums.
    """
    if site.site.secure is None:
        raise InapplicableAttack(UNMASKED_REASON)
    return site.site.secure


def play_session(
    site: RehearsedSite, rogue: RogueServer, t: int, download: bytes | None, *models: bytes,
    clients: Collection[int] | None = None, survivors: Collection[int] | None = None, **more: Any,
) -> tuple[RogueSession, SessionTerms]:  # fmt: skip
    """Carry out all steps of a session, starting with the rehearsed site, and return the session and its terms.

    The vector of the rehearsed site determines how long the vectors of the other sites are.

    Args:
        site: the rehearsed site.
        rogue: the server.
        t: round.
        download: initial model of the sites' training. None if only scores are requested.
        models: models to be scored.
        clients: sites that receive requests. None for all.
        survivors: sites whose vectors have arrived, as claimed by the server. If None, these are the sites whose
            vectors have actually arrived.
        more: additional fields of the terms.
    """
    cohort = sorted(range(site.clients) if clients is None else clients)
    more |= {} if download is not None else {"scored": t, "common": True}
    session, terms = rogue.begin(t, cohort), rogue.terms(t, download, models, cohort=cohort, **more)
    for c in sorted(cohort, key=lambda c: c != site.client):
        session.vector(c, terms, download, *models)
        if c == site.client and c in session.vectors:
            resize_stand_ins(rogue, session, c)
    if survivors is not None:
        confirm_survivors(session, survivors)
    if not {*(survivors or ())} <= {*session.vectors}:
        return session, terms
    for c in sorted({*session.vectors} - {*(survivors or session.vectors)}) if session.has_counters else ():
        session.count(c, survivors)
    for c in session.vectors:
        session.open(c, survivors)
    return session, terms


def resize_stand_ins(rogue: RogueServer, session: RogueSession, c: int) -> None:
    """Make the stand-ins' vectors as long as the site's vector."""
    for other in rogue.sites:
        if isinstance(other, StandInSite):
            other.length = (len(session.vectors[c]) - SIGNATURE_BYTES - session.counters_bytes) // 8


def confirm_survivors(session: RogueSession, survivors: Collection[int]) -> None:
    """Ask the given sites to sign that the sum covers only them."""
    listed = secure.join_parts(dict.fromkeys(sorted(survivors), b""))
    for c in survivors:
        signature = session.ask(c, "agree", listed) if c in session.vectors else None
        if signature is not None:
            session.vectors[c] = signature + session.vectors[c][SIGNATURE_BYTES:]


def nudge_model(row: Tensor, times: int) -> Tensor:
    """Return a model with each number increased by a few floating-point steps."""
    for _ in range(times):
        row = torch.nextafter(row, torch.full_like(row, torch.inf))
    return row


def open_honest_sum(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of the control: after honest requests, the site and its stand-ins open a sum.

    If no sum is opened, the other rows prove little.
    """
    agreed_secure_settings(site)
    rogue = site.rogue()
    session, _ = play_session(site, rogue, 1, rogue.download())
    tried = f"one honest round of {site.clients} sites"
    if session.is_open:
        return AttackOutcome(
            "remains", tried, f"the sum of {len(session.vectors)} sites", "the sum of a round is released as it is"
        )
    reasons = "; ".join(dict.fromkeys(rogue.refused)) or "no reason was given"
    return AttackOutcome("OPEN", tried, "the round has no sum", f"the study cannot run with these settings: {reasons}")


def isolate_by_empty_sites(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of sums over fewer than T sites with samples, including this site.

    This is requirement R5 of the trust audit.
    """
    agreed, opened = agreed_secure_settings(site), list[int]()
    empty = [0, 0, 0]
    for full in range(1, agreed.threshold):
        for scores in (False, True):
            sizes = {c: site.sizes if k < full - 1 else empty for k, c in enumerate(site.other_clients)}
            rogue = site.rogue(sizes=sizes)
            models: tuple[Any, ...] = (None, rogue.model()) if scores else (rogue.download(),)
            session, _ = play_session(site, rogue, 1, *models)
            opened += [full] if session.is_open and site.client in session.vectors else []
    return judge_attack(
        bool(opened),
        f"sums where 1 to {agreed.threshold - 1} of {site.clients} sites have samples",
        f"a sum needs {agreed.threshold} sites with samples",
        f"sums that contain this site and only {sorted({*opened})} sites with samples",
    )


def isolate_by_drop_outs(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of claiming that most vectors were lost, and of sending two different lists of vectors."""
    agreed, learned_sums = agreed_secure_settings(site), list[str]()
    for count in range(1, agreed.threshold):
        rogue = site.rogue()
        few = sorted([site.client, *site.other_clients[: count - 1]])
        session, _ = play_session(site, rogue, 1, rogue.download(), survivors=few)
        learned_sums += [f"the sum of {count} sites"] if session.is_open else []
    rogue = site.rogue()
    session, _ = play_session(site, rogue, 1, rogue.download())
    first, session.told, session.shown = session.is_open, {}, {}
    confirm_survivors(session, site.other_clients)
    for c in site.other_clients:
        session.open(c, site.other_clients)
    learned_sums += ["two sums of one round that differ by this site's upload"] if first and session.is_open else []
    return judge_attack(
        bool(learned_sums),
        f"lists of survivors with 1 to {agreed.threshold - 1} sites, and two different lists",
        f"a sum needs {agreed.threshold} sites, and a session accepts one list",
        ", ".join(learned_sums),
    )


def dominate_sum(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of sums (of uploads and of scores) that give this site nearly all of the weight."""
    agreed, learned_sums = agreed_secure_settings(site), list[float]()
    count = sum(site.sizes)
    for share in HEAVY_SHARES:
        rest = max(1, int(count * (1 - share) / share / max(1, site.clients - 1)))
        sizes = dict.fromkeys(site.other_clients, (rest, rest, rest))
        rogue = site.rogue(sizes=sizes)
        session, terms = play_session(site, rogue, 1, rogue.download())
        weights = terms.weights(terms.weighed(rogue.trainer.job, site.site.samples))
        shares = [column[site.client] / sum(column) for column in zip(*weights.values(), strict=True) if sum(column)]
        if session.is_open and max(shares, default=0.0) > MAX_SAFE_SHARE:
            learned_sums.append(max(shares))
        if site.copy().trainer.scoring != "masked":
            continue
        rogue = site.rogue(sizes=sizes)
        session, terms = play_session(site, rogue, 1, None, rogue.model())
        vector = ScoreVector(rogue.trainer.job)
        heavy = [terms.is_dominated(part, agreed.threshold, MAX_SAFE_SHARE) for part in vector.parts]
        rows = session.total(terms)[: vector.length].reshape(len(heavy), -1) if session.is_open else np.zeros((0, 4))
        if any(is_heavy and bool(row.any()) for is_heavy, row in zip(heavy, rows, strict=False)):
            learned_sums.append(share)
    return judge_attack(
        bool(learned_sums),
        f"sums where this site has up to {HEAVY_SHARES[-1]:.0%} of the samples",
        f"no site may have more than {agreed.max_share:.0%} of the weight of a sum (max_share)",
        f"a sum where this site has {max(learned_sums, default=0):.0%} of the weight",
    )


def repeat_model(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome if the same model is requested again in the next round, without this site."""
    agreed_secure_settings(site)
    rogue, learned_sums = site.rogue(), list[str]()
    if rogue.trainer.rounds < 2:
        raise InapplicableAttack("the experiment has only one round")
    for what in ("uploads", "scores"):
        if what == "scores" and rogue.trainer.scoring != "masked":
            continue
        models: tuple[Any, ...] = (rogue.download(),) if what == "uploads" else (None, rogue.model())
        first, _ = play_session(site, rogue, 1, *models)
        second, _ = play_session(site, rogue, 2, *models, clients=site.other_clients)
        learned_sums += [what] if first.is_open and second.is_open else []
    return judge_attack(
        bool(learned_sums),
        "the same model in the next round without this site",
        "sums on the same model contain the same sites",
        f"this site's {' and '.join(learned_sums)}, by subtraction",
    )


def open_series(site: RehearsedSite, name: str, cohorts: Sequence[Collection[int]]) -> list[Row]:
    """Request sums of these sites' uploads, one after the other, on very similar models, and return the opened sums.

    If the experiment runs out of rounds, the server starts it again on the same data.

    Args:
        site: the rehearsed site.
        name: name of the folder with the site's memory.
        cohorts: sites in each sum.

    Returns:
        The opened sums.
    """
    rows, memory, end = list[Row](), site.folder / name, time.monotonic() + SERIES_SECONDS
    rogue = site.make_later_rogue_server(0, memory)
    first, rounds = rogue.first_download()[0][0], rogue.trainer.rounds
    for k, clients in enumerate(cohorts):
        if k and k % rounds == 0:
            rogue = site.make_later_rogue_server(k // rounds, memory)
        session, _ = play_session(site, rogue, k % rounds + 1, rogue.write(nudge_model(first, k)), clients=clients)
        rows += [{("uploads", c): 1.0 for c in clients}] if session.is_open else []
        if time.monotonic() > end:
            break
    return rows


def compare_neighbors(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of models that hardly change, if this site is excluded from every second round (R7)."""
    agreed, everyone = agreed_secure_settings(site), range(site.clients)
    cohorts = [everyone if k % 2 == 0 else site.other_clients for k in range(2 * MAX_CHANGES + 4)]
    rows = open_series(site, "neighbors", cohorts)
    differences = sum(one != other for one, other in itertools.pairwise([len(row) for row in rows]))
    tried = f"{len(cohorts)} rounds with nearly the same model, every second one without this site"
    rule = f"sums contain the same sites, apart from at most {agreed.changes} changes per site (changes)"
    learned = f"{differences} differences that contain this site's uploads"
    if (("uploads", site.client),) not in find_isolated(rows, agreed.threshold):
        return judge_attack(False, tried, rule, learned)
    if site.copy().trainer.private:
        return AttackOutcome("remains", tried, f"{learned}, each with its noise", "epsilon accounts for each round")
    if max(differences, agreed.changes) <= MAX_CHANGES:
        return AttackOutcome("remains", tried, learned, f"{rule}. Agree on changes = 0 if no site may be absent")
    return judge_attack(True, tried, rule, learned)


def leave_one_by_one(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of sums that each exclude a different site, which isolates this site."""
    agreed, everyone = agreed_secure_settings(site), range(site.clients)
    cohorts = [everyone, *([c for c in everyone if c != absent] for absent in site.other_clients)]
    is_alone = (("uploads", site.client),) in find_isolated(open_series(site, "leaving", cohorts), agreed.threshold)
    tried = f"{len(cohorts)} sums with nearly the same model, each without a different site"
    learned = "this site's uploads, computed from differences of sums"
    if is_alone and site.copy().trainer.private:
        return AttackOutcome("remains", tried, f"{learned}, with its noise", "epsilon accounts for each round")
    rule = f"every sum contains at least {agreed.steady_sites} sites that were never absent (steady)"
    return judge_attack(is_alone, tried, rule, learned)


def repeat_session_start(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of a second experiment on the same data and the same model, without this site (R12)."""
    agreed_secure_settings(site)
    memory = site.folder / "again"
    rogue = site.make_later_rogue_server(0, memory)
    download = rogue.download()
    before, _ = play_session(site, rogue, 1, download)
    after, _ = play_session(site, site.make_later_rogue_server(1, memory), 1, download, clients=site.other_clients)
    return judge_attack(
        before.is_open and after.is_open,
        "another experiment on the same data and model without this site",
        f"a site remembers sums by the name of its data ({site.site.data_name!r}), across experiments",
        "this site's upload, by subtraction",
    )


def change_terms(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of changing models or terms within a session, and of sending different models to the sites."""
    agreed_secure_settings(site)
    rogue, c = site.rogue(), site.client
    first, second = rogue.download(), rogue.download(0.5)
    session, learned_sums, vectors = rogue.begin(1), list[str](), set[bytes]()
    lies = tuple((one[0] + 1, *one[1:]) if k != c else one for k, one in enumerate(rogue.sizes))
    requests = [(rogue.terms(1, one), one) for one in (first, first, second)] + [
        (rogue.terms(1, first, sizes=lies), first)
    ]
    for terms, download in requests:
        session.vector(c, terms, download)
        vectors.add(session.vectors.pop(c, b""))
    learned_sums += ["two vectors under one mask"] if len(vectors - {b""}) > 1 else []
    rogue = site.rogue()
    session = rogue.begin(1)
    for k in sorted(range(site.clients), key=lambda k: k != c):
        model = first if k == c else second
        session.vector(k, rogue.terms(1, model), model)
        if k == c and c in session.vectors:
            resize_stand_ins(rogue, session, c)
    for k in [*session.vectors]:
        session.open(k)
    learned_sums += ["a sum of different models"] if session.is_open else []
    return judge_attack(
        bool(learned_sums),
        "two models and two lists of terms in one session, and a different model for each site",
        "a session has one answer, and its masks are bound to one model and one list of terms",
        ", ".join(learned_sums),
    )


SUM_ATTACKS: Sequence[tuple[str, Any]] = (
    ("honest round (control)", open_honest_sum),
    ("sites without samples", isolate_by_empty_sites),
    ("drop-outs", isolate_by_drop_outs),
    ("a share of nearly all", dominate_sum),
    ("one model twice", repeat_model),
    ("neighboring sums", compare_neighbors),
    ("all others leave", leave_one_by_one),
    ("the study started again", repeat_session_start),
    ("changed terms", change_terms),
)
