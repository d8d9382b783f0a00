"""``settings = "paper"`` takes the papers' constants, transcribed by hand with the place; others may be derived."""

from __future__ import annotations

from typing import Any, get_args
from unittest.mock import ANY

import pytest
import torch
from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic.fields import FieldInfo

from fedloom.algorithms import FIAELT, FLAME, REGISTRY, Preset
from fedloom.errors import ConfigError
from fedloom.experiment import parse
from fedloom.local import Ctx, LocalSGD
from fedloom.rows.layout import Layout

OURS = "no value in the paper"
OPTION = "an option of fedloom; the default is what the paper does"

# method: option: (default, where it is written)
PAPERS: dict[str, dict[str, tuple[Any, str]]] = {
    "fedavg": {"server_lr": (1.0, "McMahan et al. 2017, Algorithm 1: the mean itself")},
    "fedprox": {"mu": (0.01, "Li et al. 2020, Sec. 5.1: tuned in {0.001, 0.01, 0.1, 1}")},
    "fedavg-ft": {
        "epochs": (ANY, OURS),
        "steps": (None, OPTION),
        "lr": (None, "Yu et al. 2020, Sec. 4.1: that of training, or smaller"),
    },
    "fedbabu": {
        "head": ((), OPTION),
        "epochs": (5, "Oh et al. 2022, Sec. 5: fine-tuning epochs of the tables"),
        "lr": (None, OPTION),
        "tunes": ("all", "Sec. 5: whole networks unless it says otherwise"),
    },
    "fedala": {
        "head": ((), OPTION),
        "eta": (1.0, "Zhang et al. 2023, Sec. 5.1"),
        "share": (0.8, "Sec. 5.1: s = 80"),
        "first": (ANY, OURS),
    },
    "fedrod": {"gamma": (1.0, "Chen and Chao 2022, Eq. 8: gamma = 1")},
    "moon": {"mu": (ANY, "Li et al. 2021, Sec. 4.1: tuned in {0.1, 1, 5, 10}"), "tau": (0.5, "Sec. 4.1")},
    "fedpac": {"lam": (1.0, "Xu et al. 2023, Sec. 5.1"), "head_epochs": (1, "Sec. 5.1: one epoch")},
    "fedproto": {"lam": (1.0, "Tan et al. 2022, Sec. 5.1")},
    "cfl": {
        "ratio": (0.25, "felisat/clustered-federated-learning: 0.4 and 1.6"),
        "gap": (-2.0, "the public code has none"),
        "first": (20.0, "the public code: after 20 rounds"),
        "least": (3, "the public code: more than 2 clients"),
    },
    "dbe": {
        "kappa": (50.0, "Zhang et al. 2023: 50 with 512 features"),
        "momentum": (1.0, "Zhang et al. 2023: 1 with them"),
        "memory": (True, OPTION),
    },
    "gpfl": {
        "lam": (0.01, "TsingZ0/GPFL, run_me.sh: for small networks"),
        "mu": (0.1, "TsingZ0/GPFL, run_me.sh: for small networks"),
        "angle": (1.0, OPTION),
    },
    "knn-per": {
        "neighbours": (10, "Marfoq et al. 2022, Sec. 5: k = 10"),
        "scale": (1.0, "omarfoq/knn-per: 1"),
        "weight": (None, "Sec. 5: every client's own"),
        "share": (ANY, "Sec. 5: a validation set"),
    },
    "fedas": {"align": (1, "FedAS in PFLlib: one epoch"), "lr": (None, "a step size of its own there")},
    "fedem": {},
    "pfedfda": {"ridge": (1.0, "cj-mclaughlin/pFedFDA: the identity")},
    "fedfomo": {
        "peers": (ANY, "Zhang et al. 2021: by experiment"),
        "epsilon": (0.3, "Zhang et al. 2021: at first"),
        "decay": (0.05, "Zhang et al. 2021: per round"),
        "share": (ANY, "Zhang et al. 2021: a validation set of every client"),
        "returns": (True, "Zhang et al. 2021: the sum of the update has no term"),
    },
    "ifca": {"clusters": (ANY, "Ghosh et al. 2020, Sec. 6: 2 to 4, by problem")},
    "local": {},
    "centralized": {"server_lr": (1.0, "as FedAvg")},
    "scaffold": {
        "server_lr": (1.0, "Karimireddy et al. 2020, Sec. 7: eta_g = 1"),
        "option": ("II", "Sec. 7: option II"),
        "scaled": (False, "FedDyn's public code only"),
    },
    "feddyn": {
        "alpha": (0.01, "Acar et al. 2021, the authors' example code"),
        "scaled": (False, "the paper's alpha is constant; public code: by samples"),
    },
    "fedpd": {
        "eta": (1.0, "FedDR's scripts: 1 for (.5, .5) and FEMNIST, else 10"),
        "skip": (0.0, OPTION),
        "start": ("own", OPTION),
    },
    "fedadmm": {
        "rho": (0.01, "Gong et al. 2022, Sec. V"),
        "server_lr": (1.0, "Sec. V: eta = 1, 0.5 from round 60 on"),
        "start": ("server", "public code: SGD starts at theta"),
    },
    "fedadmm-inexact": {
        "r0": (None, "MATLAB code: r0 r_i, 0.5 or 0.05; a number of its own in its place"),
        "rho": (ANY, OURS),
        "iterations": (ANY, OURS),
        "inner": (3, "Zhou and Li, MATLAB code: at most 3"),
        "eps0": ("matlab", "MATLAB code: k0^2"),
        "shrink": (0.95, "MATLAB code"),
    },
    "fedadmm-composite": {"eta": (ANY, OURS), "regulariser": (None, OPTION), "start": (None, OPTION)},
    "feddr": {
        "eta": (100.0, "Tran-Dinh et al. 2021, scripts: 100 for iid and (0, 0)"),
        "alpha": (1.95, "always"),
        "regulariser": (None, OPTION),
        "start": ("own", "public code"),
    },
    "fedsplit": {"step": (ANY, OURS)},
    "fiaelt": {
        "regulariser": (None, OPTION),
        "tau": (0.5, "Corollary 2"),
        "r": (0.005, "Corollary 2"),
        "beta": (None, "Corollary 2: 5 L"),
        "smooth": (None, OPTION),
        "solver": ("svrg", "Corollary 2: SVRG, option II"),
        "passes": (ANY, OURS),
        "iterations": (10, "Corollary 2: 9 outer epochs are enough, at most 10"),
        "inner": (200, "Corollary 2: m_i = 200"),
        "lr": (None, "Corollary 2: 1/(40 L)"),
        "start": ("own", OPTION),
    },
    "fedmid": {"regulariser": (None, OPTION), "server_lr": (1.0, "Yuan et al. 2021")},
    "feddualavg": {"regulariser": (None, OPTION), "server_lr": (1.0, "Yuan et al. 2021")},
    "fedskip": {"skip": (3, "Fan et al. 2022: default 3")},
    "fedslr": {
        "eta_g": (10.0, "Huang et al. 2023, Sec. 6.1"),
        "lam": (1e-4, "Sec. 6.1"),
        "mu": (1e-3, "Sec. 6.1"),
        "personal_epochs": (1, "Sec. 6.1: one epoch in phase II"),
        "components": ("lr+s", "the method itself"),
        "method": ("fedslr", OPTION),
        "personal_start": ("zero", "the public code copies w_0; the paper does not say"),
        "personal_decay": ("model", "part of f_i; the public code decays p"),
    },
    "lpgd": {
        "lam": (1e-4, "Huang et al. 2023, Sec. 6.1"),
        "mu": (1e-3, "Sec. 6.1"),
        "personal_epochs": (1, "Sec. 6.1: one epoch in phase II"),
        "components": ("lr+s", "the method itself"),
    },
    "ditto": {
        "lam": (1.0, "Li et al. 2021, Sec. 5: tuned in {0.1, 1, 2}"),
        "personal_lr": (None, OPTION),
        "personal_epochs": (None, OPTION),
        "batches": ("same", "public code"),
        "branch": ("server", "Algorithm 1; FLAME's public code: own"),
    },
    "flame": {
        "lam": (1.0, "Table III"),
        "rho": (0.1, "Table III"),
        "eps0": (None, "the experiments take H epochs of SGD"),
        "shrink": (0.5, OURS),
        "most": (1000, OURS),
        "centre": ("own", "Eq. 11; public code: received"),
        "dual": ("round", "Algorithm 1; public code: epoch"),
        "residuals": (False, OPTION),
        "regulariser": (None, OPTION),
        "solver": ("sgd", OPTION),
        "r": (0.005, OPTION),
        "iterations": (100, OPTION),
        "smooth": (None, OPTION),
    },
    "fedacs": {
        "quantile": (ANY, OURS),
        "among": ("cohort", OPTION),
        "lam": (None, OPTION),
        "copies": (None, OPTION),
    },
    "pfedme": {
        "lam": (15.0, "Dinh et al. 2020, experiments: 15 for MNIST"),
        "eta": (0.005, "experiments: 0.005"),
        "inner": (5, "experiments: K = 5"),
        "personal_lr": (None, "0.1 or 0.09 in the experiments, which fedloom takes from the run"),
        "beta": (1.0, "experiments: 1, 2 where tuned"),
        "theta": ("received", "public code; FLAME's: kept"),
        "moves": ("batch", "Algorithm 1; FLAME's public code: epoch"),
    },
    "perfedavg": {
        "alpha": (0.01, "Huang et al. 2023 (FedSLR), comparison: 0.01"),
        "variant": ("hf", "FedACS's comparison: three data batches"),
        "delta": (0.001, "public codes: 0.001"),
    },
    "apfl": {
        "alpha": (0.5, "FedSLR's comparison: 0.5, fixed"),
        "adaptive": (False, "FedSLR's comparison: fixed"),
        "mix": ("before", "Algorithm 1; public code: after"),
    },
    "fedamp": {
        "lam": (1.0, "PFLlib: 1"),
        "alpha": (1.0, "PFLlib: alphaK = 1"),
        "sigma": (1.0, "PFLlib: 1"),
        "decay": (1.0, "0.1 in the experiments"),
        "every": (30, "experiments: 30 rounds"),
        "start": ("own", OPTION),
        "among": ("cohort", OPTION),
    },
    "heurfedamp": {
        "lam": (1.0, "PFLlib: 1"),
        "alpha": (1.0, "PFLlib: alphaK = 1"),
        "sigma": (25.0, "flgo, not by the authors: 25"),
        "self_weight": (None, "flgo: 1/n"),
        "start": ("own", OPTION),
        "among": ("cohort", OPTION),
    },
    "fedrep": {"head": ((), OPTION), "head_epochs": (10, "Collins et al. 2021, public code: 10")},
    "fedper": {"head": ((), OPTION)},
    "lg-fedavg": {"head": ((), OPTION)},
    "fedbn": {"layers": ((), OPTION)},
    "fedspa": {
        "density": (0.5, "FedSLR's comparison: 0.5"),
        "exchange": (0.5, OURS),
        "horizon": (1000, "FedSLR's comparison: 1000 rounds"),
    },
    "lp-proj": {
        "p": (1.0, "Lin et al. 2022, public code: 1"),
        "lam": (15.0, "public code: 15"),
        "dim": (10, "public code: d = 10"),
        "eta": (0.1, "public code: local_lr 0.1"),
        "local_rounds": (5, "public code: 5"),
        "beta": (1.0, "public code: 1"),
    },
    "admm-lp-proj": {
        "lam": (1.0, "FLAME, Table III"),
        "rho": (0.1, "FLAME, Table III"),
        "dim": (10, "FLAME's public code: d_sub = 10"),
    },
    "equitable-fl": {
        "mu": (0.01, "Equitable-FL: the best of {0.001, 0.01, 0.1, 1} is reported"),
        "clusters": (None, "Table 1: the true number of every federation"),
        "layer": ("penultimate", "Fig. 1: the layer before the last"),
        "log_softmax": (True, "Fig. 1"),
        "reduce": (ANY, OURS),
    },
    "afl": {"lambda_lr": (0.1, "the q-FFL authors' code: learning_rate_lambda = 0.1")},
    "fednova": {"mu": (0.0, OPTION), "gamma": (1.0, OPTION)},
    "fedopt": {
        "optimiser": ("adam", OPTION),
        "server_lr": (ANY, "Reddi et al. 2021: tuned for every task"),
        "beta1": (None, "Sec. 4: 0.9 for Adam and Yogi, 0 for Adagrad"),
        "beta2": (0.99, "Sec. 4"),
        "tau": (1e-3, "Sec. 4"),
    },
    "gifair-fl": {
        "lam": (None, "public code: half of min p_k / (d - 1)"),
        "level": ("individual", "public code: each client its own group"),
    },
    "q-ffl": {"q": (ANY, "Li et al. 2020, Sec. 4: tuned"), "lipschitz": ("step", "Sec. 3.3: 1 / step size")},
    "clustered-sampling": {
        "server_lr": (1.0, "as FedAvg"),
        "fraction": (1.0, OPTION),
        "clients": (None, OPTION),
        "by": ("similarity", "Equitable-FL compares with Cluster2"),
        "distance": ("arccos", "Fraboni et al. 2021, Sec. 5"),
        "masses": ("samples", "p_i = n_i / n"),
    },
    "power-of-choice": {
        "server_lr": (1.0, "as FedAvg"),
        "fraction": (1.0, OPTION),
        "clients": (None, OPTION),
        "candidates": (ANY, "d is unknown in Equitable-FL"),
        "estimate": ("loss", "Cho et al. 2022: pow-d"),
    },
    "fairfed": {
        "server_lr": (1.0, "as FedAvg"),
        "beta": (ANY, "unknown in Equitable-FL"),
        "metric": ("accuracy", "Ezzeldin et al. 2023, Eq. 6: without a metric of groups"),
        "group": (None, "the first of [evaluate] groups"),
        "floor": (True, "Equitable-FL: weights are lower-bounded by 0"),
    },
}


