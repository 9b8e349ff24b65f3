"""Flags of the group `data`: which tokens are read, in what order, and what is held out.

Pre-training reads Megatron `.bin/.idx` files that tools/preprocess_data.py writes; `dataset` names their common
prefix, or several with weights. Flags of chat templates and of tokenizing during training belong to fine-tuning,
which is not built yet; they are refused, not ignored.
"""
# ruff: noqa: RUF009 -- flag() returns a dataclasses.field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_llm.arguments.flag import NO_EFFECT, NOT_BUILT, flag

_PRETRAINING_ONLY = "built is pre-training on .bin/.idx files, where every token is trained on"
_TOKENIZED_BEFORE = "text is tokenized before training by tools/preprocess_data.py, which has its own options"
_SPLIT = "the held-out part is cut from data.dataset by --data.split, for example 98,2,0"
_WEIGHTS = "weights are written into --data.dataset, for example '0.3 PREFIX_A 0.7 PREFIX_B'"
_PACKED = (
    "pre-training sequences are always packed from whole documents up to cutoff_len, without a mask between documents"
)


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Datasets, sequence length, split and blend."""

    template: str | None = flag(
        "Chat template.", None, status=NO_EFFECT, note="pre-training reads documents, not conversations"
    )
    dataset: dict[str, Any] | str | None = flag(
        "Prefix of a .bin/.idx pair, or a weighted blend: '0.3 PREFIX_A 0.7 PREFIX_B'; also as file_name: PREFIX.", None
    )
    eval_dataset: dict[str, Any] | str | None = flag("Dataset for evaluation.", None, status=NOT_BUILT, note=_SPLIT)
    dataset_dir: str = flag(
        "Folder of dataset_info.json.",
        "./configs/fsdp2/data",
        status=NO_EFFECT,
        note="--data.dataset names .bin/.idx prefixes, not entries of dataset_info.json",
    )
    cutoff_len: int = flag("Sequence length in tokens.", 2048, minimum=1)
    train_on_prompt: bool = flag("Train on the prompt too.", False, status=NOT_BUILT, note=_PRETRAINING_ONLY)
    mask_history: bool = flag("Train on the last turn only.", False, status=NOT_BUILT, note=_PRETRAINING_ONLY)
    streaming: bool = flag("Read and tokenize text during training.", False, status=NOT_BUILT, note=_TOKENIZED_BEFORE)
    buffer_size: int = flag(
        "Samples to shuffle among when streaming.", 16384, status=NO_EFFECT, note="streaming is not built", minimum=1
    )
    mix_strategy: str = flag(
        "How several datasets are joined.",
        "concat",
        choices=("concat", "interleave_under", "interleave_over"),
        status=NOT_BUILT,
        note=_WEIGHTS,
    )
    interleave_probs: str | None = flag("Probabilities of interleaved datasets.", None, status=NOT_BUILT, note=_WEIGHTS)
    overwrite_cache: bool = flag(
        "Tokenize again although a cache exists.", False, status=NO_EFFECT, note=_TOKENIZED_BEFORE
    )
    preprocessing_batch_size: int = flag(
        "Texts to tokenize at a time.", 1000, status=NO_EFFECT, note=_TOKENIZED_BEFORE, minimum=1
    )
    preprocessing_num_workers: int | None = flag(
        "Processes that tokenize.", None, status=NO_EFFECT, note=_TOKENIZED_BEFORE, minimum=1
    )
    max_samples: int | None = flag(
        "Samples to keep of each dataset.",
        None,
        status=NO_EFFECT,
        note="pre-training reads as many sequences as --training.max_steps takes",
        minimum=1,
    )
    eval_num_beams: int | None = flag(
        "Beams when evaluating by generation.",
        None,
        status=NOT_BUILT,
        note="evaluation computes loss and bits per byte",
        minimum=1,
    )
    ignore_pad_token_for_loss: bool = flag(
        "Leave padding out of the loss.", True, status=NO_EFFECT, note="pre-training sequences have no padding"
    )
    val_size: float = flag("Part (or number) of samples to hold out.", 0.0, status=NOT_BUILT, note=_SPLIT, minimum=0)
    eval_on_each_dataset: bool = flag(
        "Evaluate every dataset by itself.",
        False,
        status=NOT_BUILT,
        note="the held-out parts of all datasets are evaluated together",
    )
    packing: bool = flag("Pack fine-tuning samples into one sequence.", False, status=NOT_BUILT, note=_PACKED)
    neat_packing: bool = flag("Pack, with a mask between samples.", False, status=NOT_BUILT, note=_PACKED)
    tool_format: str | None = flag("Format of tool calls.", None, status=NOT_BUILT, note=_PRETRAINING_ONLY)
    default_system: str | None = flag("System message.", None, status=NOT_BUILT, note=_PRETRAINING_ONLY)
    enable_thinking: bool | None = flag(
        "Keep a thinking part in the chat template.", True, status=NOT_BUILT, note=_PRETRAINING_ONLY
    )
    tokenized_path: str | None = flag(
        "Folder of tokenized fine-tuning data.",
        None,
        status=NOT_BUILT,
        note="tokenized data is given as --data.dataset PREFIX",
    )
    data_shared_file_system: bool = flag(
        "All nodes see the same files.",
        False,
        status=NO_EFFECT,
        note="nothing is written beside the data, so nothing is shared",
    )
    data_manager_type: str = flag(
        "mg: Megatron .bin/.idx; lf: dataset_info.json. Both read .bin/.idx prefixes; entries of lf are not built yet.",
        "lf",
        choices=("lf", "mg"),
    )
    split: str = flag("Weights of the training, validation and test parts, in document order.", "100,0,0")
    create_attention_mask_in_dataloader: bool | None = flag(
        "Build attention masks while loading.",
        False,
        status=NO_EFFECT,
        note="attention is causal by itself and needs no mask",
    )
    no_shared_storage: bool | None = flag(
        "Every node has its own copy of the data.",
        False,
        status=NO_EFFECT,
        note="every process opens the files it is given",
    )
    dataloader_type: str = flag("Order of samples: one pass at a time.", "single", choices=("single",))
    reset_attention_mask: bool | None = flag(
        "Mask attention between documents of one sequence.", False, status=NOT_BUILT, note=_PACKED
    )
    append_eod: bool | None = flag(
        "End every document with an end token.",
        False,
        status=NO_EFFECT,
        note="the end token is appended by tools/preprocess_data.py --append-eod",
    )
