"""Settings of a server and a site: what is written is what is read; what cannot be is a sentence."""

import tomllib

import pytest

from fedloom.data.input_spec import InputSpec
from fedloom.errors import ConfigError
from fedloom.version import __version__
from fedloom_sites.deploy.setting_files import check_fingerprint, read_server, read_site, settings_text, sha256_hex
from fedloom_sites.deploy.settings import Member, SecureSettings, Server, Site
from fedloom_sites.deploy.site.handover import state_folder

KEY = "ecdsa-sha2-nistp384 AAAA{}"
SCHEMA = {"task": "binary", "shape": (26,), "classes": ("healthy", "disease")}


def shared(folder):
    experiment = folder / "experiment.toml"
    experiment.write_text('name = "try"\n')
    return {
        "name": "try",
        "experiment": "experiment.toml",
        "fingerprint": sha256_hex(experiment.read_bytes()),
        "version": "1.0",
        "clients": 2,
        "samples": InputSpec(**SCHEMA),
    }


def site(folder, **changes):
    given = {"site": "north", "client": 1, "server": "127.0.0.1:18000", "data": {"source": "digits"}, **changes}
    return Site(**shared(folder), **given)


def server(folder, **changes):
    sites = [
        Member(site=name, client=k, node_key=KEY.format(k), signing_key=f"ssh-ed25519 BBBB{k}")
        for k, name in enumerate(("south", "north"))
    ]
    return Server(**shared(folder), **{"sites": sites, "quorum": 2, **changes})


@pytest.mark.parametrize(("make", "read"), [(site, read_site), (server, read_server)])
def test_round_trip_with_paths_made_absolute(tmp_path, make, read):
    value, path = make(tmp_path), tmp_path / "settings.toml"
    path.write_text(settings_text(value))
    again = read(path)
    for name in type(value).model_fields:
        before, after = getattr(value, name), getattr(again, name)
        assert after == (tmp_path / before if hasattr(before, "parent") else before), name
    check_fingerprint(again)


def test_a_sites_data_is_looked_for_in_its_own_folder(tmp_path):
    path = tmp_path / "site.toml"
    for given, found in (("x.csv", tmp_path / "x.csv"), ("/srv/x.csv", "/srv/x.csv")):
        path.write_text(settings_text(site(tmp_path, data={"source": "csv", "path": given})))
        assert read_site(path).data == {"source": "csv", "path": str(found)}


@pytest.mark.parametrize("change", [("", ""), ("\n", "\r\n"), ("", "\ufeff", 1)])
def test_who_answers_reads_a_site_file_as_who_checks_it(change, tmp_path):
    """Also as an editor of Windows saves it: other ends of lines, a byte order mark."""
    path = tmp_path / "site.toml"
    path.write_text(settings_text(site(tmp_path)).replace(*change), newline="")
    assert state_folder(path) == read_site(path).folder


@pytest.mark.parametrize("name", ["state", "node_key"])
def test_a_path_with_the_character_nul_is_refused(name, tmp_path):
    path = tmp_path / "site.toml"
    path.write_text(settings_text(site(tmp_path, **{name: "a\0b"})))
    with pytest.raises(ConfigError, match=f"{name} = .* contains a NUL character"):
        read_site(path)


def test_another_experiment_file_is_refused_with_both_digests(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text(settings_text(site(tmp_path)))
    value = read_site(path)
    value.experiment.write_text('name = "other"\n')
    with pytest.raises(ConfigError) as error:
        check_fingerprint(value)
    assert value.fingerprint[:16] in str(error.value)
    assert sha256_hex(value.experiment.read_bytes())[:16] in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"client": 2}, "client must be from 0 to 1, got 2"),
        *(
            ({"server": text}, f"server: must be host:port, such as fl.example.org:8443, got {text!r}")
            for text in ("https://host:1/x", "https://host:1", "host", "host:", ":1", "host:0", "host:65536", "host:²")
        ),
        ({"data": {"path": "x.csv"}}, "must contain source"),
        ({"tread": 2}, "did you mean 'threads'"),
        ({"fingerprint": "abc"}, "fingerprint"),
    ],
)
def test_site_errors_name_file_and_key(tmp_path, change, sentence):
    path = tmp_path / "site.toml"
    document = tomllib.loads(settings_text(site(tmp_path)))
    import tomli_w

    path.write_text(tomli_w.dumps({**document, **change}))
    with pytest.raises(ConfigError) as error:
        read_site(path)
    assert str(path) in str(error.value)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"quorum": 3}, "quorum must be at most the number of sites (2), got 3"),
        ({"deadline": 50.0, "ttl": 20.0}, "ttl (20.0 s) must be at least the deadline (50.0 s)"),
        ({"body_limit": 1000}, "body_limit"),
    ],
)
def test_server_errors(tmp_path, change, sentence):
    with pytest.raises(ValueError, match="^Server: ") as error:
        server(tmp_path, **change)
    assert sentence in str(error.value)


def test_a_key_or_number_twice_is_refused(tmp_path):
    one = Member(site="a", client=0, node_key=KEY.format(1), signing_key="ssh-ed25519 B")
    for other, what in (
        (one.with_(site="b", node_key=KEY.format(2), signing_key="ssh-ed25519 C"), "client"),
        (one.with_(client=1, node_key=KEY.format(2), signing_key="ssh-ed25519 C"), "site"),
    ):
        with pytest.raises(ValueError, match=f"every {what} may occur only once"):
            server(tmp_path, sites=[one, other])


def test_two_sites_with_one_key_are_both_named(tmp_path):
    """In the server's list and, under secure aggregation, in the agreement of every site, with names or without."""
    one = Member(site="amsel", client=0, node_key=KEY.format(1), signing_key="ssh-ed25519 B")
    for kind in ("node_key", "signing_key"):
        other = one.with_(site="birke", client=1, node_key=KEY.format(2), signing_key="ssh-ed25519 C")
        with pytest.raises(ValueError, match=f"amsel and birke have the same {kind}, but every site needs its own"):
            server(tmp_path, sites=[one, other.with_(**{kind: getattr(one, kind)})])
    keys = [f"ssh-ed25519 {name}" for name in "ABCB"]
    names = ["amsel", "birke", "celle", "dorn"]
    for given, twins in ((names, "birke and dorn"), ((), "site number 1 and site number 3")):
        with pytest.raises(ValueError, match=f"{twins} have the same signing_key.*ssh-keygen -y -f signing-key"):
            SecureSettings(threshold=3, keys=keys, names=given)


def test_keys_of_another_version_are_refused_with_both_versions(tmp_path):
    path = tmp_path / "site.toml"
    for release, ending in (
        ("0.0.9", f". The file was written by fedloom 0.0.9, but this is {__version__}. Install that version"),
        (__version__, ""),
    ):
        path.write_text(settings_text(site(tmp_path)).replace('version = "1.0"', f'version = "{release}"\ncolumns = 3'))
        with pytest.raises(ConfigError, match="unknown key 'columns'") as error:
            read_site(path)
        assert str(error.value).endswith(ending)
        assert ("written by fedloom" in str(error.value)) is (ending != "")


def test_a_private_key_is_no_public_key():
    with pytest.raises(ValueError, match="public key"):
        Member(site="a", client=0, node_key="-----BEGIN OPENSSH PRIVATE KEY-----", signing_key="ssh-ed25519 C")
