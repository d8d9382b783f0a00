"""Notes about options of a run that are set but have no effect."""

from __future__ import annotations

from fedloom.algorithms import upload_fields
from fedloom.choose.samplers import SizedSampler
from fedloom.engine.problem import JobFacts
from fedloom.engine.setting import Setting
from fedloom.local.rows import Fields
from fedloom.rows.attacks import Forgery
from fedloom.values import Value, get_kind, idle_sentence, note_idle_fields


def note_idle_options(problem: JobFacts, server: Fields, chosen: Setting) -> list[str]:
    """Return a note for each option that has no effect because of another option, the method, the model or the data.

    Args:
        problem: facts about the run.
        server: state of the server before round 1.
        chosen: settings of the run without the options that the method derives.
    """
    setting = problem.setting
    tables = {name: getattr(chosen, name) for name in type(chosen).model_fields}
    values = {name: value for name, value in tables.items() if isinstance(value, Value)}
    notes = [*_note_ignored_keys(setting), *_note_idle_attack(problem)]
    for value in values.values():
        notes += note_idle_fields(value, values)
    return [*notes, *_note_options_without_object(problem, server)]


def no_effect_sentence(keys: list[str]) -> str:
    """Return a clause that states that these keys have no effect."""
    return f"{' and '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect"


def _note_ignored_keys(setting: Setting) -> list[str]:
    """Return a note on the keys of local training that the method does not read."""
    method = setting.method
    keys = [f"local.{key}" for key in method.ignored if setting.local.is_set(key)]
    name = method.full_gradients or type(method).__name__
    return [f"{name} computes its own local steps: {no_effect_sentence(keys)}"] if keys else []


def _note_idle_attack(problem: JobFacts) -> list[str]:
    """Return a note if no client attacks, if all clients attack, or if the attack has no effect."""
    setting, attackers, n = problem.setting, problem.attackers, problem.n
    attack, name, notes = setting.attack, type(setting.method).__name__, list[str]()
    if attack is None or not attack.fraction:
        return notes
    if not len(attackers):
        few = f"a fraction of {attack.fraction:g} of {n} clients is less than one client. Set it to {1 / n:.2g} or more"
        notes.append(f"attack {get_kind(attack)!r} has no effect, because {few}")
    elif len(attackers) == n:
        notes.append(f"attack {get_kind(attack)!r} includes all {n} clients, so there is no benign client to evaluate")
    if isinstance(attack, Forgery) and not upload_fields(type(setting.method)):
        notes.append(f"attack {get_kind(attack)!r} has no effect with {name}, which does not upload anything")
    return notes


def _note_options_without_object(problem: JobFacts, server: Fields) -> list[str]:
    """Return a note for each option about models, layers, states or draws that the run does not have."""
    setting, kinds, n = problem.setting, problem.model_kinds(server), problem.eval_fed.n
    evaluate, local, sampler = setting.evaluate, setting.local, setting.sampler
    tracked = "global" in kinds and any(layer.running_mean is not None for layer in problem.oracle.normalisers)
    single = isinstance(sampler, SizedSampler) and sampler.size(problem.n) == 1
    personal, common = "personal" in kinds, problem.eval_fed.test is not None
    idle: list[tuple[Value, str, bool, str]] = [
        (evaluate, "select_on", "hybrid" not in kinds, "the run has no hybrid models"),
        (evaluate, "personal_at_start", not personal, "the run has no personal models"),
        (evaluate, "personal_on_common", not personal, "the run has no personal models"),
        (evaluate, "personal_on_common", personal and not common, "the federation has no common test set"),
        (evaluate, "batchnorm_stats", not tracked, "no global model has layers with running statistics"),
        (evaluate, "clients", len(problem.scored_ids) == n, f"the federation has {n} clients"),
        (local, "optimizer_state", problem.memory is not None and not problem.memory.slots, "the optimizer has none"),
        (local, "optimizer_options", [*local.optimizer_options] == ["dampening"], "dampening needs momentum"),
        *((sampler, key, single, "every cohort has a single client") for key in ("replacement", "by", "distance")),
    ]
    return [
        f"{idle_sentence(value, key)}, because {why}"
        for value, key, is_idle, why in idle
        if is_idle and key in type(value).model_fields and value.is_set(key)
    ]
