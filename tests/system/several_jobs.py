"""Run several training jobs one after the other in the same processes: importing torch costs more than a tiny job.

    RANK=... WORLD_SIZE=... python tests/system/several_jobs.py JOBS.json

JOBS.json is a list of {"port": int, "argv": [words for train_fsdp2.py]}. Each job starts and ends torch.distributed by
itself. The exit status is that of the first job that does not return 0.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train_fsdp2


def main(jobs_file: str) -> int:
    for job in json.loads(Path(jobs_file).read_text()):
        os.environ["MASTER_PORT"] = str(job["port"])
        status = train_fsdp2.main(job["argv"])
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
