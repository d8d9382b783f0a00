import csv

import fedloom as fl


def before():
    """Four hospitals in two files: three that train, and one that comes later."""
    heart = fl.load("heart")
    names = [column.name for column in heart.prepare.columns]
    with open("three.csv", "w") as three, open("fourth.csv", "w") as fourth:
        files = [csv.writer(three)] * 3 + [csv.writer(fourth)]
        for file in (files[0], files[3]):
            file.writerow([*names, "hospital", "disease"])
        for row, site, ill in zip(heart.x.tolist(), heart.users.tolist(), heart.y.tolist(), strict=True):
            cells = ["" if value != value else value for value in row]
            files[site].writerow([*cells, heart.user_names[site], heart.classes[ill]])


def after(run):
    """AUROC on the half of the fourth hospital that no model was trained on, a row per seed."""
    opened = fl.open_run(run)
    rows = []
    for seed in range(5):
        for rounds in (1, 5, 20, 40):
            made = opened["ditto", seed].models.adapt(opened.read("fourth.csv"), rounds=rounds, holdout=0.5)
            scores = made.about["scores"]
            if rounds == 1:
                rows.append({"model": "of the three, as it is", "rounds": 0, "auroc": scores["global"]["auroc"]})
            rows.append({"model": "adapted with ditto", "rounds": rounds, "auroc": scores["adapted"]["auroc"]})
            alone = opened["local", seed].models.adapt(opened.read("fourth.csv"), rounds=rounds, holdout=0.5)
            rows.append({"model": "alone", "rounds": rounds, "auroc": alone.about["scores"]["adapted"]["auroc"]})
    return rows
