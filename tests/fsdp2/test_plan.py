"""The plan: rows for every weight, reasons, and refusals that name the flag and the nearest right thing."""

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.errors import ConfigurationError
from fsdp2.expert_parallel.grouped_linear import GroupedLinear
from fsdp2.quantization import QuantRecipe


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(64, 128)
        self.gate = nn.Linear(64, 4)
        self.k_proj = nn.Linear(64, 48)
        self.experts = GroupedLinear(4, 64, 32)


def model_on_meta():
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList([Layer(), Layer()])
        model.lm_head = nn.Linear(64, 256)
    return model


def plan(world=2, quantization=True, **options):
    quant = {key[6:]: options.pop(key) for key in list(options) if key.startswith("quant_")}
    quant.setdefault("apply_modules", ("layers.{*}",))
    quant.setdefault("converters", ("quantize.linear.mx", "quantize.moe.mx"))
    recipe = QuantRecipe.from_name(quant.pop("recipe", "mxfp8"))
    options.setdefault("fsdp_modules", ("layers.{*}",))
    options.setdefault("fsdp_size", world)
    return fsdp2.ParallelPlan(
        world, "cpu", quantization=fsdp2.QuantizationPlan(recipe, **quant) if quantization else None, **options
    )


def test_a_row_for_every_linear_and_expert_weight():
    rows = {row["module"]: row for row in plan().quantization_rows(model_on_meta())}
    assert len(rows) == 2 * 4 + 1
    q = rows["layers.0.q_proj"]
    assert (q["recipe"], q["gather"], q["reason"], q["shape"]) == ("mxfp8", "mx", "", [128, 64])
    assert q["gather_bytes_forward"] == q["gather_bytes_backward"] == 64 * 64 * 33 // 32
    assert q["gather_bytes_bf16"] == 2 * 64 * 64
    assert rows["layers.0.experts"]["gather"] == "mx" and rows["layers.0.experts"]["shape"] == [4, 64, 32]
    assert rows["layers.0.gate"]["recipe"] is None and "*gate" in rows["layers.0.gate"]["reason"]
    assert rows["lm_head"]["recipe"] is None and "outside" in rows["lm_head"]["reason"]
    k = rows["layers.1.k_proj"]
    assert (k["recipe"], k["gather"]) == ("mxfp8", "bf16") and "24 rows would cut a block" in k["gather_reason"]


def test_uneven_experts_travel_in_bf16_and_say_so():
    row = plan(world=3).quantization_rows(model_on_meta())[3]
    assert row["kind"] == "experts" and row["gather"] == "bf16" and "4 rows do not divide by 3" in row["gather_reason"]


def test_the_description_names_what_is_left_alone():
    text = plan(recompute=True, recompute_modules=("layers.{*}",)).describe(model_on_meta())
    assert "mxfp8 in 6 of 9" in text and "left alone: 2 (layers.0.gate, ...)" in text
    assert "both planes" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_apply_modules": ("layer.{*}",)}, r"quant_apply_modules 'layer\.\{\*\}' matches no module.*layers"),
        ({"quant_apply_modules": ("layers.{*}", "layers.9")}, r"quant_apply_modules 'layers.9' matches no module"),
        ({"quant_ignored_modules": ("layers.*",)}, r"quantizes nothing: 'layers.0.q_proj'.*quant_ignored_modules"),
        ({"quant_converters": ("quantize.linear.mxx",)}, r"quant_converters 'quantize.linear.mxx'.*did you mean"),
        ({"fsdp_modules": ("layerz.{*}",)}, None),
    ],
)
def test_patterns_that_match_nothing_are_refused(options, message):
    if message is None:
        from fsdp2.engine import parallelize

        with pytest.raises(ConfigurationError, match=r"fsdp_modules 'layerz\.\{\*\}' matches no module"):
            parallelize(model_on_meta(), plan(**options))
    else:
        with pytest.raises(ConfigurationError, match=message):
            plan(**options).quantization_rows(model_on_meta())


def test_a_converter_without_work_is_refused():
    dense = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ConfigurationError, match=r"quantize.moe.mx' finds no GroupedLinear"):
        plan(quant_apply_modules=("0",)).quantization_rows(dense)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": 8, "fsdp_size": 6}, r"fsdp_size 6 times .* is 6, but 8 processes.*fsdp_size 8 fits"),
        ({"world": 8, "fsdp_size": 8, "dp_replicate_size": 2}, r"is 16, but 8 processes.*fsdp_size 4 fits"),
        ({"world": 8, "fsdp_size": 2, "dp_replicate_size": 3}, r"fsdp_size 8 --parallel.dp_replicate_size 1 fits"),
        ({"param_dtype": "bf61"}, r"param_dtype 'bf61'.*did you mean 'bf16'"),
        ({"num_to_forward_prefetch": -1}, r"num_to_forward_prefetch -1: must be 0 or more"),
        ({"quant_all_gather_mode": "ondemand"}, r"all_gather_mode 'ondemand'.*did you mean 'on-demand'"),
        ({"fsdp_size": 0}, r"fsdp_size 0: must be at least 1"),
    ],
)
def test_values_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        plan(**options).check_sizes()


def test_a_weight_shared_with_an_embedding_is_gathered_whole():
    with torch.device("meta"):
        model = nn.Module()
        model.embed = nn.Embedding(64, 64)
        model.head = nn.Linear(64, 64, bias=False)
    model.head.weight = model.embed.weight
    row = plan(
        quant_apply_modules=("head",), quant_ignored_modules=(), quant_converters=("quantize.linear.mx",)
    ).quantization_rows(model)[0]
    assert row["recipe"] == "mxfp8" and row["gather"] == "bf16" and "shared with embed.weight" in row["gather_reason"]


def test_fsdp2_never_imports_mindspeed_llm():
    """The one arrow of the architecture: mindspeed_llm -> fsdp2."""
    import ast
    from pathlib import Path

    for path in Path(fsdp2.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "mindspeed_llm" for name in names), path
