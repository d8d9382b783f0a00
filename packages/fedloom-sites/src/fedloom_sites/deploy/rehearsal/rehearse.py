"""Rehearsal, which runs all attacks, one after another, on copies of one site."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory

from fedloom.errors import ConfigError, describe_error
from fedloom.local.oracles.precision import isolate_torch_settings
from fedloom_sites.deploy.rehearsal.copies import RehearsedSite
from fedloom_sites.deploy.rehearsal.messages import MESSAGE_ATTACKS
from fedloom_sites.deploy.rehearsal.outcomes import AttackOutcome, AttackRow, InapplicableAttack
from fedloom_sites.deploy.rehearsal.samples import SAMPLE_ATTACKS
from fedloom_sites.deploy.rehearsal.sums import SUM_ATTACKS
from fedloom_sites.deploy.settings import Site

REHEARSED_ATTACKS: Sequence[tuple[str, Callable[[RehearsedSite], AttackOutcome]]] = (
    *SUM_ATTACKS,
    *SAMPLE_ATTACKS,
    *MESSAGE_ATTACKS,
)
"""Name of every attack, and the function that carries it out."""


def rehearse_attacks(site: Site) -> Iterator[AttackRow]:
    """Yield the results of a dishonest server's attacks on copies of a site, with its data and settings.

    Nothing in the site's folders changes, no connection is opened, and the copies are deleted at the end.

    Args:
        site: the site's settings.

    Yields:
        One row for each attack. An attack that fails because of an error is reported with the verdict OPEN, because it
        has not shown that the site is protected.

    Raises:
        FedloomError: the experiment or the data cannot be read or do not define a run.
        ConfigError: the site has no training samples.
    """
    with TemporaryDirectory(prefix="fedloom-rehearsal-") as folder:
        copies = RehearsedSite(site, Path(folder))
        if not copies.sizes[0]:
            raise ConfigError(f"site {site.site} has no training samples, so the rehearsal has no samples to attack")
        _ = copies.copy().trainer.job
        for name, attack in REHEARSED_ATTACKS:
            yield AttackRow(name, _play_attack(copies, attack))


def _play_attack(copies: RehearsedSite, attack: Callable[[RehearsedSite], AttackOutcome]) -> AttackOutcome:
    try:
        with redirect_stderr(io.StringIO()), isolate_torch_settings(copies.site.threads):  # copies log to stderr
            return attack(copies)
    except InapplicableAttack as error:
        return AttackOutcome("not tried", "", "", str(error))
    except Exception as error:  # an attack that fails does not show that the site is protected
        return AttackOutcome("OPEN", "the attack ended with an error", "unknown", describe_error(error))
