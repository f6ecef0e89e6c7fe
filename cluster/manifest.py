"""Read a manifest: text to frozen types to kept rules; every broken rule is named with file, path, value and remedy."""

from pathlib import Path

from shoal.cluster.errors import ManifestError, Problem
from shoal.cluster.manifest_rules import problems
from shoal.cluster.manifest_text import convert, read_yaml
from shoal.cluster.manifest_types import Manifest

__all__ = ["Manifest", "decode_manifest", "read_manifest"]


def decode_manifest(text: str, file: str) -> Manifest:
    """The manifest in `text`; `file` names it in messages. Raises ManifestError with every broken rule."""
    tree = read_yaml(text, file)
    kind = tree.get("kind")
    if kind != "Cluster":
        raise ManifestError(file, (Problem("kind", kind, "must be Cluster", "this command reads clusters"),))
    manifest = convert(tree, Manifest, file)
    if found := problems(manifest):
        raise ManifestError(file, found)
    return manifest


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file; a ManifestError if it cannot be read or used."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ManifestError(
            str(path), (Problem("file", path, f"cannot be read: {error.strerror}", "check it"),)
        ) from None
    except UnicodeDecodeError:
        raise ManifestError(str(path), (Problem("file", path, "is not UTF-8 text", "save it as UTF-8"),)) from None
    return decode_manifest(text, str(path))
