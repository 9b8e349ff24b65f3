"""Continue text with a trained model: `echo "def main(" | python inference_fsdp2.py --model.model_name_or_path FOLDER`.

The prompt is standard input, as a whole; on a terminal every line is a prompt of its own. FOLDER is a Hugging Face
folder, for example OUTPUT_DIR/hf of a training run. `--inference.max_new_tokens` and `--inference.do_sample` say how to
go on; a CONFIG.yaml and the other flags of training may be given and are ignored where they mean nothing here.
Exit status 2 means a configuration that cannot work, with one message.
"""

from __future__ import annotations

import sys

from fsdp2.errors import ConfigurationError
from mindspeed_llm.arguments import parse_arguments
from mindspeed_llm.training.distributed import Launch


def main(argv: list[str]) -> int:
    try:
        arguments = parse_arguments(argv, program="inference_fsdp2.py", purpose="inference")
        if (processes := Launch.from_environment().world_size) > 1:
            raise ConfigurationError(f"WORLD_SIZE {processes}: inference is one process, without torchrun")
        arguments.validate(1, purpose="inference")
        answer(arguments)
        return 0
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def answer(arguments) -> None:
    """Read prompts, print each with its continuation."""
    import torch

    from mindspeed_llm.inference.session import Session
    from mindspeed_llm.training.distributed import device_type

    model, inference = arguments.model, arguments.inference
    session = Session(
        model.model_name_or_path,
        model.tokenizer_name_or_path,
        torch.device(device_type()),
        arguments.parallel.param_dtype,
    )
    interactive = sys.stdin.isatty()
    for prompt in sys.stdin if interactive else [sys.stdin.read()]:
        prompt = prompt.rstrip("\n")
        if interactive and not prompt:
            continue
        print(prompt, end="", flush=True)
        pieces = session.continue_text(
            prompt, inference.max_new_tokens, do_sample=inference.do_sample, seed=arguments.training.seed
        )
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
