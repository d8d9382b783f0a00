"""Complete the bill of materials of a deployment: add fedloom's own packages, and the license of every package.

    python scripts/sbom.py build/sbom.json    # the file that 'make sbom' wrote from requirements-deploy.txt

Licenses are read from the metadata of the installed packages. If a package is not installed in the listed version, or
does not state a license, its name is printed, and the file contains no license for it.
"""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from fedloom.version import __version__

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fedloom", "fedloom-clinic", "fedloom-sites")
"""The packages of this repository in the image of a deployment's machines."""
BASE_FILE = ROOT / "base-image.txt"
"""File with the base image of the container and its digest, which `make image` writes."""


def complete(bill: dict[str, Any]) -> list[str]:
    """Add the packages of this repository and all licenses to a bill of materials.

    Args:
        bill: CycloneDX document, which is changed in place.

    Returns:
        The names and versions of the packages without a license.
    """
    own = [_own(name) for name in PACKAGES]
    others = [c for c in bill.get("components", []) if c["name"] not in PACKAGES]
    for component in others:
        license_ = stated_license(component["name"], component.get("version", ""))
        if license_:
            component["licenses"] = [{"license": {"name": license_}}]
    bill["components"] = [*own, *others]
    bill.setdefault("metadata", {})["component"] = own[-1]
    return [f"{c['name']} {c.get('version', '')}" for c in others if "licenses" not in c]


def stated_license(name: str, version: str) -> str:
    """Return the license of an installed package, or "" if it states no license or a different version is installed."""
    try:
        facts = metadata(name)
    except PackageNotFoundError:
        return ""
    if version and facts["Version"].partition("+")[0] != version.partition("+")[0]:
        return ""
    first_line = next(iter((facts.get("License") or "").strip().splitlines()), "")
    classified = [c.rpartition(" :: ")[2] for c in facts.get_all("Classifier") or () if c.startswith("License :: ")]
    return str(facts.get("License-Expression") or ", ".join(classified) or first_line[:80])


def base_image(text: str) -> dict[str, Any]:
    """Return the component that describes a base image, given as ``NAME:TAG@sha256:DIGEST``."""
    image, _, digest = text.strip().partition("@")
    name, _, tag = image.partition(":")
    reference = f"pkg:oci/{name}@{digest.replace(':', '%3A')}?tag={tag}"
    hashes = [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}]
    return {
        "type": "container",
        "name": name,
        "version": tag,
        "purl": reference,
        "bom-ref": reference,
        "hashes": hashes,
    }


def _own(name: str) -> dict[str, Any]:
    project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    reference = f"pkg:pypi/{name}@{__version__}"
    license_ = {"license": {"id": project["license"]}}
    return {
        "type": "library", "name": name, "version": __version__, "purl": reference, "bom-ref": reference,
        "licenses": [license_],
    }  # fmt: skip


def main() -> int:
    """Complete the bill of materials that is named on the command line."""
    path = Path(sys.argv[1])
    bill = json.loads(path.read_text())
    lacking = complete(bill)
    if BASE_FILE.exists():
        bill["components"].append(base_image(BASE_FILE.read_text()))
    else:
        sys.stdout.write(f"the digest of the base image is unknown. Run 'make image', which writes {BASE_FILE.name}\n")
    path.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n")
    for name in lacking:
        sys.stdout.write(f"the license of {name} is unknown\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
