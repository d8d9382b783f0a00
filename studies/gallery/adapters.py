import subprocess
from pathlib import Path


def before():
    """The base: the same model without adapters, trained centrally on the other modules."""
    if not Path("base.safetensors").exists():
        subprocess.run(["fedloom", "run", "../../examples/pretrain.toml", "--out", "runs/pretrain"], check=True)
        subprocess.run(["fedloom", "export", "runs/pretrain", "--out", "base.safetensors"], check=True)
