"""A key that was revoked stays out: at the server that runs, at every later start, and after copies of the folder.

The server is Flower's own database; what its command line would tell it is called directly.
"""

import shutil
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedloom.errors import ConfigError
from fedloom_sites.deploy.ops import admitted, loopback
from fedloom_sites.deploy.ops.admitted import admitted_key_file, is_revoked, revoke
from fedloom_sites.deploy.ops.commands import flower_profile
from fedloom_sites.deploy.ops.loopback import LoopbackDeployment, run_all
from fedloom_sites.deploy.ops.members import remove
from fedloom_sites.deploy.ops.processes import ProcessError

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # of Flower's own migration
SITES = ("site-0", "site-1", "site-2")


class Flower:
    """A server's database, and what Flower's command line does to it."""

    def __init__(self, database):
        self.state = SqlLinkState(str(database), SimpleNamespace(), None)
        self.state.initialize()

    def register(self, file):
        key = public_key_to_bytes(load_ssh_public_key(file.read_bytes()))
        return self.state.create_node("owner", "name", key, 30.0)

    def ask(self, question, _home, *_programs, node):
        assert question == "unregister"
        self.state.delete_node("owner", node)

    def lets_in(self, node):
        return self.state.activate_node(node, 30.0)


@pytest.fixture
def flower(ready, monkeypatch):
    """The server of a try-out, which knows site-0 and site-1."""
    (ready / "local" / "cli").mkdir(parents=True)
    made = Flower(ready / "local" / "superlink.db")
    made.nodes = {name: made.register(admitted_key_file(ready / "server", name)) for name in SITES[:2]}
    monkeypatch.setattr(admitted, "ask_flower", made.ask)
    return made


def test_a_key_is_revoked_by_the_name_of_its_site(ready, flower):
    assert revoke(ready, "site-1") == flower.nodes["site-1"]
    assert not flower.lets_in(flower.nodes["site-1"])
    assert flower.lets_in(flower.nodes["site-0"])
    with pytest.raises(ProcessError, match="rejects the key of site-1, because it was revoked"):
        revoke(ready, "site-1")
    with pytest.raises(ConfigError, match="no site is called birke; sites: site-0, site-1, site-2"):
        revoke(ready, "birke")


def test_no_later_start_of_a_try_out_lets_it_in(ready, flower, monkeypatch):
    monkeypatch.setattr(loopback, "check_certificate", lambda _: None)
    monkeypatch.setattr(LoopbackDeployment, "_await_tls", lambda *_: None)
    monkeypatch.setattr(LoopbackDeployment, "_start", lambda *_: None)
    monkeypatch.setattr(LoopbackDeployment, "run", lambda *_: None)
    begun, said = [], []
    monkeypatch.setattr(LoopbackDeployment, "start_site", lambda _, name: begun.append(name))
    monkeypatch.setattr(LoopbackDeployment, "register", lambda here, file: Flower(here.server.database).register(file))
    revoke(ready, "site-1")
    run_all(ready, said.append)
    assert begun == ["site-0", "site-2"]
    assert [line for line in said if "cannot connect, because its key was revoked" in line and "site-1" in line]
    with pytest.raises(ConfigError, match="the server has not yet registered a key of site-1"):  # it is a new one
        revoke(ready, "site-1")


def test_nor_does_a_copy_of_the_folder_as_it_was(ready, flower, written):
    revoke(ready, "site-1")
    assert {file.name for file in (ready / "server" / "nodes").glob("*.pub")} == {"site-0.pub", "site-2.pub"}
    shutil.copytree(written / "server", ready / "server", dirs_exist_ok=True)
    assert [is_revoked(ready / "server", name) for name in SITES] == [False, True, False]


def test_a_site_may_come_back_with_another_key(ready, flower):
    revoke(ready, "site-1")
    shutil.copy(admitted_key_file(ready / "server", "site-2"), admitted_key_file(ready / "server", "site-1"))
    assert not is_revoked(ready / "server", "site-1")
    number = flower.register(admitted_key_file(ready / "server", "site-1"))
    assert revoke(ready, "site-1") == number
    assert not flower.lets_in(number)
    assert is_revoked(ready / "server", "site-1")


def test_a_site_that_never_came_stays_out_too(ready, flower):
    with pytest.raises(
        ConfigError, match="the server has not yet registered a key of site-2. Also, site-2 cannot connect at any"
    ):
        revoke(ready, "site-2")
    assert is_revoked(ready / "server", "site-2")


def test_the_key_of_a_site_that_was_taken_out_is_revoked(ready, flower):
    remove(ready, "site-1")
    assert revoke(ready, "site-1") == flower.nodes["site-1"]


def test_a_server_that_does_not_answer_is_to_be_told_later(ready, flower, monkeypatch):
    def refuse(*_args, **_values):
        raise ProcessError("supernode unregister 7: no connection")

    with monkeypatch.context() as silent:
        silent.setattr(admitted, "ask_flower", refuse)
        with pytest.raises(ProcessError, match=r"no connection\nsite-1 cannot connect at any later start, because"):
            revoke(ready, "site-1")
    assert is_revoked(ready / "server", "site-1")
    assert revoke(ready, "site-1") == flower.nodes["site-1"]
    assert not flower.lets_in(flower.nodes["site-1"])


def test_where_the_directory_is_in_its_place_its_own_server_is_told(ready, flower, monkeypatch):
    homes = []
    monkeypatch.setattr(admitted, "ask_flower", lambda _question, home, *_a, **_values: homes.append(home))
    revoke(ready, "site-1")
    own = ready / "server" / "cli"
    (own / "config.toml").write_text(flower_profile("127.0.0.1:18000", ready / "server" / "ca.crt"))
    with pytest.raises(
        ConfigError, match=r"cannot read the nodes of .*state/superlink.db .*; start the server"
    ) as error:
        revoke(ready, "site-0")
    assert str(error.value).endswith("because its key is now in nodes/site-0.revoked")
    number = Flower(ready / "server" / "state" / "superlink.db").register(ready / "server" / "nodes" / "site-2.pub")
    assert revoke(ready, "site-2") == number
    assert homes == [ready / "local" / "cli", own]
