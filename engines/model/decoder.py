"""The model: weights, numeric mode and the forwards that engines call."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from shoal.engines.config import Truncation, TruncationMode
from shoal.engines.core.layout import CacheShape
from shoal.engines.model.batch import Batch
from shoal.engines.model.cache import Caches
from shoal.engines.model.cache_shape import cache_shape
from shoal.engines.model.cached import CachedAttention
from shoal.engines.model.config import ModelConfig
from shoal.engines.model.drafter import (
    DraftBlock,
    DraftChoice,
    MainKeys,
    draft_block,
    largest,
    main_features,
    main_kv,
    read_main_keys,
)
from shoal.engines.model.engram import EngramHash
from shoal.engines.model.full import FullAttention
from shoal.engines.model.moe import ALL_HERE, ExpertsPort
from shoal.engines.model.names import TRUNK, Part
from shoal.engines.model.numerics import Mode, Numerics, product
from shoal.engines.model.parameters import DrafterWeights, TrunkWeights, read_drafter, read_trunk
from shoal.engines.model.placement import Sequences
from shoal.engines.model.rope import frequencies, phases
from shoal.engines.model.row_split import ALONE, RowExchange, RowSplit
from shoal.engines.model.stack import Blind, LayerRunner, Probe, Rows, StackOutput
from shoal.engines.model.weights import load_model_weights
from torch import Tensor

NO_TRUNCATION = Truncation()


@dataclass(frozen=True, slots=True)
class Model:
    """One checkpoint in one numeric mode. `drafter` is None where drafts are not wanted.

    `experts` computes the experts of the trunk's layers; where ranks share them out, those of `trunk` are empty.
    Where ranks share the rows of a `forward` out, `row_exchange` is how they meet: all of them call it with the same
    batch and equal caches, which stay equal, and all get the same result.
    """

    config: ModelConfig
    numerics: Numerics
    trunk: TrunkWeights
    engram: EngramHash
    drafter: DrafterWeights | None
    window_frequencies: Tensor = field(repr=False)
    sparse_frequencies: Tensor = field(repr=False)
    experts: ExpertsPort = ALL_HERE
    row_exchange: RowExchange = ALONE

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
        truncation: Truncation = NO_TRUNCATION,
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

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: Caches, truncation: Truncation = NO_TRUNCATION) -> Tensor:
        """One step: final hidden of each sequence's last row [S, H] (prefill) or of every row [T, H] (decode).

        In prefill all rows of `batch.scored` sequences follow, end to end.

        Writes the step's rows into `caches`: rings of every layer (the drafter's too, if it is loaded), entries and
        accumulators. Truncation applies to prefill only. Raises ValueError.
        """
        self._check(batch, caches)
        device = batch.token_ids.device
        sequences = self._sequences(batch, truncation if batch.is_prefill else NO_TRUNCATION, device)
        engram_rows = self.engram.rows(batch.token_ids, batch.image_mask, batch.q_lens, batch.lookback.flip(1))
        split = RowSplit(self.row_exchange, sequences.lens)
        rows = self.rows(sequences.positions(), batch.image_mask, engram_rows).moved(split.own)
        runner, is_compact = self.runner(), truncation.mode is TruncationMode.COMPACT
        state = CachedAttention(runner, self.trunk, caches, sequences, split, is_compact, self.sparse_frequencies)
        embedded = split.own(self.embed(batch.token_ids, batch.image_mask, batch.image_rows))
        out = runner.run_stack(self.trunk, embedded, rows, state)
        if self.drafter is not None:
            features = main_features(runner, self.drafter, out.taps)
            for layer, kv in main_kv(runner, self.drafter, features, out.rows.window_phases):
                state.store_window(layer, kv)
        if not batch.is_prefill:
            return state.gather(out.hidden)
        last = state.gather_last(out.hidden)
        return torch.cat((last, state.gather_all_of(batch.scored, out.hidden))) if batch.scored else last

    @torch.inference_mode()
    def join(self) -> None:
        """Take part in one `forward` of the other ranks without a row of one's own."""
        self.experts.join(self.numerics, self.config.hidden)

    @torch.inference_mode()
    def draft(
        self, golden: Tensor, positions: Tensor, slots: Tensor, caches: Caches, choice: DraftChoice = largest
    ) -> DraftBlock:
        """Drafts after `golden` tokens int64 [S], sampled for the positions after `positions` int64 [S].

        `positions` are the last accepted ones of the sequences in `slots`: `forward` wrote them, and perhaps later
        rows, which are not read. Raises ValueError without a drafter.
        """
        main = read_main_keys(self.config, caches, slots, positions)
        return self.draft_from(golden, positions, main, choice=choice)

    @torch.inference_mode()
    def draft_from(
        self,
        golden: Tensor,
        positions: Tensor,
        main: MainKeys,
        probe: Probe | None = None,
        choice: DraftChoice = largest,
    ) -> DraftBlock:
        """`draft` with given main entries instead of a cache."""
        if self.drafter is None:
            raise ValueError("this model was loaded without its drafter; load it with with_drafter=True")
        text = self.config.text
        at = (positions.unsqueeze(1) + torch.arange(1, text.dspark_block_size + 1, device=golden.device)).flatten()
        no_rows = at.new_zeros(len(at), len(text.engram_layer_ids), text.engram_columns)
        rows = self.rows(at, torch.zeros_like(at, dtype=torch.bool), no_rows)
        return draft_block(self.runner(probe), self.trunk, self.drafter, golden, rows, main, choice)

    def cache_shape(self, block_tokens: int = 128, ring_extra: int = 0) -> CacheShape:
        """The caches that `forward` needs: published formats, or exact rows in a float32 mode."""
        shape = cache_shape(self.config, block_tokens, ring_extra)
        return dataclasses.replace(shape, is_exact=not self.numerics.quantise_cache)

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
        return LayerRunner(self.config, self.numerics, probe or Blind(), self.experts)

    def _sequences(self, batch: Batch, truncation: Truncation, device: torch.device) -> Sequences:
        longest = max(len(table) for table in batch.block_tables)
        tables = [[*table, *[0] * (longest - len(table))] for table in batch.block_tables]
        lower = [self.first_kept(truncation, length) for length in batch.data_lens]
        for scored in batch.scored:
            lower[scored] = 0
        columns = (batch.starts, batch.q_lens, batch.slots, lower)
        starts, lens, slots, lower_ids = (torch.tensor(c, dtype=torch.int64, device=device) for c in columns)
        return Sequences(starts, lens, slots, torch.tensor(tables, dtype=torch.int64, device=device), lower_ids)

    def _check(self, batch: Batch, caches: Caches) -> None:
        if caches.format.is_exact == self.numerics.quantise_cache:
            raise ValueError(
                f"caches.shape.is_exact = {caches.format.is_exact} does not fit the numeric mode: float32 modes need "
                "exact caches, the others the published formats"
            )
        for table, start, count in zip(batch.block_tables, batch.starts, batch.q_lens, strict=True):
            if len(table) * caches.shape.block_tokens < start + count:
                raise ValueError(
                    f"a block table of {len(table)} blocks holds {len(table) * caches.shape.block_tokens} tokens, "
                    f"the sequence has {start + count}; reserve blocks before the step"
                )

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
