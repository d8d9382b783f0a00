"""Links of the documents lead somewhere when read on a code host, and generated pages are those of the code."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from fedloom.errors import ConfigError
from fedloom.lab.experiment import json_schema
from fedloom.lab.experiment.cards import list_parts
from fedloom.lab.experiment.schema import SETTING_TABLES
from fedloom.models import MODELS, PAPER_NETWORKS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs" / "llms.txt",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "studies").rglob("*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_no_dead_link(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s#]+)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    dead = [t for t in targets if not re.match(r"https?:|mailto:", t) and not (page.parent / t).exists()]
    assert dead == []


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the pages of the reference as the code writes them, by path."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    file = ROOT / "docs" / "site" / "experiment_file.py"
    spec = importlib.util.spec_from_file_location("experiment_file", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.pages())


def test_the_reference_of_experiment_files_is_that_of_the_code(reference: dict[str, str]) -> None:
    """``python docs/site/experiment_file.py`` writes it anew."""
    folder = ROOT / "docs" / "reference"
    assert {path.name for path in folder.iterdir()} == {Path(path).name for path in reference} - {"experiment-file.md"}
    assert [path for path, text in reference.items() if (ROOT / "docs" / path).read_text() != text] == []


def stated(page: str, kind: str) -> dict[str, str]:
    """Return the defaults that a page of the reference states for a kind, with those that several kinds share."""
    row = r"^\| `(\w+)` \| (.*?) \|"
    common, _, rest = page.partition("\n## Kinds\n")
    section = rest.split(f'### kind = "{kind}"\n')[1].split("\n### ")[0]
    found = dict(re.findall(row, common, re.MULTILINE))
    like = re.search(r"^Accepts the options of `([\w-]+)`", section, re.MULTILINE)
    found |= stated(page, like[1]) if like else {}
    (several,) = re.findall(r"^Options of several kinds: (.*)\.$", section, re.MULTILINE) or [""]
    found |= dict(re.findall(r"`(\w+)` = (`[^`]*`|not set)", several))
    return found | dict(re.findall(row, section, re.MULTILINE))


def test_the_page_the_schema_and_the_list_state_the_defaults_that_run(reference: dict[str, str]) -> None:
    tables = {name: table for name, table in SETTING_TABLES.items() if table.kinds and name != "data"}
    schema = json.loads(json_schema())
    titles = dict(list_parts("models"))
    compared = 0
    for name, table in tables.items():
        where = schema["$defs"].get(name) or schema["properties"][name]
        choices = {choice["title"]: choice for choice in where["anyOf"]}
        assert {*table.kinds, "user code"} == choices.keys()
        page = reference[f"reference/{name}.md"]
        for kind in table.kinds:
            try:
                runs = table.read({"kind": kind})
            except ConfigError:
                continue  # a required option has no default
            is_preset = name == "model" and kind in PAPER_NETWORKS
            base = type(runs)()
            assert not is_preset or f'### kind = "{kind}"\n\n`' in page
            rows = {} if is_preset else stated(page, kind)
            for key, value in runs.model_dump(mode="json").items():
                found = choices[kind]["properties"].get(key)
                if found is None:
                    continue
                found = schema["$defs"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found
                if key == "kind" or key not in type(runs).model_fields or "default" not in found:
                    continue
                assert found["default"] == value, (name, kind, key)
                if is_preset:
                    changed = value != base.model_dump(mode="json")[key]
                    assert (f"{key} = " in titles[kind]) == changed, (kind, key)
                elif value is None:
                    assert rows[key] == "not set", (name, kind, key)
                elif not isinstance(value, dict):
                    assert tomllib.loads(f"x = {rows[key].strip('`')}")["x"] == value, (name, kind, key)
                compared += 1
            if is_preset:
                assert f"``{next(k for k, v in MODELS.items() if v is type(runs))}``" in titles[kind]
                assert " ".join(titles[kind].split()).replace("``", "`").replace("[", "\\[").replace("]", "\\]") in page
    assert compared > 200


def test_a_link_to_a_file_of_methods_is_one_to_a_page_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    pytest.importorskip("mkdocs")
    for name in ("hooks", "methods", "choosing", "notebooks"):
        sys.modules.pop(name, None)
    import hooks

    for link, want in {
        "../packages/fedloom/src/fedloom/algorithms/local_only.py": "methods/local.md",
        "../../packages/fedloom/src/fedloom/algorithms/presets.py#equitable-fl": "methods/equitable-fl.md",
        "../packages/fedloom/src/fedloom/algorithms/": "methods/index.md",
        "../CONTRIBUTING.md": "contributing.md",
        "studies/pages/system.md": "system.md",
        "tests/mutants.md": "mutants.md",
        "../SECURITY.md": "security.md",
        "docs/security-model.md#secure-aggregation": "security-model.md#secure-aggregation",
        "../studies/pages/adapt.md": "adapt.md",
        "../studies/pages/map/iid.md": "map/iid.md",
        "../../docs/tuning.md": "tuning.md",
        "../../../docs/map.md": "../map.md",
        "site/choosing.md": "choosing.md",
        "tuning.md": "tuning.md",
    }.items():
        assert hooks.on_page_markdown(f"[x]({link})") == f"[x]({want})"


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_opens_with_what_it_is_for_and_an_example(page: Path) -> None:
    title, _, *screen = page.read_text().splitlines()[:42]
    assert title.startswith("# ")
    assert re.match(r"(\w|\*\*|`)", screen[0]), "a sentence comes first"
    assert re.search(r"^(```|\[?!\[)", "\n".join(screen), re.MULTILINE), "a block of code or a picture"


SVGS = [*(ROOT / "docs").rglob("*.svg"), *(ROOT / "studies").rglob("*.svg")]


@pytest.mark.parametrize("picture", SVGS, ids=[str(picture.relative_to(ROOT)) for picture in SVGS])
def test_no_label_of_a_picture_is_hidden_or_cut(picture: Path) -> None:
    """A chart hides labels that overlap (opacity 0) and cuts labels that are too long (an ellipsis).

    A number that an axis leaves out between two others is no loss.
    """
    texts = re.findall(r"<text\b([^>]*)>(.*?)</text>", picture.read_text(), re.DOTALL)
    hidden = [text for attributes, text in texts if re.search(r'\bopacity="0(\.0*)?"', attributes)]
    assert not [text for text in hidden if not re.fullmatch(r"[-+\u2212\d.,%\s]+", text)]
    assert not [text for _, text in texts if text.rstrip().endswith(("…", "...", "&hellip;"))]


def test_the_map_names_its_setups_as_its_page_does() -> None:
    picture = (ROOT / "studies" / "pages" / "map" / "map.svg").read_text()
    titles = re.findall(
        r"^\| \[([^\]]+)\]\(\.\./studies/pages/map/\w[\w-]*\.md\) \|", (ROOT / "docs" / "map.md").read_text(), re.M
    )
    assert len(set(titles)) == 18
    assert all(f">{title}</text>" in picture for title in titles)
