"""The model: weights, numeric mode and the forwards that engines call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from shoal.engines.config import Truncation, TruncationMode
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.engram import EngramHash
from shoal.engines.model.full import FullAttention
from shoal.engines.model.names import TRUNK, Part
from shoal.engines.model.numerics import Mode, Numerics, product
from shoal.engines.model.parameters import DrafterWeights, TrunkWeights, read_drafter, read_trunk
from shoal.engines.model.rope import frequencies, phases
from shoal.engines.model.stack import Blind, LayerRunner, Probe, Rows, StackOutput
from shoal.engines.model.weights import load_model_weights
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Model:
    """One checkpoint in one numeric mode. `drafter` is None where drafts are not wanted."""

    config: ModelConfig
    numerics: Numerics
    trunk: TrunkWeights
    engram: EngramHash
    drafter: DrafterWeights | None
    window_frequencies: Tensor = field(repr=False)
    sparse_frequencies: Tensor = field(repr=False)

    @classmethod
    def load(cls, directory: Path, mode: Mode = Mode.N1, with_drafter: bool = True) -> "Model":
        """The checkpoint in `directory`; raises ConfigError, WeightsError, TokenizerError."""
        config = ModelConfig.from_dir(directory)
        parts = TRUNK | {Part.DRAFTER} if with_drafter else TRUNK
        tensors = load_model_weights(directory, config, parts)
        return cls.build(config, Numerics.of(mode), tensors, EngramHash.from_dir(directory, config))

    @classmethod
    def build(
        cls, config: ModelConfig, numerics: Numerics, tensors: Mapping[str, Tensor], engram: EngramHash
    ) -> "Model":
        """A model of given tensors, named as in the checkpoint; without `mtp.` tensors it has no drafter."""
        text = config.text
        has_drafter = any(name.startswith("mtp.") for name in tensors)
        return cls(
            config=config,
            numerics=numerics,
            trunk=read_trunk(tensors, config, numerics.wide),
            engram=engram,
            drafter=read_drafter(tensors, config, numerics.wide) if has_drafter else None,
            window_frequencies=frequencies(text.qk_rope_head_dim, text.rope_theta, None),
            sparse_frequencies=frequencies(text.qk_rope_head_dim, text.compress_rope_theta, text.rope_scaling),
        )

    @torch.inference_mode()
    def forward_full(
        self,
        token_ids: Tensor,
        image_mask: Tensor,
        image_rows: Tensor,
        truncation: Truncation = Truncation(),
        data_len: int | None = None,
        probe: Probe | None = None,
    ) -> StackOutput:
        """A whole sequence without caches: final hidden [T, H] (in compact mode, of the kept rows only).

        token_ids int64 [T]; image_mask bool [T]; image_rows [masked rows, H]. `data_len` is the prompt length from
        which truncation counts back, T when None. `probe` sees the intermediate values.
        """
        length = len(token_ids)
        lookback = torch.full((1, self.engram.lookback), -1, dtype=torch.int64)
        rows = self.rows(torch.arange(length), image_mask, self.engram.rows(token_ids, image_mask, (length,), lookback))
        first_kept = self.first_kept(truncation, length if data_len is None else data_len)
        runner = self.runner(probe)
        state = FullAttention(runner, self.trunk, length, first_kept, truncation.mode is TruncationMode.COMPACT)
        return runner.run_stack(self.trunk, self.embed(token_ids, image_mask, image_rows), rows, state)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, V] of final hidden rows [rows, H]."""
        return product(hidden, self.trunk.head.weight).to(torch.float32)

    def embed(self, token_ids: Tensor, image_mask: Tensor, image_rows: Tensor) -> Tensor:
        """Embedding rows [T, H], image positions replaced by `image_rows` in order; raises ValueError."""
        count = int(image_mask.sum())
        if image_rows.shape != (count, self.config.hidden):
            raise ValueError(
                f"image_rows has shape {tuple(image_rows.shape)}; the mask has {count} image positions, "
                f"so it must be [{count}, {self.config.hidden}]"
            )
        rows = self.trunk.embed[token_ids].to(self.numerics.wide)
        rows[image_mask] = self.numerics.round(image_rows.to(self.numerics.wide))
        return rows

    def rows(self, positions: Tensor, image_mask: Tensor, engram_rows: Tensor) -> Rows:
        """Row facts for absolute positions int64 [T]."""
        wide = self.numerics.wide
        return Rows(
            positions,
            image_mask,
            engram_rows,
            phases(self.window_frequencies, positions, wide),
            phases(self.sparse_frequencies, positions, wide),
        )

    def runner(self, probe: Probe | None = None) -> LayerRunner:
        """What runs this model's layers."""
        return LayerRunner(self.config, self.numerics, probe or Blind())

    def first_kept(self, truncation: Truncation, data_len: int) -> int:
        """First position whose row the decoder layers keep; 0 when nothing is truncated. Raises ValueError."""
        if truncation.mode is TruncationMode.OFF:
            return 0
        if truncation.keep < self.config.keep_min:
            raise ValueError(
                f"truncation.keep = {truncation.keep} must be at least {self.config.keep_min}, the window and what "
                "may be rewound; raise keep or turn truncation off"
            )
        return max(0, data_len - truncation.keep)