def options_of(name: str) -> dict[str, FieldInfo]:
    entry = REGISTRY[name]
    return entry.options if isinstance(entry, Preset) else dict(entry.model_fields)


def default_of(name: str, option: str) -> Any:
    made = REGISTRY[name](settings="paper")
    parts = [part for part in made[:3] if part] if isinstance(made, tuple) else [made]
    return next(getattr(part, option) for part in parts if option in type(part).model_fields)


def test_the_table_has_every_method() -> None:
    assert sorted(PAPERS) == sorted(REGISTRY)


@pytest.mark.parametrize("name", REGISTRY)
def test_paper_settings_are_the_papers(name: str) -> None:
    want = {option: value for option, (value, _) in PAPERS[name].items()}
    assert {option: default_of(name, option) for option in options_of(name)} == want


def contexts() -> list[Ctx]:
    """Runs of other lengths, step sizes and federations, down to one client with one sample."""
    layout = Layout.from_shapes({"w": (7,)})
    runs = [(0.05, 1, 60, [80, 40, 20]), (0.5, 5, 3, [7]), (1e-3, 1, 1000, [1]), (0.1, 0, 1, [300, 2])]
    return [
        Ctx(
            0, len(sizes), len(sizes), torch.arange(len(sizes)), layout, torch.full((len(sizes), 1), 1 / len(sizes)),
            torch.tensor(sizes)[:, None], None, LocalSGD(lr=lr, epochs=epochs), 0, rounds,
        )
        for lr, epochs, rounds, sizes in runs
    ]  # fmt: skip


