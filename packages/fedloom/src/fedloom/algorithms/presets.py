"""Presets: combinations, published in papers, of an algorithm with a sampler, a weigher or pooled data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedloom.algorithms._base import Algorithm, choose_defaults
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedprox import FedProx
from fedloom.choose import Clustered, EquitableWeigher, FairFedWeigher, PowerOfChoice, Sampler, Weigher
from fedloom.hints import unknown_name_error


class PresetMethod(NamedTuple):
    """Algorithm, sampler and weigher that a preset combines. If a part is None, the experiment chooses it."""

    algorithm: Algorithm
    sampler: Sampler | None = None
    weigher: Weigher | None = None
    pooled: bool = False


@dataclass(frozen=True)
class Preset:
    """Named combination of parts.

    Attributes:
        card: text that describes the preset, with its reference and its deviations from the paper. ``fedloom describe``
            prints this text.
        algorithm: algorithm of the preset.
        sampler: sampler of the preset, or None.
        weigher: weigher of the preset, or None.
        pooled: True to train on all clients' data as if they belonged to one client. The model is evaluated on the
            original clients.
        defaults: values of options that differ from the defaults of the parts.
    """

    card: str
    algorithm: type[Algorithm]
    sampler: type[Sampler] | None = None
    weigher: type[Weigher] | None = None
    pooled: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> list[type[Any]]:
        """Parts of the preset that have options: the algorithm, the sampler and the weigher."""
        return [part for part in (self.algorithm, self.sampler, self.weigher) if part is not None]

    @property
    def options(self) -> dict[str, Any]:
        """All options of the preset by name, with the field that defines each option in its component."""
        return {n: f for part in self.parts for n, f in part.model_fields.items() if n != "kind"}

    @property
    def paper(self) -> Mapping[str, Any]:
        """Values in the paper for the options whose default is different."""
        return self.algorithm.paper

    @property
    def released(self) -> Mapping[str, Any]:
        """Values and variants from the paper's public code."""
        return self.algorithm.released

    def makes(self, composition: PresetMethod) -> bool:
        """Return True if a combination consists of exactly the parts of this preset."""
        parts = (composition.algorithm, composition.sampler, composition.weigher)
        same = [None if part is None else type(part) for part in parts] == [self.algorithm, self.sampler, self.weigher]
        return same and composition.pooled == self.pooled

    def __call__(self, **options: Any) -> PresetMethod:
        """Return the preset's combination of parts with the given options.

        Raises:
            ConfigError: none of the parts has this option, or the value is out of range.
        """
        if "defaults" in options:
            options = {**choose_defaults(options["defaults"], self.paper, self.released), **options}
            del options["defaults"]
        chosen = {**self.defaults, **options}
        for name in chosen:
            if name not in self.options:
                raise unknown_name_error("option", name, self.options)

        def make(part: type[Any] | None) -> Any:
            return None if part is None else part(**{n: v for n, v in chosen.items() if n in part.model_fields})

        return PresetMethod(make(self.algorithm), make(self.sampler), make(self.weigher), self.pooled)


CENTRALIZED_PRESET = Preset(
    """Centralized: one model trained on all clients' data in one place, evaluated on the original clients.

Problem: min over x of the mean loss of the pooled data.

Reference: papers on federated learning use this training as an upper limit.

Client state: none. Traffic: the data, sent once. The records count d down and d up per round, as for a model.

Deviations: the method is FedAvg with one client that holds the training data of all clients. Steps and samples are
counted for this client.

Use it to see how much accuracy heterogeneity costs. It is not federated.
""",
    FedAvg,
    pooled=True,
)

EQUITABLE_FL = Preset(
    """Equitable-FL: clusters of clients, found from activations, have equal weights in the mean.

Problem: min over x of (1/C) sum over clusters of the mean loss of their clients.

Reference: "Equitable Federated Learning with Activation Clustering", arXiv:2410.19207, Algorithm 1 (no public code).

    paper    here                    meaning
    w_k      x                       server's model
    mu       mu                      proximal weight of the local problems (FedProx)
    a_i      activations             mean log-softmax of the penultimate representation
    C        clusters                number of clusters
    p_i      1/(C |cluster of i|)    weight of client i

Client state: none. Traffic per round: d values down, d and one activation vector up. The server receives each client's
activations, so secure aggregation is not possible.

Deviations: C is the number of clusters that are not empty, so that the weights sum to 1.

Defaults: mu has the default of FedProx. The right number of clusters depends on the federation. If it is not set, each
round uses the number up to sqrt(m) with the largest mean silhouette, provided that this silhouette is above 0.7 and
that no cluster consists of one client, whose weight would equal the weight of all other clients. Otherwise all clients
have equal weights, and a warning is issued.

Attackers: activations under a forged model differ from all other activations, so attackers form a cluster. With C
clusters, the weight of a forged model is n/(C |cluster|) times its weight in FedAvg, for example 2.5 times for one of
five clients if C is 2. A robust aggregator does not use these weights.

Use it if groups of clients of unequal size should be served equally well. With one cluster, the method is equivalent to
FedProx. If every client has only one class, a cluster may contain few classes and another cluster many. Both have the
same weight, so the model may not learn the classes of the larger cluster.
""",
    FedProx,
    weigher=EquitableWeigher,
)

