"""A shard is quantized once a step, and codes of an older master never reach a GEMM."""

import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import fsdp2
from fsdp2.communication import counters
from fsdp2.engine import set_gradient_sync
from tests.fsdp2.gather_model import HIDDEN, LAYERS, Model, plan_of
from tests.processes import run_processes

WEIGHTS = LAYERS * 3


def forward_backward(model, x, sync=True):
    set_gradient_sync(model, sync)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.item()


def loaded_in_place(model):
    """A checkpoint read straight into the masters, which no version counter sees."""
    state = get_model_state_dict(model)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({name: tensor * 0.5 for name, tensor in state.items()}, checkpoint_id=folder, no_dist=True)
        dcp.load(state, checkpoint_id=folder, no_dist=True)


def halved(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def halved_local(model):
    with torch.no_grad():
        torch._foreach_mul_([parameter.to_local() for parameter in model.parameters()], 0.5)


def halved_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def halved_state(model):
    set_model_state_dict(model, {name: tensor * 0.5 for name, tensor in get_model_state_dict(model).items()})


def second_optimizer(model):
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        torch.optim.AdamW(model.parameters(), 1e-2, **options).step()


CHANGES = {f.__name__: f for f in (loaded_in_place, halved, halved_local, halved_data, halved_state, second_optimizer)}
EDITS = ("halved", "halved_local", "halved_state")  # what autograd's version counters see


def changed_and_fresh(name: str, recipe: str) -> dict:
    """Losses of a model changed after it had gathered, and of one whose masters were so from the start."""
    results = {}
    x = torch.randn(6, 8, HIDDEN, generator=torch.Generator().manual_seed(0))
    for between in ("steps", "micro-batches") if name in EDITS else ("steps",):
        torch.manual_seed(0)
        model = fsdp2.parallelize(Model(), plan_of(torch.distributed.get_world_size(), recipe=recipe))
        forward_backward(model, x, sync=between == "steps")
        CHANGES[name](model)
        with torch.no_grad():
            evaluated = model(x).float().square().mean().item()
        changed = forward_backward(model, x)
        masters = {key: tensor.full_tensor().clone() for key, tensor in model.state_dict().items()}
        fresh = Model()
        fresh.load_state_dict(masters)
        fresh = fsdp2.parallelize(fresh, plan_of(torch.distributed.get_world_size(), recipe=recipe))
        results[between] = (changed, evaluated, forward_backward(fresh, x))
    return results


def every_change() -> dict:
    return {(name, recipe): changed_and_fresh(name, recipe) for name in CHANGES for recipe in ("mxfp8", "mxfp8-32x32")}


@pytest.fixture(scope="module")
def changes():
    return run_processes(every_change, 2)[0]


@pytest.mark.parametrize("name", list(CHANGES))
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-32x32"])
def test_a_changed_master_is_quantized_anew(changes, name, recipe):
    for changed, evaluated, fresh in changes[name, recipe].values():
        assert changed == evaluated == fresh


def quantizations() -> dict:
    """Shards quantized in a step of one micro-batch, of three, and in an evaluation."""
    world = torch.distributed.get_world_size()
    x = torch.randn(6, 8, HIDDEN)
    found = {}
    cases = {"reshard": {}, "kept": {"reshard_after_forward": False}, "recompute": {"recompute": True}}
    for name, options in cases.items():
        model = fsdp2.parallelize(Model(), plan_of(world, **options))
        count = counters(model).take
        forward_backward(model, x)
        one = count()["weights_quantized"]
        for sync in (False, False, True):
            forward_backward(model, x, sync)
        three = count()["weights_quantized"]
        with torch.no_grad():
            model(x)
        found[name] = (one, three, count()["weights_quantized"])
    return found


def test_a_shard_is_quantized_once_a_step():
    for one, three, evaluation in run_processes(quantizations, 2)[0].values():
        assert one == three == evaluation == WEIGHTS