@pytest.mark.parametrize("name", REGISTRY)
def test_what_is_derived_is_in_range_and_given_values_stay(name: str) -> None:
    made = REGISTRY[name]()
    method = made.algorithm if isinstance(made, tuple) else made
    for ctx in contexts():
        derived = method.derived(ctx)
        settled = method.with_derived_options(ctx)
        assert {key: getattr(settled, key) for key in derived} == derived
        assert settled.with_derived_options(ctx) == settled
        given = method.with_(**{key: value if isinstance(value, str) else 0.7 for key, value in derived.items()})
        assert given.with_derived_options(ctx) == given


@pytest.mark.parametrize("name", REGISTRY)
def test_pulls_follow_the_length_of_a_round(name: str) -> None:
    """Twice the step size, or twice the epochs, is twice the reach: what is derived sees no other difference."""
    made = REGISTRY[name]()
    method = made.algorithm if isinstance(made, tuple) else made
    ctx = contexts()[0]
    twice = [ctx._replace(local=LocalSGD(lr=0.1, epochs=1)), ctx._replace(local=LocalSGD(lr=0.05, epochs=2))]
    assert [c.reach for c in twice] == pytest.approx([2 * ctx.reach] * 2)
    if name not in ("fedadmm-inexact", "perfedavg", "fedbabu"):  # full gradients; a step, no pull; epochs
        both = [{k: v for k, v in method.derived(c).items() if not isinstance(v, str)} for c in twice]
        assert both[0] == pytest.approx(both[1])


