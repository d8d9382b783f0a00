"""User code at real sites: copied with what it imports, compared before it runs, the same everywhere."""

import py_compile
import shutil
import sys
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.errors import ConfigError
from fedloom.lab.cli import app
from fedloom.lab.experiment import parse
from fedloom_sites.deploy import code
from fedloom_sites.deploy.code import check_code, collect_code, read_agreed
from fedloom_sites.deploy.ops.check import check_site
from fedloom_sites.deploy.ops.directory import Location, write_directory
from fedloom_sites.deploy.ops.loopback import LoopbackDeployment
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.ops.processes import ManagedProcesses
from fedloom_sites.deploy.setting_files import read_server, read_site

METHOD = """
from fedloom.algorithms import FedAvg
from {helper} import {name}

class Mine(FedAvg):
    '''Mine: FedAvg of a user.

    Use it to see that it runs.
    '''
    factor: float = {name}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of user code with names of its own, the current directory."""
    place = tmp_path / "here"
    (place / "pack_of_mine" / "deep").mkdir(parents=True)
    monkeypatch.chdir(place)
    (place / "method_of_mine.py").write_text(METHOD.format(helper="helper_of_mine", name="FACTOR"))
    (place / "helper_of_mine.py").write_text("import json\nimport pack_of_mine.deep.numbers\nFACTOR = 1.0\n")
    (place / "pack_of_mine" / "__init__.py").write_text("")
    (place / "pack_of_mine" / "deep" / "__init__.py").write_text("")
    (place / "pack_of_mine" / "deep" / "numbers.py").write_text("TWO = 2\n")
    (place / "not_asked_for.py").write_text("raise AssertionError\n")
    path, finders, modules = list(sys.path), list(sys.meta_path), set(sys.modules)
    yield place
    sys.path[:], sys.meta_path[:] = path, finders
    for name in set(sys.modules) - modules:
        if "mine" in name:
            del sys.modules[name]


@pytest.fixture
def deployed(folder, tmp_path, experiment, monkeypatch):
    """A deployment of it, looked at from elsewhere, by a process that has not imported it."""
    out = tmp_path / "out"
    write_directory(plan_deployment(experiment("method_of_mine:Mine")), out, Location())
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(folder)
    for name in [name for name in sys.modules if "mine" in name]:
        del sys.modules[name]
    return out


FILES = [
    "helper_of_mine.py",
    "method_of_mine.py",
    "pack_of_mine/__init__.py",
    "pack_of_mine/deep/__init__.py",
    "pack_of_mine/deep/numbers.py",
]


def test_what_an_experiment_names_is_copied_with_what_it_imports(deployed):
    for place in (deployed / "server", *sorted((deployed / "sites").iterdir())):
        files = sorted(p.relative_to(place / "code").as_posix() for p in (place / "code").rglob("*.py"))
        assert files == FILES
    server = read_server(deployed / "server" / "server.toml")
    assert sorted(server.code) == FILES
    assert server.code == read_site(deployed / "sites" / "site-1" / "site.toml").code


def test_it_runs_from_there(deployed):
    site = read_site(deployed / "sites" / "site-0" / "site.toml")
    found = type(read_agreed(site).methods[0].setting.method)
    assert found.__name__ == "Mine"
    assert Path(sys.modules[found.__module__].__file__) == site.experiment.parent / "code" / "method_of_mine.py"


def test_check_says_so(deployed):
    site = read_site(deployed / "sites" / "site-0" / "site.toml")
    said = [f for f in check_site(site, offline=True) if f.sentence.startswith("user code")]
    assert [f.level for f in said] == ["ok"]
    assert "method_of_mine.py" in said[0].sentence


@pytest.mark.parametrize("how", ["changed", "missing"])
def test_other_code_is_refused_before_it_runs(deployed, how):
    file = deployed / "sites" / "site-0" / "code" / "helper_of_mine.py"
    if how == "missing":
        file.unlink()
    else:
        file.write_text("raise SystemExit('it ran')\n")
    site = read_site(deployed / "sites" / "site-0" / "site.toml")
    what = "cannot read the user code" if how == "missing" else "helper_of_mine.py is not the agreed"
    for call in (check_code, read_agreed, lambda _: LoopbackDeployment(deployed, ManagedProcesses())):
        with pytest.raises(ConfigError, match=what):
            call(site)
    assert any(f.level == "refused" and what in f.sentence for f in check_site(site, offline=True))
    check_code(read_site(deployed / "sites" / "site-1" / "site.toml"))


HOSTILE = "raise SystemExit('it ran')\n"


