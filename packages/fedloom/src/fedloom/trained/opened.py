"""Opening of a model file as a module.

The file may come from a run, a deployment or a node of a Flower app.
"""

from __future__ import annotations

import copy
from pathlib import Path

from torch import nn

from fedloom.errors import LayoutError
from fedloom.models import ModelSpec
from fedloom.rows.layout import Layout
from fedloom.rundir import as_path
from fedloom.trained.model import BASE_PREFIX, Model, check_layout, file_layout, load_statistics, open_tensors


def open_model(path: Path | str, model: nn.Module | ModelSpec) -> nn.Module:
    """Open a model file and return a plain module in evaluation mode.

    Args:
        path: file written by a node of a Flower app (``Local(..., folder=...)``), by ``fedloom deploy models``, or by a
            model's ``save`` method.
        model: the architecture, which a model file cannot choose, as a module. The parameters are loaded into a copy of
            this module. For a model of a run, the architecture may also be a value such as
            ``fl.models.MLP(hidden=[64])``.

    Raises:
        LayoutError: the file does not contain exactly one model, or its model has a different architecture.
    """
    path = as_path(path, "path")
    if path.is_dir():
        files = ", ".join(sorted(file.name for file in path.glob("*.safetensors"))) or "there are none"
        raise LayoutError(f"{path} is a folder. Pass a file in it that contains one model ({files})")
    with open_tensors(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    if any(name.startswith("rows.") or "/" in name for name in tensors):
        raise LayoutError(f"{path} does not contain exactly one model. It contains {', '.join(sorted(tensors)[:5])}")
    if isinstance(model, ModelSpec):
        if "rows" not in tensors:
            raise LayoutError(f"{path} does not describe the data of its model. Pass the module itself")
        return Model.load(path, model).module()
    module = copy.deepcopy(model).cpu().eval()
    if "rows" not in tensors:
        wanted = module.state_dict()
        for name in [*wanted, *tensors]:
            got, want = (list(values[name].shape) if name in values else "none" for values in (tensors, wanted))
            if got != want:
                raise LayoutError(f"{path}: {name!r} has shape {got}, but shape {want} in the given module")
        dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), None)
        module.to(dtype).load_state_dict(tensors)
        return module
    layout = Layout.create(module)
    check_layout(file_layout(path), layout, path)
    base = {name.removeprefix(BASE_PREFIX): value for name, value in tensors.items() if name.startswith(BASE_PREFIX)}
    module.to(tensors["rows"].dtype)
    if base:
        module.load_state_dict(base)
    layout.load(module, tensors["rows"])
    load_statistics(module, tensors.get("statistics"))
    return module
