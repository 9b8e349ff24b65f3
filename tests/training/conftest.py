"""torch.distributed for one process, started and ended as a run does it."""

from __future__ import annotations

import pytest

from mindspeed_llm.training.distributed import Launch, start, stop


@pytest.fixture
def one_process(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield start(Launch.from_environment(), "cpu")
    stop()
