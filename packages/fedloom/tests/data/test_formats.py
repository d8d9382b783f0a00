"""Tables of other programs, and options of text files: one table is the same data set, whoever wrote it."""

from __future__ import annotations

import base64
import lzma
import os
import zipfile
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import feather

import fedloom as fl
from fedloom.data.sources.table.formats import STATISTICS_READERS, Statistics
from fedloom.errors import ConfigError, DataError
from tests.commands import call

openpyxl = pytest.importorskip("openpyxl")
pyreadstat = pytest.importorskip("pyreadstat")

ROWS = 60
OPTIONS: dict[str, Any] = {
    "target": "ill", "categorical": ["sex"], "impute": True, "days_since": {"admitted": "born"}
}  # fmt: skip
LABELS = {"sex": {1: "f", 2: "m", 3: "unknown"}, "ill": {0: "no", 1: "yes"}}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)

    def days(start: date, most: int) -> list[date]:
        return [start + timedelta(int(k)) for k in rng.integers(0, most, ROWS)]

    table = pd.DataFrame({
        "age": rng.integers(20, 80, ROWS).astype(float),
        "lab": np.round(rng.normal(1, 0.2, ROWS), 3),
        "sex": rng.choice(["f", "m"], ROWS),
        "born": days(date(1950, 1, 1), 9000),
        "admitted": days(date(2020, 1, 1), 900),
        "ill": rng.choice(["no", "yes"], ROWS),
    })  # fmt: skip
    table.loc[3, "lab"] = np.nan
    return table


def coded(frame: pd.DataFrame, fill: float = np.nan) -> pd.DataFrame:
    """The table as a statistics program has it: numbers for levels, and perhaps a number for missing cells."""
    numbers = {name: frame[name].map({text: k for k, text in LABELS[name].items()}) for name in ("sex", "ill")}
    return frame.assign(**numbers, lab=frame["lab"].fillna(fill))


