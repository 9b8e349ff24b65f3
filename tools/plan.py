"""Plan a run before there is a cluster, data or weights: memory of a rank, bytes of every collective, what fits.

    python tools/plan.py [CONFIG.yaml] --model.model_name_or_path configs/models/qwen3_30b_a3b \\
        --parallel.world_size 8 --parallel.fsdp_size 8 --model.quant_recipe_name mxfp8 \\
        [--parallel.device_memory 64] [--parallel.bandwidth 50]

Takes the words of train_fsdp2.py; a data set, a tokenizer and an output folder are not needed. `--device cpu`, `cuda`
or `npu` (the default) is the device that it plans for; A2, A3, A5 and gpu are platforms of the recipes. With a run's
data at hand, `train_fsdp2.py ... --training.dry_run` checks that too. Exit status 2 where the layout cannot work or
does not fit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fsdp2.errors import ConfigurationError
from mindspeed_llm.arguments import parse_arguments

PLATFORMS = {  # device type, and how such a chip's name begins
    "A2": ("npu", "Ascend910B"),
    "A3": ("npu", "Ascend910_93"),
    "A5": ("npu", "Ascend950"),
    "gpu": ("cuda", ""),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=__doc__.split("\n\n")[1].strip())
    parser.add_argument("--device", choices=("cpu", "cuda", "npu", *PLATFORMS), default="npu")
    options, words = parser.parse_known_args(argv)
    # Values that a plan does not look at, before the user's, which win.
    position = 0 if not words or words[0].startswith("--") else 1
    words[position:position] = ["--training.output_dir", "outputs/plan", "--training.stage", "pt"]
    words += ["--training.dry_run", "--model.train_from_scratch"]
    try:
        arguments = parse_arguments(words)
        parallel = arguments.parallel
        world_size = parallel.world_size or parallel.fsdp_size * parallel.dp_replicate_size
        arguments = arguments.on(world_size)
        arguments.validate(world_size, purpose="planning")
        from mindspeed_llm.models import build_model
        from mindspeed_llm.training import plan_report
        from mindspeed_llm.training.distributed import check_mx_units
        from mindspeed_llm.training.job import parallel_plan

        device, name = PLATFORMS.get(options.device, (options.device, ""))
        check_mx_units(arguments, name)

        model = build_model(arguments.model.model_name_or_path)
        plan = parallel_plan(arguments, world_size, device)
        plan.check_sizes()
        print(plan.describe(model))
        print(plan_report.of_arguments(arguments, model, plan))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
