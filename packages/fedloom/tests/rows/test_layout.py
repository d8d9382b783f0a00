from __future__ import annotations

import json
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedloom.errors import LayoutError
from fedloom.rows.layout import Layout

SHAPES = st.lists(st.lists(st.integers(1, 4), min_size=0, max_size=5).map(tuple), min_size=1, max_size=5)


def layout_of(shapes) -> Layout:
    return Layout.create_from_shapes({f"p{k}.weight": shape for k, shape in enumerate(shapes)})


def rows_of(layout: Layout, m: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, layout.d, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 5), nn.GroupNorm(2, 4)
        self.fc1, self.fc10 = nn.Linear(4, 6), nn.Linear(6, 2, bias=False)


@given(SHAPES, st.integers(1, 4))
def test_tree_then_flatten_is_the_identity(shapes, m):
    layout = layout_of(shapes)
    rows = rows_of(layout, m)
    for w in (rows, rows[0]):
        tree = layout.tree(w)
        assert torch.equal(layout.flatten(tree), w)
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            assert tree[name].shape == w.shape[:-1] + shape


@given(SHAPES, st.data())
def test_tree_shares_memory_with_any_block_of_rows(shapes, data):
    layout = layout_of(shapes)
    wide = rows_of(layout, 6).repeat(1, 2)
    k = data.draw(st.integers(1, 5))
    for block in (wide[:k, : layout.d], wide[k:, layout.d :], wide[::2, : layout.d], wide[k, : layout.d]):
        for value in layout.tree(block).values():
            value.fill_(7.0)
        assert (block == 7.0).all()
    assert (wide[1, layout.d :] == 7.0).all() == (k <= 1)


@given(SHAPES, st.integers(1, 3))
def test_matrices_round_trip_and_definition(shapes, m):
    layout = layout_of(shapes)
    rows = rows_of(layout, m)
    for w in (rows, rows[0]):
        matrices = layout.matrices(w)
        assert torch.equal(layout.replace_matrices(w, matrices), w)
        assert {n: tuple(v.shape[-2:]) for n, v in matrices.items()} == layout.matrix_shapes
        changed = layout.replace_matrices(w, {n: 2 * v for n, v in matrices.items()})
        for name, value in layout.tree(changed).items():
            assert torch.equal(value, layout.tree(w)[name] * (2 if name in matrices else 1))


def test_a_convolution_becomes_its_swapped_matrix():
    layout = Layout.create(Net())
    rows = rows_of(layout, 3)
    conv = layout.tree(rows)["conv.weight"]
    matrix = layout.matrices(rows)["conv.weight"]
    assert matrix.shape == (3, 4 * 5, 3 * 5)
    for o, i, k, j in [(0, 0, 0, 0), (3, 2, 4, 1), (1, 2, 3, 4)]:
        assert torch.equal(matrix[:, o * 5 + k, i * 5 + j], conv[:, o, i, k, j])
    assert set(layout.matrices(rows)) == {"conv.weight", "fc1.weight", "fc10.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vector_and_load_are_inverse_and_copy(dtype):
    net, other = Net().to(dtype), Net().to(dtype)
    layout = Layout.create(net)
    w = layout.vector(net)
    assert w.shape == (layout.d,)
    assert w.dtype == dtype
    assert not w.requires_grad
    assert layout.d == sum(p.numel() for p in net.parameters())
    layout.load(other, w)
    w.zero_()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert layout.vector(net).abs().sum() > 0
    assert layout.vector(net, torch.float64).dtype == torch.float64


def test_vector_of_one_parameter_is_a_copy():
    net = nn.Linear(3, 2, bias=False)
    w = Layout.create(net).vector(net)
    w.zero_()
    assert net.weight.abs().sum() > 0


def test_mask_by_module_parameter_and_open_prefix():
    layout = Layout.create(Net())
    ones = torch.ones(layout.d)
    for prefixes, want in [
        (("fc1",), {"fc1.weight", "fc1.bias"}),
        (("fc1.bias",), {"fc1.bias"}),
        (("fc",), {"fc1.weight", "fc1.bias", "fc10.weight"}),
        (("conv", "norm."), {"conv.weight", "conv.bias", "norm.weight", "norm.bias"}),
    ]:
        chosen = layout.tree(ones * layout.mask(*prefixes))
        assert {n for n, v in chosen.items() if v.all()} == want
        assert all(not v.any() for n, v in chosen.items() if n not in want)
    assert not layout.mask().any()
    with pytest.raises(LayoutError, match="did you mean 'conv'"):
        layout.mask("cnov")


def test_value_header_and_fingerprint():
    layout = Layout.create(Net())
    assert layout == Layout.create(Net())
    assert hash(layout) == hash(Layout.create(Net()))
    again = Layout.read_header(layout.header())
    assert again == layout
    assert again.offsets == layout.offsets
    assert again.d == layout.d
    assert again.fingerprint == layout.fingerprint
    copy = ForkingPickler.loads(ForkingPickler.dumps(layout))
    assert copy == layout
    assert copy.fingerprint == layout.fingerprint
    assert Layout.create(nn.Linear(2, 3)).fingerprint != Layout.create(nn.Linear(3, 2)).fingerprint
    for sizes in ((0, 4), (1000,), (2**48 - 1,)):
        assert Layout.read_header({"layout": json.dumps([["w", sizes]])}).shapes == (torch.Size(sizes),)


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists).map(json.dumps))
def test_a_damaged_header_is_a_layout_error(text):
    try:
        layout = Layout.read_header({"layout": text})
    except LayoutError:
        return
    assert Layout.read_header(layout.header()) == layout


@pytest.mark.parametrize("size", [-1, 2**48, 1.0, True, "3", None])
def test_a_size_in_a_header_is_a_whole_number_in_bounds(size):
    with pytest.raises(LayoutError, match="damaged"):
        Layout.read_header({"layout": json.dumps([["w", [4, size]]])})


def test_errors_say_what_is_wrong():
    layout = Layout.create(Net())
    with pytest.raises(LayoutError, match="no readable layout"):
        Layout.read_header({})
    with pytest.raises(LayoutError, match="distinct names"):
        Layout.create(nn.ReLU())
    with pytest.raises(LayoutError, match=rf"\[\.\.\., {layout.d}\], got \[3\]"):
        layout.tree(torch.zeros(3))
    with pytest.raises(LayoutError, match="module Linear has the parameters .*, but the layout is"):
        layout.vector(nn.Linear(2, 2))
    with pytest.raises(LayoutError, match="flatten needs"):
        layout.flatten({"conv.weight": torch.zeros(4, 3, 5, 5)})
    tree = layout.tree(torch.zeros(2, layout.d))
    with pytest.raises(LayoutError, match=r"fc10\.weight"):
        layout.flatten(tree | {"fc10.weight": torch.zeros(6, 2)})
    with pytest.raises(LayoutError, match=r"did you mean 'fc1\.weight'"):
        layout.replace_matrices(torch.zeros(layout.d), {"fc1.wieght": torch.zeros(6, 4)})
    with pytest.raises(LayoutError, match="must have shape"):
        layout.replace_matrices(torch.zeros(layout.d), {"fc1.weight": torch.zeros(4, 6)})