def write_zip_of_a_mac(frame: pd.DataFrame, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("t.csv", frame.to_csv(index=False))
        archive.writestr("__MACOSX/._t.csv", b"\x00\x05\x16\x07")
        archive.writestr(".DS_Store", b"\x00")


WRITERS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    "t.csv": lambda frame, path: frame.to_csv(path, index=False),
    "t.txt": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "t.dat": lambda frame, path: frame.to_csv(path, index=False, sep=";", decimal=","),
    "t.xlsx": lambda frame, path: frame.to_excel(path, index=False),
    "t.jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True, date_format="iso"),
    "t.feather": lambda frame, path: feather.write_feather(pa.Table.from_pandas(frame), str(path)),
    "t.parquet.gzip": lambda frame, path: frame.to_parquet(path, compression="gzip"),
    "t.sav": lambda frame, path: pyreadstat.write_sav(
        coded(frame, 99.0), str(path), variable_value_labels=LABELS, missing_ranges={"lab": [99]}
    ),
    "t.dta": lambda frame, path: pyreadstat.write_dta(coded(frame), str(path), variable_value_labels=LABELS),
    "t.xpt": lambda frame, path: pyreadstat.write_xport(frame, str(path), file_format_version=8),
    "mac.zip": write_zip_of_a_mac,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_table_is_the_same_data_set_in_every_format(name: str, frame: pd.DataFrame, tmp_path: Path) -> None:
    WRITERS[name](frame, tmp_path / name)
    got, expected = fl.load(tmp_path / name, **OPTIONS), fl.Dataset.create(frame, **OPTIONS)
    assert torch.equal(got.x.nan_to_num(nan=-1.0), expected.x.nan_to_num(nan=-1.0))
    assert torch.equal(got.y, expected.y)
    assert got.classes == expected.classes == ("no", "yes")
    assert got.prepare.columns == expected.prepare.columns
    days = [(last - first).days for first, last in zip(frame["born"], frame["admitted"], strict=True)]
    assert got.x[:, -1].tolist() == days


def test_user_missing_codes_are_missing_and_counted_and_partial_labels_are_no_levels(tmp_path: Path) -> None:
    """The label of -9 names no level of a number, and a labeled event stays a number."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"dose": rng.normal(5, 1, ROWS), "time": rng.uniform(1, 9, ROWS), "died": 1.0})
    table.loc[:6, "dose"] = -9.0
    labels = {"dose": {-9.0: "refused"}, "died": {0.0: "alive", 1.0: "dead"}}
    pyreadstat.write_sav(
        table, str(tmp_path / "s.sav"), variable_value_labels=labels, missing_ranges={"dose": [{"lo": -9, "hi": -7}]}
    )
    data = fl.load(tmp_path / "s.sav", target="time", event="died", impute=True)
    assert int(data.x[:, 0].isnan().sum()) == 7
    assert "column 'dose': the file declares values as missing: -9 (refused) in 7 of its rows" in data.notes
    assert data.task == "survival"
    table["dose"] = table["dose"].astype(object)
    table.loc[:2, "dose"] = "a"
    pyreadstat.write_dta(
        table,
        str(tmp_path / "s.dta"),
        variable_value_labels={"dose": {"a": "refused"}},
        missing_user_values={"dose": ["a"]},
    )
    data = fl.load(tmp_path / "s.dta", target="time", event="died", impute=True)
    assert int(data.x[:, 0].isnan().sum()) == 3
    assert "a (refused) in 3 of its rows" in " ".join(data.notes)
    with pytest.raises(DataError, match="missing value"):
        fl.load(tmp_path / "s.dta", target="time", event="died")


def test_value_labels_may_stay_numbers(frame: pd.DataFrame, tmp_path: Path) -> None:
    pyreadstat.write_sav(coded(frame, 1.0), str(tmp_path / "t.sav"), variable_value_labels=LABELS)
    data = fl.load(tmp_path / "t.sav", **{**OPTIONS, "labels": False, "categorical": []})
    assert data.classes == ("0", "1")
    assert set(data.x[:, 2].tolist()) == {1.0, 2.0}


def test_a_text_file_without_a_header_below_a_title_in_another_encoding(frame: pd.DataFrame, tmp_path: Path) -> None:
    expected = fl.Dataset.create(frame, **OPTIONS)
    text = "Größe: 60 Zeilen\n\n" + frame.to_csv(index=False, header=False)
    options = {"target": "column6", "categorical": ["column3"], "impute": True, "days_since": {"column5": "column4"}}
    for encoding in ("latin-1", "utf-16", "utf-8"):
        (tmp_path / "t.csv").write_bytes(text.encode(encoding))
        data = fl.load(tmp_path / "t.csv", encoding=encoding, skip=2, header=False, **options)
        assert torch.equal(data.x.nan_to_num(nan=-1.0), expected.x.nan_to_num(nan=-1.0))


def test_rows_are_counted_from_the_first_line_of_the_file(tmp_path: Path) -> None:
    for lines, options, row in (("title\na,b\n1,0\nx,1\n", {"skip": 1}, 4), ("1,0\nx,1\n", {"header": False}, 2)):
        (tmp_path / "t.csv").write_text(lines)
        with pytest.raises(DataError, match=f"row {row}, column '.*': expected a finite number, got 'x'"):
            fl.load(tmp_path / "t.csv", **options)
    (tmp_path / "t.csv").write_text("1,1,0\n2,1,1\n")
    with pytest.raises(DataError, match="set header = false"):
        fl.load(tmp_path / "t.csv")


def test_sheets_are_chosen_by_name_or_number_and_rows_above_the_header_are_skipped(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    expected = fl.Dataset.create(frame, **OPTIONS)
    with pd.ExcelWriter(tmp_path / "t.xlsx") as book:
        pd.DataFrame({"note": ["first"]}).to_excel(book, sheet_name="About", index=False)
        frame.to_excel(book, sheet_name="Visits", index=False, startrow=3)
    for sheet in ("Visits", 2):
        data = fl.load(tmp_path / "t.xlsx", sheet=sheet, skip=3, **OPTIONS)
        assert torch.equal(data.y, expected.y)
    with pytest.raises(DataError, match="contains 2 sheets: 'About', 'Visits'. Choose one"):
        fl.load(tmp_path / "t.xlsx", **OPTIONS)
    for wrong in ("Visit", 3, 0):
        with pytest.raises(ConfigError, match="sheet"):
            fl.load(tmp_path / "t.xlsx", sheet=wrong, **OPTIONS)


@pytest.mark.parametrize(("name", "library"), [("t.xlsx", "openpyxl"), ("t.sav", "pyreadstat")])
def test_a_missing_library_is_one_sentence_with_the_command(
    name: str, library: str, frame: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[name](frame, tmp_path / name)
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(ConfigError, match=rf"needs {library}. Run: pip install 'fedloom\[formats\]'"):
        fl.load(tmp_path / name, **OPTIONS)


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("t.csv", "t.txt", "t.dat", "mac.zip")])
def test_a_damaged_file_is_a_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"no table at all")
    with pytest.raises(DataError, match=name):
        fl.load(tmp_path / name, **OPTIONS)


@pytest.mark.parametrize(
    ("days_since", "words"),
    [
        ({"admited": "born"}, "no column 'admited'; did you mean 'admitted'"),
        ({"admitted": "borne"}, "neither a column nor a date such as 2024-09-01; did you mean 'born'"),
        ({"age": "born", "admitted": "born"}, "column 'age': expected a date, got "),
        ({}, "convert it to days: days_since"),
    ],
)
def test_wrong_dates_are_refused(days_since: dict[str, str], words: str, frame: pd.DataFrame, tmp_path: Path) -> None:
    frame.to_csv(tmp_path / "t.csv", index=False)
    for data in (frame, tmp_path / "t.csv"):
        load = fl.load if isinstance(data, Path) else fl.Dataset.create
        with pytest.raises((ConfigError, DataError), match=words):
            load(data, **{**OPTIONS, "days_since": days_since})


def test_days_count_from_a_fixed_date_and_missing_dates_are_missing_cells(tmp_path: Path) -> None:
    lines = [f"{1 + k}.2.2020,{k % 2}" for k in range(20)] + [",1"]
    (tmp_path / "t.csv").write_text("seen,ill\n" + "\n".join(lines))
    data = fl.load(tmp_path / "t.csv", target="ill", days_since={"seen": "2020-01-01"}, impute=True)
    assert data.x[:-1, 0].tolist() == [31.0 + k for k in range(20)]
    assert bool(data.x[-1, 0].isnan())


def test_a_model_takes_new_dates_as_in_training_from_frames_and_files(frame: pd.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("title\n" + frame.to_csv(index=False))
    (tmp_path / "e.toml").write_text(f"""
name = "dates"
rounds = 2
seeds = [0]
[data]
source = "{tmp_path / "t.csv"}"
skip = 1
target = "ill"
categorical = ["sex"]
impute = true
days_since = {{ admitted = "born" }}
[partition]
kind = "iid"
clients = 2
[[method]]
algorithm = "fedavg"
""")
    call("run", str(tmp_path / "e.toml"), "--out", str(tmp_path / "run"))
    run = fl.open_run(tmp_path / "run")
    new = frame.drop(columns=["ill"]).head(9)
    expected = run.predict(new).scores
    new.to_excel(tmp_path / "new.xlsx", index=False)
    assert np.array_equal(run.predict(tmp_path / "new.xlsx").scores, expected)
    assert np.array_equal(run.runs()[0].models.predict_proba(new, kind="global"), expected)


def test_a_draft_of_a_file_takes_its_options(frame: pd.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("title\n" + frame.drop(columns=["born", "admitted"]).to_csv(index=False))
    said = call("init", str(tmp_path / "t.csv"), "--set", "data.skip=1", "--target", "ill", "--client-column", "")
    assert "draft:" in said
    assert "skip = 1" in (tmp_path / "t.toml").read_text()


def test_a_portable_file_of_spss_is_the_table_of_the_others(frame: pd.DataFrame, tmp_path: Path) -> None:
    """Its names are in capitals."""
    small = frame.rename(columns=str.upper).drop(columns=["BORN", "ADMITTED"])
    pyreadstat.write_por(small, str(tmp_path / "t.por"))
    small.to_csv(tmp_path / "t.csv", index=False)
    options = {"target": "ILL", "categorical": ["SEX"], "impute": True}
    one, other = (fl.load(tmp_path / name, **options) for name in ("t.por", "t.csv"))
    assert one.checksum() == other.checksum()
    assert one.classes == other.classes == ("no", "yes")


REAL_FILES = sorted(Path(os.environ.get("FEDLOOM_STATISTICS_FILES", os.devnull)).glob("**/*.*"))
"""Files of real programs, such as the folder test_data of pyreadstat's repository, which this one has no copy of."""


@pytest.mark.skipif(not REAL_FILES, reason="FEDLOOM_STATISTICS_FILES names no folder of files")
def test_files_of_real_programs_have_the_cells_that_pyreadstat_reads() -> None:
    compared = set[str]()
    for path in REAL_FILES:
        reader = STATISTICS_READERS.get(path.suffix)
        if reader is None:
            continue
        with Statistics(path=str(path)).open_file() as raw:
            cells = {piece.column: list(piece.cells) for piece in raw.cells}
        known, facts = getattr(pyreadstat, reader)(str(path), output_format="dict")
        assert list(cells) == raw.names == list(known)
        for name, values in known.items():
            labels = facts.variable_value_labels.get(name, {}) if name in raw.coded else {}
            assert len(cells[name]) == len(values)
            for cell, value in zip(cells[name], values, strict=True):
                missing = value is None or value == "" or value != value
                assert cell is None if missing else cell == labels.get(value, value), f"{path.name}, {name}"
        compared.add(path.suffix)
    assert compared


SAS_FILES = {
    "labels.sas7bdat": (
        "T>t<81poj4|NsC0{{R4NR-Ho5@k=<=F7xYNq(CgTXeM6mw83-#<b8vkm5(t|CFsgPc<eB?sCfyg=}N<AOxfUxmlM3T4sl?MRI4PgUyZD>s00"
        "a;>eNgtOMMvGM;qlb5MPKLe5}t!seDRb^qT>OL7s*_e4i|ci#qK-+SR;hV7^ik*7h~c0sDCm+RvHmF)X<{>+(Tl`D$5c=rXD;?w>%)Mhf5<v"
        "$&@#Eexd=36)!xd(WM^Xr-AIanS(MA8RW@se71OJG4Y+Q5alZ^~8xrlyxUeG#e0n^c<GN^DgA8P!I9~9U<r6WeK|2LACWOe8QwyzJjCKJ8uG"
        "nXo28#2Y&;@$HK*4>jh|{_|htI0iR1`gG>E0{ZDw<Ig}mJY&ad+TPB!U?xki>w@=Z9=>L8*iX`hQbiC%*H;8yR2!T`6ko&hWQlh?Mupyl@cE"
        "dJSW_qD$fR4iRl{Sn%aH#Q}x<W($sg<1wtU;X8!WtBiw`;($cmB+Hl}6$2L*kB(|D75vrx7r2*I_srI0dp~$M*<QIdou!M+0XYrzV{|BC8)A"
        "DIA!CwMCX%PuZ|@(;9;tE{{iG7X>aJqOYex@V(yX{Z3#_EAi*S25QnC%)RIEh1}R4zEsPV7M_41QJ|eBX~79<ZJ(x?>46u~#neG@?ep*0qEu"
        "_0()(G7fx%AFQD$HpLNwWyl^bFV6o(F{3m#ZGb>9G6%0n<dZ`A;-a|DFN8#Un>&WxxR4_TC3WEWE*kvIV3B9Y%vw&hBeK#5L<J{?6R9nEFNc"
        ";vMEb^B~Gd~`;<0k`kPU4HV1TT`@gp?d+l*vnmwFfWtPeVe?JO&D!_1SYVbk9&cJv07VN^M{Sjc3}YFMXTTEF{!5`0_^KRL(+{sJB{h=x7`N"
        "!M^%8wsxU;Sm4ODb>TraTsbFwj&^ajnZ^YP}*lDxIz%w#_*_;U3r>bwasobCV8=!?ixk4v6q^Z_UZDICUL7g?x_yH?4hd%7$R*%8w%d*^ViG"
        "6z%;W{g+r~pKAMq_{`=xF~>oGaMikDgd<s!c`#9vL$#1PeKX79R1+izQM;K=MHj@FG+tSamqG)aOjrZ_^U=MBbkd&fe88E97Tm)6=32WgbPv"
        "zRUX99W>Op;|wJC4HPSVVs~c#<h+j("
    ),
    "labels.sas7bcat": (
        "T>t<81poj4|NsC0{{R4NR-Ho5{YwbcF7xYNq(CgTXeM6mw83-#<b8vkm5(t|CPbkPRd&48b3Z?K8Fp*@cJyJK$%GfD@vTTz;}+zy!ceuD_-3"
        "d8;w;C=L_v&-2>gW@RYpipR=!RbOV6q-2NP2(UQy{cTdfe^JkAZQ-U-HnW?LG#qYi^UI#5)AH&G_!`Do#yfM=j#WZCHi=EW$8@VAm75ISS<^"
        "iJx`Shz^c8xnwxaTj|mM~904-z-4t6w{sEUHy1R*6;kJ$4@#G?PjlL9h#TgZ7}CrvjOL>CgV@N&=Sm`UXPH4W33X>I4)K+${cm<*S-B2v(Q>"
        "togEJrba{w}{qYxF%KX<?K2O33(+Y06d?X0eHa@s}!}B&YAruPW^|hTu#CfAKWrAH9B@mZJTNnoB9NNY&zsG@0N~FyewFc(Btm9QDLh7vj{+"
        "_m3)y@Si7i<5iwtVGQ|L=3O8y}Zn-8jSZ7H!lAQ;Lpd@Tusu=IJ(MeaQm|K;GV0Pnxmg6I$(8)TL5!si?o&9Sqj?CBARE(M0icWd_|zMNfnn"
        "^kWjZ!%nGM)^k<j+ewtFs?giR>d1uDDC0alMFYe9>TAz-D&+qUNE3SVZQ1$`?F(&>xwcvyP$o|1+d92zGq=}h9J>pXA1O(?9=vjcrrC3o7QR"
        "lZv`Dk#S(lUvjw<rEUH=>Zj9IxA&fZx-p~R5L*aKW5bIi0Ag;*!gVpXk#{UDsxpTSf6k)X3cHI<b?Bi@9Jw8+n)n39jf535)cM}8E<|7LHF#"
        "up@0)zOc6V5d7?I?Fu3Obaa9!T|17JQELoAQ~z*py5tAM`{S6=B=3cKQ6H7`Z(HLlwO6~T0OjjR_|2D!PBSno`RtGIi>^rDKYzRLdVMTfibP"
        "Oft8p?bhSip0dfMNo3?>pc<3X8LoxE-Xo-9@HwFmsCM%7gq+BM$@(~q;q($7GL8H1Jp|WH$JxA%6u{H{#bmS`N+H~t~#zW>r)L1xxdiJj=rD"
        "BR2`ysYky{T+&YQ0-eQYS)WLf_ojxa4~bDPjS}omox<x|zSB-(rv91aiZAtHlsl8}SqV?;_xt%q@;ng!L1gD2#0J1VgnIQmj2^&C^&kZ4Ig}"
        "MYVEE|L6BH|GgoMz1Lg3l4#xpKv+>*>!|HX*AMLGGcb9i=E|s|iOz!|%Hra|=!I1$@Z<-Ho09$Tw&A<+ked4cZ)@CpSK!I$&$qSKnJ2(f4ma"
        "`MioVv<Z~Oo4`+mU"
    ),
    "numbers.sas7bdat": (
        "T>t<81poj4|NsC0{{R4NR-Ho5@k=<=F7xYNq(CgTXeM6mw83-#<b8vkm5(t|CFsgPc<eB?sCfyg=}N<AOxfUxmlM3T4sl?M+sr$zSUDTRd%N"
        "u6(V`ltQ6OP{T`qEqc{v$AL5qfa-rM!^iPQ+x&8&!H$YsLeL}Iw+n*K0;r@F9oF?y4zEQh?rwity6DH}Hp=iIZntudtZaZ6^jCR!OlL59qx;"
        "pU=3^bezzO(h@^O13+14V{W?phdQbTa`cXUj`TtE)_|ut+Ho$9<mq5_J(zql2i+Z$Ztpg_0lBaazm~Ru;yQ@q85lj=G+V0WL^K5sNpjAUf^i"
        "ntY9)p{cm!hX!Jf<D+#<<=@%WC0lrqaE^%VOrr@&2T+rK_kHZGQgwg{zs@Z&|=KVYLvGiGdKoz+g$FZJ!D(Dm8@;+G~5P=dZryOmK;<{E4WL"
        "7K!I}KU()1pfeK1?VwH91=Y^#3PR(`v*~ynJya{_&?;{lja-#XxlAa-$tAJw~X^<bY*m{(GD3?vpFxtA;dqyX1R3RYfl`0@pp0PxPLjzck0@"
        "_vbH42BAuGR>ljh&TQlBBsBr&fE2umGFV<N3ydhw-7E{#CI#3A#a7rm;!eEY(X?wsEsxnXC|*5U@idZG0)y#l1a;y=^5I&U<gb>UidK5+4+y"
        "-tNC^73$1o53JDdWsfppA8&{F7+_DL+r*~9hwAnA~WBQ34LpDxm<lIC=1m(E4D@1U#laTMX$oJH7`D|Dq!p8kl6S`f-6QDIm{J)||)(aF~J?"
        "`b%iD(w&Hs?QV%^cwqCAeukZq}jBz7U6N9Tf;g8+oDX`Fv`^e!CzO;JS!{bkIS_{!#fy^OC#7&)K&p}Spj?6p6PqxZ*CB~cbxzn<BZJpC*fr"
        "naeCSM9>x#UhgK!-6F~mtYzbWcvnH3GXXG;~2{*ms-eDB##xvFK4!5MRzG+R5hwn@t(?`B$o-7r$0NAj^FeTkztN0OA3I}O(bK-`ayXSnRHH"
        "9MOtP_i56_4%lb*;^Twp<yt@z&8PlxGF{v=4V$<FftpS!-f*Jsx^WYM<o3&i;>3DcS$4h3G^"
    ),
    "codes.sas7bdat": (
        "T>t<81poj4|NsC0{{R4NR-Ho5@k=<=F7xYNq(CgTXeM6mw83-#<b8vkm5(t|CFsgPc<eB?sCfyg=}N<AOxfUxmlM3T4sl?MOQiiEgT+bMKwX"
        "7<?yh^@z=E&S1QFWJT7ACt6-z@SNHTQG;#%>62z;k;Hjv6a^@VSO9fv36>C`O4oWQ0@+@-831UUqO70axE!LeWcH({%E2&N(365s2ppgXT6_"
        "V!54SAOsqU#|GpIbkfk75Q_x_YvTMSJG<6&}QKY3{crovV@~H0F8&x@s!@?mhe*>c%IF!jOzpcBZ@|5fq%7Dl}w4h(`VKU0G{2jwK2z#jU_h"
        "9xIabLdHc@F%^-<CeN+n<{1x*+h62^6<uh{@(B(lC-m=8sb&~0dZ`!T$5<6DYu-2>i4xWmYUZ|rLn@5RQsx^Z47+)??SZ{&sa+l6i1faQ><A"
        "*s&kpkzpV{3PjsD<&O4-^y5dvJFzfWJE<2sq-e-R=cz)wZ$Ik)1F_o=}Aql-kd*2eJf}GmYV!y>$ri40<gxSe;Sp5WYa5m(Fz7c=m1Z%ma%h"
        "rP$ntZi+eBC&FYVrf;gLtf@IFE)SC-jD_6xDrL6YV0M=ZZ;8N+sEO<@;!%8VCJrvhf!9-zs}cmH!MGP1Dn`RutAp5j!jcl<rMd60pxqhft>s"
        "0~P{-VD9)0f{H{l+3ZLSqyo3z^mBB{u?wVjXnHo!+SzUkuC?%A+BHmKCsoeMNgJAyFK*tm9<lW}@wTiv>lj9n8^v-YcJ$&5zZ0%iyXfWh#}y"
        "c?OF+ujTRvUV=T%H3ehBdsA(RkBX|YC^%kh6fSDoONN48c{l2GAap_*z+f~?>qK*Gwx*b(TF4X<An{@w?P}y0fGagkcAPqG{8H5PuvVjYrs5"
        "Wo25s(HQm2YvrKl(N^X%)`hdAcSW9H*J~cl@h`B<I#K1wO*90}R58qUH0sJ8%_(|K$4E1%O>FGShb(0J#{{6qrf@9qNYGrh-#!T|5<mGG1;O"
        "r|@ng+rNaPe>fyTyc$Xvf|l_l?1}0blk)=>b3ai=pg4$VY`N1@arl16Z_~FOwOmR0%v^bOeb}AN(r|T0-7NIo<;$6WCvJDMuZx-^h>u+b;+="
    ),
}
"""Files that SAS wrote, from the test data of pyreadstat (Apache 2.0), compressed: no library writes this format."""


@pytest.fixture
def sas(tmp_path: Path) -> Path:
    for name, text in SAS_FILES.items():
        (tmp_path / name).write_bytes(lzma.decompress(base64.b85decode(text)))
    return tmp_path


def test_a_table_of_sas_has_its_numbers_dates_labels_and_codes_of_missing_values(sas: Path) -> None:
    options: dict[str, Any] = {"categorical": ["mychar"], "days_since": {"mydate": "1960-01-01"}, "impute": True}
    data = fl.load(sas / "numbers.sas7bdat", target="mylabl", drop=["dtime", "mytime"], **options)
    assert data.x[:, :2].tolist() == [[0, 1.1], [1, 1.2], [2, -1000.3], [3, -1.4], [4, 1000.3]]
    days = [(date(*day) - date(1960, 1, 1)).days for day in ((2018, 5, 6), (1880, 5, 6), (1960, 1, 1), (1583, 1, 1))]
    assert data.x[:4, 2].tolist() == days
    codes = fl.load(sas / "codes.sas7bdat", target="var9", impute=True)
    assert bool(codes.x.isnan().all())
    assert "column 'var4': the file declares values as missing: X in 1 of its rows" in codes.notes
    keys: dict[str, Any] = {"target": "SEXA", "categorical": ["SEXB"], "drop": ["ID"]}
    assert fl.load(sas / "labels.sas7bdat", **keys).classes == ("1", "2")
    named = fl.load(sas / "labels.sas7bdat", catalog=str(sas / "labels.sas7bcat"), **keys)
    assert (named.classes, named.prepare.columns[0].names) == (("Female", "Male"), ("Female", "Male"))
    assert named.y.tolist() == [1, 0, 1]
    with pytest.raises(DataError, match="numbers.sas7bdat is not a readable SAS catalog"):
        fl.load(sas / "labels.sas7bdat", catalog=str(sas / "numbers.sas7bdat"), **keys)
    keys = {"target": "var9", "impute": True, "catalog": str(sas / "labels.sas7bcat")}
    assert any("has formats $A, $B" in note for note in fl.load(sas / "codes.sas7bdat", **keys).notes)
