"""Flags of the group `inference`: how inference_fsdp2.py generates text.

Training ignores this group; the two entry points share one set of flags so that a training YAML can be handed to
inference as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_llm.arguments.flag import flag


@dataclass(frozen=True, kw_only=True)
class InferenceArguments:
    """Generation after training; used by inference_fsdp2.py."""

    infer_backend: str = flag("Engine; there is one.", "huggingface", choices=("huggingface",))
    max_new_tokens: int = flag("Tokens to generate at most.", 512, minimum=1)
    do_sample: bool = flag("Sample instead of taking the likeliest token.", False)
