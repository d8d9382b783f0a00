"""A client that is left out is scored without the patients whom another client has trained on."""

from __future__ import annotations

import numpy as np
import pandas as pd

import fedloom as fl
from fedloom_clinic.left_out import remove_client, scores_of_new


def test_nobody_who_was_trained_on_is_scored_as_a_new_patient() -> None:
    rng = np.random.default_rng(0)
    patient = np.sort(rng.integers(80, size=240))
    hospital = np.array(["a", "b", "c"])[patient % 3]
    hospital[::7] = "a"  # patients of b and c who were at a, too
    frame = pd.DataFrame({
        "patient_id": patient, "hospital": hospital, "age": rng.normal(60, 9, 240).round(1),
        "crp": rng.exponential(9, 240).round(2), "died": rng.integers(2, size=240),
    })  # fmt: skip
    fed = fl.partitions.natural()(fl.Dataset.create(frame, "died", client_column="hospital", subject="patient_id"), 0)
    result = fl.simulate("fedavg", remove_client(fed, 0), rounds=1)
    scored = scores_of_new(result, fed, 0).to_pylist()
    (rows,) = {row["value"] for row in scored if row["metric"] == "samples"}
    elsewhere = {*frame["patient_id"][frame["hospital"] != "a"]}
    alone = (~frame["patient_id"].isin(elsewhere) & (frame["hospital"] == "a")).sum()
    assert 0 < alone <= rows < (frame["hospital"] == "a").sum()