def test_nothing_of_the_folder_runs_but_what_was_agreed_on(deployed, tmp_path):
    """A compiled file that is never compared with its source, and a module that takes an installed one's name."""
    folder = deployed / "sites" / "site-0" / "code"
    (folder / "hostile.py").write_text(HOSTILE)
    compiled = Path(cache_from_source(str(folder / "helper_of_mine.py")))
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(folder / "hostile.py"), str(compiled), doraise=True, invalidation_mode=unchecked)
    (folder / "colorsys.py").write_text(HOSTILE)
    sys.modules.pop("colorsys", None)
    read_agreed(read_site(deployed / "sites" / "site-0" / "site.toml"))
    assert sys.modules["helper_of_mine"].FACTOR == 1.0
    assert not import_module("colorsys").__file__.startswith(str(folder))
    with pytest.raises(ModuleNotFoundError):
        import_module("hostile")


def test_a_file_that_changes_after_it_was_compared_does_not_run(deployed, monkeypatch):
    site = read_site(deployed / "sites" / "site-0" / "site.toml")

    def swap(shared):
        check_code(shared)
        (shared.experiment.parent / "code" / "helper_of_mine.py").write_text(HOSTILE)

    monkeypatch.setattr(code, "check_code", swap)
    with pytest.raises(ConfigError, match="is not the agreed user code: its SHA-256 is"):
        read_agreed(site)


def test_an_experiment_file_that_changes_after_it_was_compared_is_not_read(deployed, monkeypatch):
    site = read_site(deployed / "sites" / "site-0" / "site.toml")
    name = read_agreed(site).head.name
    monkeypatch.setattr(code, "check_code", lambda shared: shared.experiment.write_text('name = "other"\n'))
    assert read_agreed(site).head.name == name


@pytest.mark.parametrize("path", ["../mine.py", "/mine.py", "a/../../mine.py", ".py", "a//b.py", "mine.so"])
def test_agreed_files_lie_below_the_folder(deployed, path):
    site = read_site(deployed / "sites" / "site-0" / "site.toml")
    with pytest.raises(ValueError, match="pattern"):
        site.with_(code={path: "0" * 64})


def test_what_is_installed_stays_there_and_is_compared(written):
    site = read_site(written / "sites" / "site-0" / "site.toml")
    import sortedcontainers.sortedlist as module

    found = collect_code({"method": [{"algorithm": "sortedcontainers.sortedlist:SortedList"}]})
    assert not found.files
    assert found.installed == {module.__name__: code.sha256_hex(Path(module.__file__).read_bytes())}
    check_code(site.model_copy(update={"installed": found.installed}))
    for other, why in (({module.__name__: "0" * 64}, "is not the"), ({"no_such.mine": "0" * 64}, "install")):
        with pytest.raises(ConfigError, match=why):
            check_code(site.model_copy(update={"installed": other}))


def test_the_model_too_and_what_is_no_path_is_none(folder, monkeypatch):
    sys.path.append(str(folder))
    import method_of_mine  # noqa: F401

    found = collect_code(
        {"model": {"kind": "import", "path": "method_of_mine:Mine"}, "name": "x:y", "data": {"path": "a:b"}}
    )
    assert sorted(found.files) == FILES
    monkeypatch.setattr(code, "MAX_CODE_BYTES", 100)
    with pytest.raises(ConfigError, match="its own folder, or install it"):
        collect_code({"method": [{"algorithm": "method_of_mine:Mine"}]})
    assert collect_code({"data": {"source": "hub:owner/name"}}) == code.Code({}, {})
    with pytest.raises(ConfigError, match="cannot be found"):
        collect_code({"method": [{"algorithm": "math:floor"}]})


def test_init_tells(folder):
    (folder / "e.toml").write_text(
        'name = "mine"\nrounds = 1\ndata = {source = "digits"}\n'
        'partition = {kind = "iid", clients = 2, max_train_per_client = 30}\n'
        'method = [{algorithm = "method_of_mine:Mine"}]\nlocal = {lr = 0.1}\n'
    )
    done = CliRunner().invoke(app, ["deploy", "init", "e.toml", "--out", "out", "--norm-bound", "7.5"])
    assert done.exit_code == 0, done.output
    assert "user code, copied to all sites: helper_of_mine.py, method_of_mine.py, pack_of_mine" in done.output
    assert read_server(folder / "out" / "server" / "server.toml").norm_bound == 7.5


def test_an_own_task_and_optimiser_are_copied(folder):
    (folder / "loss_of_mine.py").write_text("def loss(output, y):\n    return output.mean()\n")
    (folder / "metric_of_mine.py").write_text("def metric(output, y):\n    return 0.0\n")
    (folder / "steps_of_mine.py").write_text("import torch\nclass Mine(torch.optim.SGD):\n    pass\n")
    settings = parse(
        {
            "data": {"source": "digits"},
            "task": {"loss": "loss_of_mine:loss", "metrics": ["brier", "metric_of_mine:metric"]},
            "method": [{"algorithm": "fedavg", "local": {"optimizer": "steps_of_mine:Mine"}}],
        }
    ).settings()
    assert sorted(collect_code(settings).files) == ["loss_of_mine.py", "metric_of_mine.py", "steps_of_mine.py"]