@pytest.mark.parametrize("name", REGISTRY)
def test_a_multiple_is_one_of_what_is_derived(name: str) -> None:
    made = REGISTRY[name]()
    method = made.algorithm if isinstance(made, tuple) else made
    ctx = contexts()[0]
    for option, rule in method.derived(ctx).items():
        if isinstance(rule, str):
            continue
        twice = method.with_(**{option: "2x"})
        assert getattr(twice.with_derived_options(ctx), option) == pytest.approx(2 * rule)
        words = {key: word for key, word in method.derived(ctx).items() if isinstance(word, str)}
        assert twice.with_derived_options(ctx) == method.with_(**{option: 2 * rule}, **words).with_derived_options(
            ctx
        )  # what follows follows
        assert type(twice).model_validate(twice.model_dump()) == twice
        assert method.with_(**{option: "1x"}) == method
        for wrong in ("0x", "-1x", "x", "2"):
            with pytest.raises(ConfigError, match="must be a number, or a multiple"):
                method.with_(**{option: wrong})


def test_a_multiple_of_what_is_not_derived_is_refused() -> None:
    with pytest.raises(ConfigError, match="beta is not derived with these options"):
        FIAELT(solver="svrg", beta="2x").with_derived_options(contexts()[0])


def test_settings_are_default_or_paper() -> None:
    assert FLAME(settings="paper") == FLAME(lam=1.0, rho=0.1)
    assert FLAME(settings="paper", lam=2.0) == FLAME(lam=2.0, rho=0.1)
    assert FLAME(settings="default") == FLAME()
    for entry in (FLAME, REGISTRY["fairfed"]):
        with pytest.raises(ValueError, match="settings must be 'default' or 'paper'"):
            entry(settings="papers")


