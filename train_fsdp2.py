"""Train a language model on FSDP2: `torchrun ... train_fsdp2.py CONFIG.yaml --group.name value ...`.

Parse, build, train. A configuration that cannot work ends here with one message and exit status 2, wrong flags before
torch is even imported. Exit status 0 means a finished run; 128 + signal one that was told to stop and saved; 1 a
failure, among them a loss or gradient that is not finite.
"""

from __future__ import annotations

import dataclasses
import sys
import time

from fsdp2.errors import ConfigurationError
from mindspeed_llm.arguments import parse_arguments
from mindspeed_llm.training.distributed import Launch, check_mx_units, device_name, device_type

OTHER_RANKS_WAIT_S = 3.0


def main(argv: list[str]) -> int:
    launch = Launch.from_environment()
    try:
        arguments = parse_arguments(argv)
        if arguments.parallel.world_size is not None:  # a dry run for processes that are not there
            launch = dataclasses.replace(launch, world_size=arguments.parallel.world_size)
        arguments = arguments.on(launch.world_size)
        arguments.validate(launch.world_size)
        from mindspeed_llm.training.run import run  # imports torch, which wrong flags need not wait for

        check_mx_units(arguments, device_name(device_type(), launch.local_rank))
        return run(arguments, launch)
    except ConfigurationError as error:
        if launch.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(OTHER_RANKS_WAIT_S)  # torchrun ends all processes when the first one fails: let rank 0 speak
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
