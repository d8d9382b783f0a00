"""One bad site under secure aggregation: it is named where that can be shown, and ends no run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from fedloom.errors import Stop
from fedloom_sites.deploy.secure import integers, shares
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.opened import ANALYSES_ENTRY, read_checked
from fedloom_sites.deploy.secure.protocol import ACCUSATION_PREFIX, MAX_ANALYSIS_STEPS
from fedloom_sites.deploy.settings import Server
from tests.deploy.scene import FIRST, Scene, changed, signing_key_of
from tests.deploy.sessions import arrays_of, kind_of, losing, secured

Edit = Callable[[Scene, int, bytes], bytes]
"""(deployment, client, what an honest site answers) -> what the bad one answers."""

pytestmark = pytest.mark.attack("bad sites under secure aggregation")

CLOSE = {"rtol": 0, "atol": 1e4 * 2.0**-integers.RESOLUTION_BITS}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def bad(here: Scene, kind: str, edit: Edit, client: int = 1, rounds: Any = range(99)) -> Any:
    """A fault: a site whose answers of a kind are others, signed with its own key."""

    def fault(node: int, message: Message, reply: Message) -> Message:
        t = int(message.content["head"]["round"])
        if node != FIRST + client or kind_of(message) != kind or t not in rounds or not arrays_of(reply):
            return reply
        return changed(reply, client, arrays=[edit(here, client, arrays_of(reply)[0])])

    return fault


def flip(place: int) -> Edit:
    return lambda _here, _client, data: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def sealed_anew(make: Callable[[bytes], bytes]) -> Edit:
    """Sealed shares whose text is another, signed as they should be."""

    def edit(here: Scene, client: int, data: bytes) -> bytes:
        session = session_of(here, client)
        made = {}
        for to, sealed in secure.split_parts(data, shares.SEALED_SHARE_BYTES).items():
            body = make(sealed[:-64])
            made[to] = body + signing_key_of(client).sign(shares._share_header(session, client, to, body))
        return secure.join_parts(made)

    return edit


def advertised_anew(field: str) -> Edit:
    """Keys of which one is a point of small order, with which no site has a common secret, signed as they should be."""

    def edit(here: Scene, client: int, data: bytes) -> bytes:
        [file] = here.sites[client].state.rglob("session.json")
        [advert] = secure.read_adverts(data)
        forged, name = advert._replace(**{field: bytes(32)}), bytes.fromhex((read_checked(file) or {})["name"])
        signature = signing_key_of(client).sign(secure._signed_advert_text(name, forged))
        return secure.write_adverts([forged._replace(signature=signature)])

    return edit


def session_of(here: Scene, client: int) -> secure.Session:
    """The session that a site is in."""
    [file] = here.sites[client].state.rglob("session.json")
    known = read_checked(file)
    assert known is not None
    adverts = secure.read_adverts(bytes.fromhex(known["adverts"]))
    return secure.build_session(bytes.fromhex(known["name"]), here.server.secure.threshold, adverts)  # type: ignore[union-attr]


@pytest.mark.parametrize("threshold", [3, 4])
@pytest.mark.parametrize("rounds", [[2], range(99)], ids=["once", "always"])
@pytest.mark.parametrize("place", [4, 35, 36 + 4, 4 * 36 + 20])
def test_a_wrong_share_changes_nothing_and_its_site_is_named(
    place: int, rounds: Any, threshold: int, tmp_path: Path
) -> None:
    here = secured(tmp_path, "fedavg", threshold)
    assert here.serve(here.grid(bad(here, "unmask", flip(place), client=0, rounds=rounds))) is Stop.DONE
    torch.testing.assert_close(here.model(), here_without(here, (2,) if rounds == [2] else (1,)), **CLOSE)
    named = here.audit("left out")
    assert {x["sites"][0] for x in named} == {"site-0"}
    assert "secrets are wrong" in named[0]["reason"]


def here_without(here: Scene, first: tuple[int, ...], client: int = 0) -> torch.Tensor:
    """The model of the plain run in which a site takes no part after its share was found wrong."""
    from tests.deploy.scene import scene
    from tests.deploy.sessions import SMALL

    plain = scene(here.folder / "plain", "fedavg", **{**SMALL, "rounds": 4})
    plain = plain._replace(server=plain.server.with_(quorum=3))
    lost = {(t, "train"): [client] for t in range(1 + first[0], 5)}
    assert plain.serve(plain.grid(losing(lost))) is Stop.DONE
    return plain.model()


def test_without_a_share_to_spare_a_wrong_one_costs_rounds_and_no_run(tmp_path: Path) -> None:
    """Three sites, threshold three: no other subset is there; each round is asked for thrice and lost."""
    cut = {"kind": "dirichlet", "clients": 3, "alpha": 0.5, "max_train_per_client": 24}
    here = secured(tmp_path, "fedavg", 3, partition=cut, rounds=3)
    assert here.serve(here.grid(bad(here, "unmask", flip(4), rounds=[2]))) is Stop.DONE
    [line] = here.audit("given up")
    assert line["round"] == 2
    assert len(here.audit("wrong shares")) == 3
    assert here.summary()["runs"][0]["rounds"] == 3


@pytest.mark.parametrize("name", ["fedavg", "flame"])
@pytest.mark.parametrize("damage", ["digit", "cut", "empty", "gone"])
def test_a_damaged_session_file_costs_its_site_one_sum(damage: str, name: str, tmp_path: Path) -> None:
    """An honest site, a bad disk: the others tell the sum, and in the next round the site takes part again."""
    here = secured(tmp_path, name)
    clients = here.clients()

    def look(node: int, message: Message, reply: Message) -> Message:
        where = (kind_of(message), int(message.content["head"]["round"]), node)
        if where == ("masked", 2, FIRST + 3):
            file = clients[3]._memory.folder / "session" / "session.json"
            data = file.read_bytes()
            place = data.index(b'"held"') + 20
            digit = b"1" if data[place : place + 1] == b"0" else b"0"
            new = {"digit": data[:place] + digit + data[place + 1 :], "cut": data[:-9], "empty": b""}
            if damage == "gone":
                file.unlink()
            else:
                file.write_bytes(new[damage])
        return reply

    assert here.serve(here.grid(look, clients)) is Stop.DONE
    torch.testing.assert_close(here.model(), here.simulate().models.rows("global"), **CLOSE)
    assert {(x["client"], x["round"], x["kind"]) for x in here.audit("rejected")} == {
        (3, 2, "count"), (3, 2, "unmask"),
    }  # fmt: skip
    assert not here.audit("left out")


def test_a_damaged_list_of_opened_sums_opens_no_old_round(tmp_path: Path) -> None:
    here = secured(tmp_path, "fedavg")
    assert here.serve(here.grid(losing({(3, "keys"): range(5)}))) is Stop.TOO_FEW
    for site in here.sites[:2]:
        [file] = site.state.rglob("opened.json")
        file.write_bytes(flip(5)(here, 0, file.read_bytes()))
    assert here.serve() is Stop.DONE
    for site in here.sites[:2]:
        [file] = site.state.rglob("opened.json")
        known = read_checked(file)
        assert known is not None
        [experiment] = known["experiments"].values()
        assert experiment["forgotten"] == {"uploads": 2, "scores": 2, ANALYSES_ENTRY: MAX_ANALYSIS_STEPS}
        assert [*experiment["opened"]["uploads"]] == ["3", "4"]
        assert known["sites"]["lost"]


BAD: dict[str, tuple[str, Edit, str]] = {
    "random bytes in the place of sealed shares": (
        "shares",
        sealed_anew(lambda body: os.urandom(len(body))),
        "do not decrypt",
    ),
    "a sealed share with one wrong bit": (
        "shares",
        sealed_anew(lambda body: body[:50] + bytes([body[50] ^ 1]) + body[51:]),
        "do not decrypt",
    ),
    "a sealed share for a one-time key that gives no common secret": (
        "shares",
        sealed_anew(lambda body: bytes(32) + body[32:]),
        "do not decrypt",
    ),
    "an accusation of a share that decrypts": (
        "masked",
        lambda here, client, _: (
            ACCUSATION_PREFIX
            + secure.join_parts(
                {3: shares.sign_accusation(session_of(here, client), client, 3, signing_key_of(client))}
            )
        ),
        "it claims that the share of site-3 does not decrypt, but it does",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("threshold", [3, 4])
def test_who_breaks_a_session_is_shown_and_left_out(case: str, threshold: int, tmp_path: Path) -> None:
    """In every round: the run is that of the other four, which begin a session anew."""
    here = secured(tmp_path, "fedavg", threshold)
    kind, edit, why = BAD[case]
    assert here.serve(here.grid(bad(here, kind, edit))) is Stop.DONE
    [line] = here.audit("left out")
    assert line["sites"] == ["site-1"]
    assert why in line["reason"]
    torch.testing.assert_close(here.model(), here_without(here, (0,), 1), **CLOSE)


def test_who_does_not_open_what_it_sent_is_left_out(tmp_path: Path) -> None:
    here = secured(tmp_path, "fedavg")
    garbage = bad(here, "shares", sealed_anew(lambda body: os.urandom(len(body))))

    def fault(node: int, message: Message, reply: Message) -> Message | None:
        return None if kind_of(message) == "open" else garbage(node, message, reply)

    assert here.serve(here.grid(fault)) is Stop.DONE
    assert [x["sites"] for x in here.audit("left out")] == [["site-1"]]


UNSIGNED: dict[str, tuple[str, Edit]] = {
    "a sealed share that it did not sign": ("shares", flip(4 + 60)),
    "no share for a site": ("shares", lambda _here, _client, data: data[4 + shares.SEALED_SHARE_BYTES :]),
    "keys that it did not sign": ("keys", flip(10)),
    "a sealing key that gives no common secret": ("keys", advertised_anew("sealing")),
    "a masking key that gives no common secret": ("keys", advertised_anew("masking")),
    "a vector behind another signature": ("masked", flip(3)),
    "nothing": ("masked", lambda _here, _client, _data: b""),
    "an accusation of nobody": ("masked", lambda _here, _client, _data: ACCUSATION_PREFIX),
    "an accusation without a signature": (
        "masked",
        lambda _here, _client, _data: ACCUSATION_PREFIX + secure.join_parts({3: bytes(64)}),
    ),
}


@pytest.mark.parametrize("case", UNSIGNED)
def test_an_answer_that_the_server_can_refuse_costs_its_site_the_round(case: str, tmp_path: Path) -> None:
    here = secured(tmp_path, "fedavg")
    assert here.serve(here.grid(bad(here, *UNSIGNED[case]))) is Stop.DONE
    torch.testing.assert_close(here.model(), here_without(here, (0,), 1), **CLOSE)


def test_a_site_is_taken_out_of_the_server_file(tmp_path: Path) -> None:
    """The keys stay agreed on; the server asks the others only."""
    here = secured(tmp_path, "fedavg")
    rest = tuple(m for m in here.server.sites if m.client != 1)
    fewer = here._replace(server=here.server.with_(sites=rest))
    assert fewer.serve() is Stop.DONE
    torch.testing.assert_close(fewer.model(), here_without(here, (0,), 1), **CLOSE)


def test_a_site_of_another_key_than_agreed_is_refused(tmp_path: Path) -> None:
    here = secured(tmp_path, "fedavg")
    wrong = here.server.sites[0].model_dump() | {"signing_key": here.server.sites[1].signing_key}
    rest = (type(here.server.sites[0])(**wrong), *here.server.sites[2:])
    with pytest.raises(ValueError, match=r"secure\.keys"):
        Server(**{**dict(here.server), "sites": rest})
