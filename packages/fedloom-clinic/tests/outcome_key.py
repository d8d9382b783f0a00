"""Tables whose outcome is documented, by a rule, and their key: target, event and site.

The rule, written before anything was tried on the tables:

1. The packages are statsmodels, lifelines and scikit-learn, as installed. Every ``load_pandas`` of
   ``statsmodels.datasets``, every ``load_*`` of ``lifelines.datasets`` and every bundled ``load_*(as_frame=True)`` of
   ``sklearn.datasets`` is looked at; nothing is fetched from a network.
2. A table has at least 40 rows: two sites of 20 rows. Results of smaller sites are called uncertain by ``init`` itself.
3. The package documents one outcome. In statsmodels it is the one ``endog_name``; for ``engel`` it is ``foodexp``,
   which its documented regression explains. In lifelines it is one right-censored time with its event (columns that the
   package's docstrings and tests give to its fitters). In scikit-learn it is ``target``.
4. The site is the organisation that keeps the row, where there is one: the institution of ``lung`` and the firm of
   ``grunfeld``. A trait of the row, such as its state, region or treatment group, is no site.
5. A table is written by ``to_csv(index=False)`` as ``NAME.csv``. NAME is that of the loader.

Tables of rule 1 and 2 with several outcomes, no outcome, or an outcome that no task takes (interval censoring, late
entry, recurrent events) are in `WITHOUT_ONE`; a draft must ask about them, or refuse. Left-censored tables (``lcd``,
``nh4``) are in neither list, since only their documentation tells them from right-censored ones.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Key(NamedTuple):
    """The outcome of a table, and the column of its sites."""

    target: str
    event: str | None = None
    site: str | None = None


KEY: dict[str, Key] = {
    "statsmodels.anes96": Key("PID"),
    "statsmodels.cancer": Key("cancer"),
    "statsmodels.ccard": Key("AVGEXP"),
    "statsmodels.engel": Key("foodexp"),
    "statsmodels.fair": Key("affairs"),
    "statsmodels.grunfeld": Key("invest", site="firm"),
    "statsmodels.heart": Key("survival", "censors"),
    "statsmodels.modechoice": Key("choice"),
    "statsmodels.nile": Key("volume"),
    "statsmodels.randhie": Key("mdvis"),
    "statsmodels.statecrime": Key("murder"),
    "statsmodels.strikes": Key("duration"),
    "statsmodels.sunspots": Key("SUNACTIVITY"),
    "lifelines.canadian_senators": Key("diff_days", "observed"),
    "lifelines.dd": Key("duration", "observed"),
    "lifelines.gbsg2": Key("time", "cens"),
    "lifelines.kidney_transplant": Key("time", "death"),
    "lifelines.larynx": Key("time", "death"),
    "lifelines.leukemia": Key("t", "status"),
    "lifelines.lung": Key("time", "status", "inst"),
    "lifelines.lupus": Key("time_between_diagnosis_and_last_observation_(years)", "dead"),
    "lifelines.lymphoma": Key("Time", "Censor"),
    "lifelines.multicenter_aids_cohort_study": Key("T", "D"),
    "lifelines.regression_dataset": Key("T", "E"),
    "lifelines.rossi": Key("week", "arrest"),
    "lifelines.waltons": Key("T", "E"),
    "sklearn.breast_cancer": Key("target"),
    "sklearn.diabetes": Key("target"),
    "sklearn.digits": Key("target"),
    "sklearn.iris": Key("target"),
    "sklearn.wine": Key("target"),
}

WITHOUT_ONE = (
    "statsmodels.china_smoking", "statsmodels.co2", "statsmodels.danish_data", "statsmodels.elec_equip",
    "statsmodels.elnino", "statsmodels.fertility", "statsmodels.interest_inflation", "statsmodels.macrodata",
    "statsmodels.star98", "lifelines.diabetes", "lifelines.lymph_node", "lifelines.mice", "lifelines.recur",
    "lifelines.stanford_heart_transplants",
)  # fmt: skip


def frame_of(name: str) -> Any:
    """The table of a name ``package.loader``, as a data frame."""
    package, _, loader = name.partition(".")
    if package == "statsmodels":
        return importlib.import_module(f"statsmodels.datasets.{loader}").load_pandas().data
    load = getattr(importlib.import_module(f"{package}.datasets"), f"load_{loader}")
    return load(as_frame=True).frame if package == "sklearn" else load()
