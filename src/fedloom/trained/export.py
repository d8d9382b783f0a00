"""Export: a model as a file for programs that know nothing of fedloom."""

from __future__ import annotations

import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedloom.errors import ConfigError, unknown
from fedloom.models import factorise
from fedloom.storage.checkpoint import save_tensors
from fedloom.storage.files import make_folder, write_atomic
from fedloom.trained.model import Model

FORMATS = ("safetensors", "torch", "onnx")


def export(model: Model, path: Path | str, format: str = "safetensors", *, factorised: bool = False) -> dict[str, int]:
    """Write a model: a state dict of the plain `nn.Module`, or an ONNX graph.

    ``safetensors`` and ``torch`` hold the state dict, the latter for ``torch.load(weights_only=True)``; ``onnx`` maps
    ``samples`` ``[batch, *shape]`` in float32 to ``outputs`` ``[batch, k]``. Samples are scaled as in training: bytes
    divided by 255, then less the mean, then divided by the standard deviation; mean, deviation and classes are in the
    metadata of safetensors and ONNX files (``facts``).

    Args:
        model: what to write.
        path: the file, replaced if it is there.
        format: one of `FORMATS`.
        factorised: two thin layers in the place of every layer of low rank, where they have fewer numbers (FedSLR).

    Returns:
        The ranks of the layers that were replaced, by name; `fedloom.models.thin` builds a module with these.

    Raises:
        ConfigError: an unknown format, or the packages of the extra ``export`` are missing.
        CheckpointError: the disk is full or refuses.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    path, module, ranks = Path(path), model.module(), dict[str, int]()
    if factorised:
        thin = factorise(module)
        module, ranks = thin.module, thin.ranks
    header = model.recipe.header(model.about) | ({"ranks": json.dumps(ranks)} if ranks else {})
    content = _graph(module, model, header) if format == "onnx" else None
    make_folder(path.parent)
    if content is not None:
        write_atomic(path, content)
    elif format == "torch":
        out = io.BytesIO()
        torch.save({name: t.detach().clone() for name, t in module.state_dict().items()}, out)
        write_atomic(path, out.getbuffer())
    else:
        save_tensors(path, module.state_dict(), header)
    return ranks


def _graph(module: nn.Module, model: Model, header: dict[str, str]) -> bytes:
    """The module as an ONNX graph with a free batch dimension."""
    try:
        import onnxscript  # noqa: F401 (torch.onnx needs it)
    except ImportError as error:
        raise ConfigError(f"export to ONNX needs {error.name}: pip install 'fedloom[export]'") from None
    sample = torch.zeros(2, *model.recipe.facts.shape)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        program: Any = torch.onnx.export(
            module.float(),
            (sample,),
            input_names=["samples"],
            output_names=["outputs"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            dynamo=True,
            verbose=False,
        )
    program.model.metadata_props.update(header)
    content: bytes = program.model_proto.SerializeToString()
    return content