CLUSTERED_SAMPLING = Preset(
    """Clustered sampling: one client from each of m groups of similar clients, or of groups of equal size in samples.

Problem: min over x of sum_i p_i f_i(x), p_i = n_i/n.

Reference: Y. Fraboni, R. Vidal, L. Kameni, M. Lorenzi, "Clustered Sampling: Low-Variance and Improved Representativity
for Clients Selection in Federated Learning", ICML 2021, arXiv:2105.05883, Algorithm 2 (Cluster2) and 1 (Cluster1,
``by = "size"``).

    paper        here             meaning
    theta        x                server's model
    m            clients          distributions, one client is drawn from each
    W_k          distributions    each sums to 1, and the values of client i sum to m p_i over k
    G_i          g                last change of the model by client i
    rho          distance         angle between two G_i, from which Ward's tree is built

Client state: none. Traffic per round: d values down, d up. The server keeps n d numbers and receives each client's
upload, so secure aggregation is not possible.

Deviations: a client that is drawn from two distributions trains once and has twice the weight. If the cohort size is
not set, it is the cohort size of the run's sampler. If all clients participate with equal probabilities, the sampler
has no effect, and a warning is issued.

Use it for cohorts that represent all clients with less variance than cohorts drawn by size. The mean stays unbiased.
""",
    FedAvg,
    sampler=Clustered,
)

POWER_OF_CHOICE = Preset(
    """Power-of-choice: of d candidates, the clients with the largest losses train.

Problem: min over x of sum_i p_i f_i(x), p_i = n_i/n, from cohorts that favor large f_i.

Reference: Y. J. Cho, J. Wang, G. Joshi, "Towards Understanding Biased Client Selection in Federated Learning", AISTATS
2022, arXiv:2010.01243, Section 4: pow-d, cpow-d (``estimate = "batch"``) and rpow-d (``estimate = "last"``).

    paper      here          meaning
    w          x             server's model
    d          candidates    drawn without replacement with probabilities p_i
    m          clients       candidates with the largest losses, which train
    F_k(w)     estimate      loss of the server's model at client k, or an estimate of it

Client state: none. Traffic per round: d values down, d up. Before the round, except with rpow-d, each candidate
receives d and sends one loss. The server receives each client's loss.

Deviations: rpow-d stores the loss of a client's trained model on its last mini-batch. If the cohort size is not set, it
is the cohort size of the run's sampler. If all clients participate, the sampler has no choice, and a warning is issued.

Use it to train faster by choosing clients with large losses. The limit of the training is biased towards these clients.
""",
    FedAvg,
    sampler=PowerOfChoice,
)

FAIRFED_PRESET = Preset(
    """FairFed: clients whose metric is far from the global metric have a smaller weight.

Problem: min over x of sum_i omega_i f_i(x), with weights omega_i that follow the gaps of a metric.

Reference: Y. H. Ezzeldin, S. Yan, C. He, E. Ferrara, S. Avestimehr, "FairFed: Enabling Group Fairness in Federated
Learning", AAAI 2023, arXiv:2110.00857, Algorithm 1, Eqs. 6 and 7, with the gap of the accuracy.

    paper      here     meaning
    theta      x        server's model
    omega_i    omega    weight of client i, n_i/n at the start
    Delta_i    gap      |metric of client i - global metric|
    beta       beta     fairness budget

Client state: none. Traffic per round: d values down, d + 1 up, d + 9 with a metric of groups. The server sees each
client's metric, or its counts by group. In the paper, secure aggregation hides them.

Deviations: weights are at least 0, as in Equitable-FL (``floor``). The global metric is computed from the metrics of
the cohort. The metric is the accuracy, as in Equitable-FL. The paper compares two sensitive groups instead: set
``metric`` to ``"equal-opportunity"`` or ``"statistical-parity"``, and name the column of the groups in an analysis of
the kind ``groups``.

Defaults: beta = 1/(n rounds). A client whose gap stays one half above the mean gap loses half of a mean weight in a
run, and no client loses its whole weight. A larger step reinforces itself, because a client with a smaller weight falls
further behind. If gaps are small, a run hardly differs from FedAvg. With the accuracy instead of a metric of groups,
the method does not help the worst clients, because their accuracy is far from the mean.

Use it as a baseline for client weighting. With beta = 0, the method is equivalent to FedAvg with weights by samples.
""",
    FedAvg,
    weigher=FairFedWeigher,
)

PRESETS: dict[str, Preset] = {
    "centralized": CENTRALIZED_PRESET,
    "equitable-fl": EQUITABLE_FL,
    "clustered-sampling": CLUSTERED_SAMPLING,
    "power-of-choice": POWER_OF_CHOICE,
    "fairfed": FAIRFED_PRESET,
}
