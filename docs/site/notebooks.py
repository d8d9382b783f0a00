"""The notebooks as pages: their text, code and recorded outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


def pages() -> Iterator[tuple[str, str]]:
    """Path and content of every notebook's page."""
    for file in sorted(FOLDER.glob("*.ipynb")):
        yield f"notebooks/{file.stem}.md", page(json.loads(file.read_text()))


def page(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output) for output in cell["outputs"]]
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output.get("data", {})
    if "image/svg+xml" in data:
        svg = "".join(data["image/svg+xml"])
        return svg[svg.index("<svg") :].replace("\n", "")
    if "image/png" in data:
        return f'<img alt="output" src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        return f"<div>{' '.join(''.join(data['text/html']).split())}</div>"
    return f"```text\n{''.join(data.get('text/plain', []))}\n```"
