"""Recipe names: short, long, any case, there and back; and what a user who asks for the impossible is told."""

import itertools
import subprocess
import sys

import pytest

from fsdp2.errors import ConfigurationError
from fsdp2.quantization.recipe import NAMED_RECIPES, QuantRecipe, TensorRecipe


@pytest.mark.parametrize("name", NAMED_RECIPES)
def test_named_recipe_goes_there_and_back(name):
    recipe = QuantRecipe.from_name(name.upper())
    assert recipe.name == name and recipe.long_name == NAMED_RECIPES[name]
    assert QuantRecipe.from_name(recipe.long_name.lower()) == QuantRecipe.from_name(recipe.name) == recipe


MX_FORMATS = ["E4M3", "E5M2", "E3M2", "E2M3", "E2M1", "BF16"]
LONG_NAMES = [
    f"{head}_{'_'.join(formats)}{rule}"
    for heads, known, rules in [
        (["dynamic_MX-1-1-32", "dynamic_MX-1-32-32"], MX_FORMATS, ["", "_ceil", "_rceil", "_even"]),
        (["dynamic_blockwise-1-128-128", "dynamic_blockwise-1-1-128"], ["E4M3", "E5M2", "BF16"], [""]),
        (["dynamic_per_tensor", "delayed_per_tensor", "dynamic_per_channel"], ["E4M3", "E5M2", "BF16"], [""]),
    ]
    for head, formats, rule in itertools.product(heads, itertools.product(known, repeat=3), rules)
    if set(formats) != {"BF16"}
]


def test_every_long_name_goes_there_and_back():
    for name in LONG_NAMES:
        recipe = QuantRecipe.from_name(name)
        assert recipe == QuantRecipe.from_name(recipe.name) == QuantRecipe.from_name(recipe.long_name), name
        if recipe.weight.is_quantized:  # else the block of the name means nothing and the default one is written
            assert recipe.long_name == name


def test_what_the_main_recipes_say():
    row, tile = (1, 32), (32, 32)
    mxfp8 = QuantRecipe.from_name("mxfp8")
    assert (mxfp8.inputs, mxfp8.weight, mxfp8.grads) == (TensorRecipe("E4M3", row),) * 3
    assert mxfp8.scale_rule == "floor" and mxfp8.weight.bytes_per_element == 1.03125
    assert QuantRecipe.from_name("mxfp8-32x32").weight == TensorRecipe("E4M3", tile)
    assert QuantRecipe.from_name("mxfp8-32x32").grads == TensorRecipe("E4M3", row)
    assert QuantRecipe.from_name("mxfp8-hybrid").grads == TensorRecipe("E5M2", row)
    assert QuantRecipe.from_name("mxfp4-weights").weight.bytes_per_element == 0.53125
    assert QuantRecipe.from_name("dynamic_mx_bf16_e4m3_bf16").inputs == TensorRecipe("BF16", ())


def test_flags_combine_with_the_recipe():
    assert QuantRecipe.from_name("mxfp8", scale_rule="rceil") == QuantRecipe.from_name("mxfp8-rceil")
    assert QuantRecipe.from_name("mxfp8", scale_rule="even").name == "dynamic_MX-1-1-32_E4M3_E4M3_E4M3_even"
    assert QuantRecipe.from_name("mxfp8", quant_format="e4m3", quant_block_size=32).name == "mxfp8"
    assert QuantRecipe.from_name("fp8-blockwise", scale_rule="floor", quant_block_size=128).name == "fp8-blockwise"


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("mxfp9", {}, ["mxfp9", "mxfp8", "did you mean"]),
        ("dynamic_MX-1-1-32_E4M3_E4M3", {}, ["dynamic_MX-1-1-32_E4M3_E4M3_E4M3"]),
        ("static_MX-1-1-32_E4M3_E4M3_E4M3", {}, ["static", "dynamic"]),
        ("delayed_MX-1-1-32_E4M3_E4M3_E4M3", {}, ["delayed", "dynamic"]),
        ("dynamic_MXX-1-1-32_E4M3_E4M3_E4M3", {}, ["mxx", "MX", "per_tensor"]),
        ("dynamic_MX-1-1-64_E4M3_E4M3_E4M3", {}, ["1-1-64", "1-1-32 or 1-32-32"]),
        ("dynamic_blockwise-1-32-32_E4M3_E4M3_E4M3", {}, ["1-32-32", "1-128-128"]),
        ("dynamic_per_tensor-1-1-32_E4M3_E4M3_E4M3", {}, ["1-1-32", "no block"]),
        ("dynamic_MX-1-1-32_E4M3_E4M4_E4M3", {}, ["e4m4", "did you mean 'E4M3'", "BF16"]),
        ("dynamic_MX-1-1-32_HiF8_E4M3_E4M3", {}, ["HiFloat8", "not supported"]),
        ("dynamic_per_tensor_E2M1_E4M3_E4M3", {}, ["E2M1", "E4M3, E5M2"]),
        ("dynamic_MX-1-1-32_BF16_BF16_BF16", {}, ["quantizes nothing"]),
        ("dynamic_per_channel_E4M3_E4M3_E4M3_rceil", {}, ["rceil", "fp32 scales"]),
        ("mxfp8-rceil", {"scale_rule": "even"}, ["quant_scale_rule 'even'", "'mxfp8-rceil'", "'rceil'"]),
        ("fp8-per-tensor", {"scale_rule": "even"}, ["quant_scale_rule 'even'", "'fp8-per-tensor'"]),
        ("mxfp8", {"scale_rule": "flor"}, ["flor", "did you mean 'floor'"]),
        ("mxfp8", {"quant_format": "E5M2"}, ["quant_format 'E5M2'", "'mxfp8'", "E4M3"]),
        ("mxfp8", {"quant_block_size": 64}, ["quant_block_size 64", "'mxfp8'", "32"]),
        ("fp8-per-tensor", {"quant_block_size": 32}, ["quant_block_size 32", "has no blocks"]),
    ],
)
def test_the_impossible_is_refused_with_what_can_be(name, flags, words):
    with pytest.raises(ConfigurationError) as refusal:
        QuantRecipe.from_name(name, **flags)
    for word in words:
        assert word in str(refusal.value), str(refusal.value)


def test_names_are_checked_without_torch():
    code = "import sys; import fsdp2.quantization as q; q.QuantRecipe.from_name('mxfp8'); print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"
