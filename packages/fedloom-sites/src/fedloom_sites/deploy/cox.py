"""Cox regression at real sites: what is agreed on, and the question of a step.

The server requests sums at one vector of coefficients after another, by Newton's method. A step has one sum.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom.data.input_spec import InputSpec
from fedloom.data.site_rows import column_names
from fedloom.engine.job import Job
from fedloom.engine.privacy import accounted
from fedloom.errors import ConfigError, Refused
from fedloom.lab.experiment import Experiment
from fedloom.tasks.cox_sites import agreed_ranges, agreement_of
from fedloom.tasks.cox_vectors import CoxAgreement
from fedloom.values import Value

MAX_SUMS = 24
"""Most sums of a regression."""
STEPS_FILE = "cox-steps.json"
"""The file in the folder of a site's state with the steps that it has answered."""
MAX_QUESTION_BYTES = 1 << 20
"""Most bytes of a question, or of what was found."""
Number = Annotated[float, Field(allow_inf_nan=False)]


class CoxStep(Value):
    """A step: its number, and coefficients of the columns on [-1, 1]."""

    step: int = Field(ge=0, lt=MAX_SUMS)
    beta: tuple[Number, ...]

    def encode(self) -> bytes:
        """Encode as a message."""
        return self.model_dump_json().encode()


class CoxFound(Value):
    """Final result for sites: coefficients of the columns in their measured units."""

    columns: tuple[str, ...]
    coefficients: tuple[Number, ...]
    standard_errors: tuple[Number, ...]
    likelihood: Number
    rows: int = Field(ge=0)
    events: int = Field(ge=0)


def agreed_cox(experiment: Experiment, samples: InputSpec) -> tuple[CoxAgreement, list[str]] | None:
    """Return the agreement of server and sites on a Cox regression, and its columns, or None without a regression.

    Raises:
        ConfigError: the samples are no times to an event in a table, or a column has no agreed range.
    """
    choice = experiment.find("cox")
    if choice is None:
        return None
    if samples.table is None or samples.task != "survival":
        raise ConfigError("the analysis cox is of times to an event in a table; leave it out")
    if not choice.stratify and (choice.width is None or choice.until is None):
        raise ConfigError("sites of the analysis cox agree on time bins: give width and until, or stratify = true")
    return agreement_of(choice, agreed_ranges(samples.table)), column_names(samples.table)


def check_cox(job: Job, experiment: Experiment, samples: InputSpec) -> None:
    """Refuse a regression that sites cannot take part in.

    Raises:
        ConfigError: see `agreed_cox`. Or there are more bins than a message has room for.
        Refused: what leaves a site must have noise, and these sums have none.
    """
    agreed = agreed_cox(experiment, samples)
    if agreed is not None and accounted(job.setting.channel, job.setting.aggregator) is not None:
        raise Refused(
            "sums of the analysis cox have no noise, and a delta covers all that leaves a site; leave one out"
        )
