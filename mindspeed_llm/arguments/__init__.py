"""What a user may set: six groups of flags as dataclasses, one parser for YAML and the command line, and the checks
before anything is allocated.

`parse_arguments(argv)` turns words and a YAML file into `Arguments`; `Arguments.validate(world_size)` refuses what
cannot work. Nothing here imports torch, so a wrong flag is answered at once. The dataclasses are the one table:
parser, `--help`, warnings, refusals and docs/arguments.md follow it.
"""

from mindspeed_llm.arguments.groups import GROUPS, Arguments, all_flags
from mindspeed_llm.arguments.parser import parse_arguments

__all__ = ["GROUPS", "Arguments", "all_flags", "parse_arguments"]