def test_one_word_takes_the_papers_constants_of_every_method_of_a_file() -> None:
    methods = [
        {"algorithm": "flame"},
        {"algorithm": "feddr", "settings": "default"},
        {"algorithm": "fedprox", "mu": 3.0},
    ]
    read = parse({"data": {"source": "digits"}, "settings": "paper", "method": methods}).methods
    made = [method.setting.algorithm for method in read]
    assert made == [FLAME(settings="paper"), REGISTRY["feddr"](), REGISTRY["fedprox"](mu=3.0)]


@pytest.mark.parametrize("name", REGISTRY)
def test_every_option_says_what_it_is(name: str) -> None:
    for option, field in options_of(name).items():
        assert field.description, f"{name}.{option} has no description"
        assert field.description.strip() == field.description


@pytest.mark.parametrize("name", REGISTRY)
def test_every_number_has_a_range(name: str) -> None:
    """A number below its range, infinity and NaN are refused; so is an option that does not exist."""
    for option, field in options_of(name).items():
        kinds = {field.annotation, *get_args(field.annotation)}
        if kinds & {int, float}:
            bounds = (Ge, Gt, Le, Lt, Interval)
            inner = [m for a in kinds for m in getattr(a, "__metadata__", ())]
            assert any(isinstance(m, bounds) for m in (*field.metadata, *inner)), f"{name}.{option} has no range"
            for wrong in (-1e9, float("inf"), float("nan")):
                with pytest.raises(ConfigError):
                    REGISTRY[name](**{option: wrong})
    with pytest.raises(ValueError, match="no_such_option"):
        REGISTRY[name](no_such_option=1)
