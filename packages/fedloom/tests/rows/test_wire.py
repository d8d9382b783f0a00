from __future__ import annotations

import struct
import tracemalloc
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import ConfigError, WireError
from fedloom.rows.algebra import dequantize
from fedloom.rows.encodings import tensor_from_bytes
from fedloom.rows.fields import FIELD_DTYPES, Field
from fedloom.rows.layout import Layout
from fedloom.rows.wire import WIRE_HEADER, Codec

LAYOUT = Layout.create_from_shapes(
    {"conv.weight": (6, 5, 3, 3), "conv.bias": (6,), "fc.weight": (12, 9), "fc.bias": (12,)}
)
FLOATS = [torch.float64, torch.float32]


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lowrank_rows(m: int, rank: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(m, LAYOUT.d, dtype=dtype, generator=gen(seed))
    matrices = {
        n: torch.randn(m, r, rank, dtype=dtype, generator=gen(seed + r)) @ torch.randn(m, rank, c, dtype=dtype)
        for n, (r, c) in LAYOUT.matrix_shapes.items()
    }
    return LAYOUT.replace_matrices(rows, matrices)


def sparse_rows(m: int, d: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of every density from 0 to 1."""
    keep = torch.rand(m, d, generator=gen(seed)) < torch.linspace(0, 1, m)[:, None]
    return (torch.randn(m, d, generator=gen(seed + 1)) * 9 * keep).to(dtype)


def measured(codec: Codec, values: dict[str, torch.Tensor], m: int, **kw) -> list[int]:
    return [len(codec.encode({n: v[i] for n, v in values.items()}, **kw)) for i in range(m)]


@pytest.mark.parametrize("dtype", FIELD_DTYPES)
@pytest.mark.parametrize("encoding", ["dense", "sparse"])
@pytest.mark.parametrize("part", [False, True])
@given(seed=st.integers(0, 2**20))
@settings(max_examples=10)
def test_round_trip_and_length(dtype, encoding, part, seed):
    mask = torch.rand(LAYOUT.d, generator=gen(seed)) < 0.4 if part else None
    codec = Codec(LAYOUT, {"w": Field((LAYOUT.d,), dtype, encoding, mask), "n": Field((1,), torch.int64)})
    values = {"w": sparse_rows(9, LAYOUT.d, dtype, seed), "n": torch.arange(9)[:, None]}
    assert measured(codec, values, 9) == codec.length(values).tolist()
    own = torch.randn(LAYOUT.d, generator=gen(seed + 2)).to(dtype)
    for i in range(9):
        got = codec.decode(codec.encode({n: v[i] for n, v in values.items()}), receiver={"w": own})
        want = values["w"][i] if mask is None else torch.where(mask, values["w"][i], own)
        assert torch.equal(got["w"], want)
        assert got["w"].dtype == dtype
        assert torch.equal(got["n"], values["n"][i])


def test_what_is_read_lies_in_memory_as_torch_places_it():
    """The rounding of a product depends on where its factors begin."""
    payloads = [memoryview(bytes(4 * size)) for size in range(40)]
    assert {tensor_from_bytes(payload, torch.float32).data_ptr() % 64 for payload in payloads} == {0}


def test_sparse_is_chosen_exactly_when_shorter():
    codec, d = Codec(LAYOUT, {"w": Field((10,), torch.float32, "sparse")}), 10
    dense = int(Codec(LAYOUT, {"w": Field((10,), torch.float32)}).length({"w": torch.ones(d)}))
    lengths = codec.length({"w": torch.ones(d + 1, d).tril(-1)})
    assert lengths.tolist() == [dense - 4 * d + min(8 * k, 4 * d) for k in range(d + 1)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rank", [0, 1, 3, 8, 15])
def test_lowrank_round_trip_length_and_papers_count(dtype, rank):
    codec = Codec(LAYOUT, {"w": Field((LAYOUT.d,), dtype, "lowrank", layout=LAYOUT)})
    rows = lowrank_rows(3, rank, dtype)
    lengths = codec.length({"w": rows})
    assert measured(codec, {"w": rows}, 3) == lengths.tolist()
    factors = sum(min(r * c, rank * (r + c)) for r, c in LAYOUT.matrix_shapes.values()) + 6 + 12
    assert codec.paper_bytes({"w": rows}).tolist() == [4 * factors] * 3
    given_ranks = {"w": dict.fromkeys(LAYOUT.matrix_shapes, rank)}
    assert torch.equal(codec.length({"w": rows}, given_ranks), lengths)
    for row in rows:
        got = codec.decode(codec.encode({"w": row}))["w"]
        torch.testing.assert_close(got, row, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 1e-10)
        assert torch.equal(LAYOUT.tree(got)["fc.bias"], LAYOUT.tree(row)["fc.bias"])


def test_matrices_alone_of_rank_zero_travel_as_their_table():
    layout = Layout.create_from_shapes({"a": (6, 5), "b": (4, 7)})
    codec = Codec(layout, {"w": Field((layout.d,), torch.float32, "lowrank", layout=layout)})
    zero = torch.zeros(layout.d)
    assert torch.equal(codec.decode(codec.encode({"w": zero}))["w"], zero)


def test_an_index_holds_every_place():
    for n in (1, 2**31 - 1, 2**31, 2**31 + 1, 2**40):
        assert torch.iinfo(Field((n,)).index).max >= n - 1


def test_ranks_per_row_and_truncation():
    codec = Codec(LAYOUT, {"w": Field((LAYOUT.d,), torch.float64, "lowrank", layout=LAYOUT)})
    rows = lowrank_rows(3, 5, torch.float64)
    ranks = {"w": {"conv.weight": torch.tensor([0, 1, 5]), "fc.weight": 2}}
    one = [{"w": {"conv.weight": k, "fc.weight": 2}} for k in (0, 1, 5)]
    want = [len(codec.encode({"w": row}, given)) for row, given in zip(rows, one, strict=True)]
    assert codec.length({"w": rows}, ranks).tolist() == want
    got = LAYOUT.matrices(codec.decode(codec.encode({"w": rows[1]}, one[1]))["w"])["fc.weight"]
    u, s, vh = torch.linalg.svd(LAYOUT.matrices(rows[1])["fc.weight"])
    torch.testing.assert_close(got, (u[:, :2] * s[:2]) @ vh[:2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize(("encoding", "levels"), [("levels", 1), ("levels", 7), ("levels", 127), ("sign", 1)])
@given(seed=st.integers(0, 2**20), d=st.integers(1, 40), size=st.sampled_from([0.0, 1e-6, 1.0, 300.0]))
@settings(max_examples=15)
def test_packed_round_trip_is_exact(dtype, encoding, levels, seed, d, size):
    codes = torch.randint(-levels, levels + 1, (4, d), generator=gen(seed))
    codes[:, seed % d] = levels
    if encoding == "sign":
        codes = 2 * (codes >= 0).long() - 1
    rows = dequantize(torch.full((4, 1), size, dtype=dtype), codes, levels)
    codec = Codec(LAYOUT, {"g": Field((d,), dtype, encoding, levels=levels)})
    assert measured(codec, {"g": rows}, 4) == codec.length({"g": rows}).tolist()
    bits = 1 if encoding == "sign" else {1: 2, 7: 4, 127: 8}[levels]
    empty = len(Codec(LAYOUT, {"g": Field((0,), dtype)}).encode({"g": rows[0, :0]}))
    assert codec.length({"g": rows}).tolist() == [empty + dtype.itemsize + (d * bits + 7) // 8] * 4
    for row in rows:
        assert torch.equal(codec.decode(codec.encode({"g": row}))["g"], row)


def test_rows_off_the_grid_are_refused():
    for encoding, row in [("sign", [1.0, 0.5]), ("levels", [1.0, 0.3]), ("levels", [float("nan"), 1.0])]:
        with pytest.raises(WireError, match="grid"):
            Codec(LAYOUT, {"g": Field((2,), torch.float32, encoding, levels=4)}).encode({"g": torch.tensor(row)})


def test_length_of_a_dense_field_touches_no_data():
    codec = Codec(LAYOUT, {"w": Field((10**9,))})
    rows = torch.zeros(1).expand(1000, 10**9)
    assert codec.length({"w": rows}).tolist() == [int(codec.length({"w": rows[0]}))] * 1000
    assert codec.paper_bytes({"w": rows}).tolist() == [4 * 10**9] * 1000


def test_a_value_without_rows_counts_for_all():
    codec = Codec(LAYOUT, {"x": Field((5,), torch.float32, "sparse"), "t": Field((1,))})
    x, t = torch.tensor([0.0, 0, 3, 0, 0]), torch.zeros(4, 1)
    assert codec.length({"x": x, "t": t}).tolist() == [len(codec.encode({"x": x, "t": t[0]}))] * 4


def test_papers_count():
    mask = torch.arange(10) < 4
    codec = Codec(
        LAYOUT,
        {"x": Field((10,), torch.float64, "sparse"), "p": Field((10,), mask=mask), "n": Field((1,), torch.int64)},
    )
    x = torch.zeros(2, 10, dtype=torch.float64).index_fill(1, torch.tensor([1, 5, 6]), 2.0)
    assert (
        codec.paper_bytes({"x": x, "p": torch.ones(2, 10), "n": torch.ones(2, 1).long()}).tolist()
        == [4 * 3 + 4 * 4] * 2
    )


# ------------------------------------------------------------------------------------------------------ hostile bytes

CODEC = Codec(
    LAYOUT,
    {
        "w": Field((LAYOUT.d,), torch.float32, "lowrank", layout=LAYOUT),
        "s": Field((40,), torch.float64, "sparse"),
        "g": Field((17,), torch.float32, "levels", levels=5),
        "b": Field((9,), torch.bfloat16, "sign"),
        "n": Field((1,), torch.int64),
        "p": Field((6,), torch.float16, mask=torch.arange(6) % 2 == 0),
    },
)
VALUES = {
    "w": lowrank_rows(1, 2, torch.float32)[0],
    "s": sparse_rows(3, 40, torch.float64, 5)[1] * (torch.arange(40) < 20),
    "g": dequantize(torch.tensor([2.0]), torch.arange(17) % 11 - 5, 5),
    "b": torch.ones(9, dtype=torch.bfloat16),
    "n": torch.tensor([7]),
    "p": torch.ones(6, dtype=torch.float16),
}
MESSAGE = CODEC.encode(VALUES)


def sealed(body: bytes) -> bytes:
    """The body under a header with a right checksum."""
    return MESSAGE[: WIRE_HEADER.size - 4] + struct.pack("<I", zlib.crc32(body)) + body


def decodes_or_refuses(message: bytes) -> bool:
    try:
        values = CODEC.decode(message)
    except WireError:
        return False
    assert {n: (tuple(v.shape), v.dtype) for n, v in values.items()} == {
        n: (f.shape, f.dtype) for n, f in CODEC.fields.items()
    }
    return True


def test_the_message_itself_decodes():
    got = CODEC.decode(MESSAGE)
    for name in ("s", "g", "b", "n"):
        assert torch.equal(got[name], VALUES[name])
    assert decodes_or_refuses(bytearray(MESSAGE))
    assert sealed(MESSAGE[WIRE_HEADER.size :]) == MESSAGE


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_random_bytes_are_refused(data):
    assert not decodes_or_refuses(data)
    assert not decodes_or_refuses(MESSAGE[: WIRE_HEADER.size] + data)
    assert not decodes_or_refuses(sealed(data))


@given(st.integers(0, len(MESSAGE) - 1), st.integers(1, 255))
@settings(max_examples=300)
def test_every_changed_byte_is_noticed(at, change):
    assert not decodes_or_refuses(MESSAGE[:at] + bytes([MESSAGE[at] ^ change]) + MESSAGE[at + 1 :])


@given(
    st.lists(st.tuples(st.integers(0, len(MESSAGE) - WIRE_HEADER.size - 1), st.integers(0, 255)), max_size=4), st.data()
)
@settings(max_examples=500)
def test_edits_under_a_right_checksum_never_escape(edits, data):
    body = bytearray(MESSAGE[WIRE_HEADER.size :])
    for at, value in edits:
        body[at] = value
    cut = data.draw(st.integers(0, len(body)) | st.just(len(body)))
    tail = data.draw(st.binary(max_size=8))
    decodes_or_refuses(sealed(bytes(body)))
    if cut != len(body) or tail:
        message = sealed(bytes(body[:cut]) + tail)
        assert len(message) == len(MESSAGE) or not decodes_or_refuses(message) or cut + len(tail) <= len(body)


@given(st.integers(0, len(MESSAGE) - 8), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
@settings(max_examples=300)
def test_huge_numbers_allocate_nothing(at, number):
    at = max(at, WIRE_HEADER.size)
    body = (MESSAGE[:at] + struct.pack("<Q", number) + MESSAGE[at + 8 :])[WIRE_HEADER.size : len(MESSAGE)]
    tracemalloc.start()
    decodes_or_refuses(sealed(body))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_errors_name_the_fault():
    other = Codec(Layout.create_from_shapes({"z": (3,)}), CODEC.fields | {"w": Field((LAYOUT.d,))})
    for message, words in [
        (b"", "at least"),
        (b"\0" * 40, "not a fedloom message"),
        (MESSAGE[:4] + b"\x63" + MESSAGE[5:], "version 99"),
        (MESSAGE[:-1], "checksum"),
        (sealed(MESSAGE[WIRE_HEADER.size : -1]), "payloads end at"),
        (
            sealed(MESSAGE[WIRE_HEADER.size : WIRE_HEADER.size + 1] + b"v" + MESSAGE[WIRE_HEADER.size + 2 :]),
            "field 'w'",
        ),
        (Codec(LAYOUT, {"w": Field((1,))}).encode({"w": torch.ones(1)}), "1 fields"),
    ]:
        with pytest.raises(WireError, match=words):
            CODEC.decode(message)
    with pytest.raises(WireError, match="a different model"):
        other.decode(MESSAGE)


def test_indices_must_ascend_and_integers_be_in_range():
    codec = Codec(LAYOUT, {"s": Field((9,), torch.float32, "sparse")})
    good = codec.encode({"s": torch.tensor([0.0, 1, 0, 0, 0, 0, 0, 2, 0])})
    for pair in [(7, 1), (1, 1), (1, 9), (-1, 3)]:
        body = good[WIRE_HEADER.size : -8] + struct.pack("<ii", *pair)
        with pytest.raises(WireError, match="must increase within 0..8"):
            codec.decode(good[: WIRE_HEADER.size - 4] + struct.pack("<I", zlib.crc32(body)) + body)
    codec = Codec(LAYOUT, {"g": Field((2,), torch.float32, "levels", levels=5)})
    good = codec.encode({"g": torch.tensor([1.0, 1.0])})
    body = good[WIRE_HEADER.size : -1] + b"\xff"
    with pytest.raises(WireError, match=r"a packed integer is larger than 2 \* 5"):
        codec.decode(good[: WIRE_HEADER.size - 4] + struct.pack("<I", zlib.crc32(body)) + body)


def test_lengths_that_belong_to_other_fields_are_refused():
    codec = Codec(LAYOUT, {"a": Field((3,)), "b": Field((5,))})
    good = codec.encode({"a": torch.ones(3), "b": torch.ones(5)})
    lengths = [struct.pack("<Q", 4 * k) for k in (3, 5)]
    at = [WIRE_HEADER.size + good[WIRE_HEADER.size :].index(name) + 2 + 3 + 8 for name in (b"\x01a", b"\x01b")]
    body = bytearray(good)
    for start, length in zip(at, reversed(lengths), strict=True):
        body[start : start + 8] = length
    assert len(body) == len(good)
    assert bytes(body) != good
    message = (
        bytes(body[: WIRE_HEADER.size - 4])
        + struct.pack("<I", zlib.crc32(body[WIRE_HEADER.size :]))
        + bytes(body[WIRE_HEADER.size :])
    )
    with pytest.raises(WireError, match="field 'a' .* cannot be 20 bytes"):
        codec.decode(message)


def test_factors_that_are_not_smaller_than_their_matrix_are_refused():
    codec = Codec(LAYOUT, {"w": Field((LAYOUT.d,), torch.float32, "lowrank", layout=LAYOUT)})
    good = codec.encode({"w": lowrank_rows(1, 1, torch.float32)[0]})
    table = good.index(struct.pack("<II", 1, 1))
    extra = 5 * (12 + 9) * 4  # fc.weight with rank 6 instead of 1, all lengths right
    length = len(good) - table
    body = (
        good[WIRE_HEADER.size : table - 8]
        + struct.pack("<QII", length + extra, 1, 6)
        + good[table + 8 :]
        + bytes(extra)
    )
    with pytest.raises(WireError, match="cannot have factors of rank 6"):
        codec.decode(good[: WIRE_HEADER.size - 4] + struct.pack("<I", zlib.crc32(body)) + body)


def test_wrong_use_is_refused():
    codec = Codec(LAYOUT, {"w": Field((3,))})
    for values, words in [
        ({"v": torch.ones(3)}, "fields"),
        ({"w": torch.ones(4)}, "must be"),
        ({"w": torch.ones(3, dtype=torch.float64)}, "float64"),
    ]:
        with pytest.raises(WireError, match=words):
            codec.encode(values)
    with pytest.raises(WireError, match=r"\[m, 3\]"):
        codec.length({"w": torch.ones(2, 4)})
    for options in [
        {"dtype": torch.int32},
        {"encoding": "zip"},
        {"encoding": "lowrank"},
        {"encoding": "sign", "dtype": torch.int64},
        {"mask": torch.ones(2, dtype=torch.bool)},
        {"levels": 0},
        {"levels": 2**15},
    ]:
        with pytest.raises(ConfigError):
            Field((3,), **options)
    with pytest.raises(ConfigError, match="a different model"):
        Codec(Layout.create_from_shapes({"z": (LAYOUT.d,)}), CODEC.fields)
    assert Field((3,), levels=2**15 - 1).bits == 16
    for name in ("", "n" * 256, "é" * 128):
        with pytest.raises(ConfigError, match="255"):
            Codec(LAYOUT, {name: Field((1,))})
    longest = Codec(LAYOUT, {"é" * 127 + "n": Field((1,))})
    one = dict.fromkeys(longest.fields, torch.ones(1))
    assert torch.equal(*(values[name] for values in (longest.decode(longest.encode(one)), one) for name in one))
