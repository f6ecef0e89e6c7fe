"""Compare a checkpoint's computation with the reference arrays beside it: `python -m shoal.engines.model.check DIR`."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch
from shoal.engines.model.check.parts import check_classes, check_draft, check_pictures, check_quantisers
from shoal.engines.model.check.report import Finding, FixtureError, Reference, read_arrays, stems
from shoal.engines.model.check.trace import read_prompt
from shoal.engines.model.check.trunk import check_prompt
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.decoder import Model
from shoal.engines.model.errors import CheckpointError
from shoal.engines.model.names import Part
from shoal.engines.model.numerics import Mode
from shoal.engines.model.vision import VisionEncoder
from shoal.engines.model.weights import load_model_weights

DOCUMENTED = (
    "*.input_ids", "*.token_types", "*.image*", "image*", "*.logits_*", "*.engram_rows", "*.router_*", "*.index_*",
    "*.candidates", "*.stream_norms", "*.streams", "*.pre", "*.attn_out", "*.ffn_out", "*.hc_*", "*.compressed_kv.*",
    "*.final_hidden", "*.taps", "draft*", "*.n0q_rows", "*.n1_*", "swa.*", "main.*", "index.*",
)  # fmt: skip


def check(directory: Path) -> list[Finding]:
    """All findings for a fixture directory: reference.npz, and vision.npz and quant_vectors.npz if they are there.

    Raises CheckpointError when the checkpoint cannot be loaded and FixtureError when the arrays cannot be compared.
    """
    config = ModelConfig.from_dir(directory)
    encoder = VisionEncoder(config, load_model_weights(directory, config, {Part.VISION}), torch.float32)
    model = Model.load(directory, Mode.N0)
    findings = check_classes(directory, model)
    with torch.inference_mode():
        for name in ("reference.npz", "vision.npz", "quant_vectors.npz"):
            path = directory / name
            if not path.exists() and name != "reference.npz":
                continue
            reference = Reference(name, read_arrays(path))
            _check_file(reference, model, encoder)
            if not reference.findings:  # agreement about nothing is no agreement
                raise FixtureError(
                    f"{path}: holds no array that this check compares; write them, or leave the file out"
                )
            findings += reference.findings + reference.leftovers(DOCUMENTED)
    return findings


def main(arguments: list[str]) -> int:
    """Print one line an array; 0 when all agree, 1 when one does not, 2 when the fixture cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m shoal.engines.model.check", description=__doc__)
    parser.add_argument("directory", type=Path, help="checkpoint with reference.npz beside it")
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON list")
    options = parser.parse_args(arguments)
    try:
        findings = check(options.directory)
    except (CheckpointError, FixtureError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    failed = [finding for finding in findings if not finding.passed]
    if options.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1) + "\n")
    else:
        sys.stdout.write("".join(f"{finding.line()}\n" for finding in findings))
        sys.stdout.write(f"{len(findings) - len(failed)} of {len(findings)} agree\n")
    return 1 if failed else 0


def _check_file(reference: Reference, model: Model, encoder: VisionEncoder) -> None:
    names = stems(reference.arrays, ".input_ids")
    prompts = {name: read_prompt(reference, name, encoder, model.config) for name in names}
    for prompt in prompts.values():
        check_prompt(reference, model, prompt)
    for name in stems(reference.arrays, ".golden"):
        check_draft(reference, name, model, prompts)
    check_pictures(reference, encoder)
    check_quantisers(reference)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
