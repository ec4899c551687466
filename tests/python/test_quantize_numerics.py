"""The methods of allspark.quantize on arrays: each against the same computation in float64, written
from its paper (support/quantize_oracle.py).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint
from support.model_file import bfloat16 as of_bits
from support.model_file import parts_of, read_tensors
from support.quantize_oracle import (
    Grid,
    Serial,
    bfloat16,
    correlated,
    divided,
    gptq_steps,
    is_bfloat16,
    product_errors,
)

pytest.importorskip("allspark._allspark")

from allspark.model_loader import HuggingFaceModel  # noqa: E402
from allspark.quantize import QuantizeConfig  # noqa: E402
from allspark.quantize import search as searches  # noqa: E402
from allspark.quantize.awq import Consumer, awq_scale  # noqa: E402
from allspark.quantize.gptq import NotFactorable, gptq  # noqa: E402
from allspark.quantize.grid import (  # noqa: E402
    QuantizedWeight,
    WeightFormat,
    on_grid,
    quantize,
    round_scales,
)
from allspark.quantize.moves import Move  # noqa: E402
from allspark.quantize.search import search  # noqa: E402
from allspark.quantize.smooth import smooth_scale  # noqa: E402
from allspark.quantize.solver import LayerSolver  # noqa: E402
from allspark.quantize.statistics import InputStatistics  # noqa: E402

FORMATS = {"int8": (8, False), "uint8": (8, True), "int4": (4, False), "uint4": (4, True)}
GROUPS = (0, 32, 64, 128)
# All groups divide the input features, of which there are 256 and 384.
WIDE = {
    **CONFIG,
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 384,
    "vocab_size": 40,
}
LARGEST = np.float32(2.0**127)  # that the writer takes


def form(name, group_size):
    return WeightFormat(*FORMATS[name], group_size)


def odd_groups(weight):
    """Puts groups into the first rows that are not like other weights. A group of 128 is 4 of 32,
    so each of them is there in every size."""
    fills = (
        np.zeros(128), np.full(128, 0.37), np.full(128, -2.5), np.linspace(0.1, 3, 128),
        np.linspace(-3, -0.1, 128), np.linspace(-1, 1, 128) * LARGEST,
        np.linspace(-1, 1, 128) * 2.0**-123, np.linspace(-1, 1, 128) * 2.0**-127,
        np.full(128, 2.0**-126), np.eye(1, 128, 5)[0], -np.eye(1, 128, 77)[0],
        np.full(128, -0.0), np.full(128, 2.0**-149),
    )  # fmt: skip
    for row, values in enumerate(fills):
        weight[row, :128] = values
        # The group after it, and with it a whole row.
        weight[row + 16] = np.resize(values, weight.shape[1])
    return weight


# Rounding to the nearest.


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    tensors = llama_tensors(WIDE)
    for name, weight in tensors.items():
        if "_proj" in name:
            odd_groups(weight)
    return write_checkpoint(tmp_path_factory.mktemp("wide"), tensors, WIDE), tensors


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("name", FORMATS)
def test_integers_scales_and_zeros_are_the_writers(tmp_path, wide, name, group_size, searched):
    directory, tensors = wide
    loader = HuggingFaceModel(str(directory), "m", user_set_data_type="float32").load_model()
    settings = {"weight_format": name, "group_size": group_size, "search": searched}
    loader.serialize_to_path(
        None, str(tmp_path), enable_quant=True, customized_quant_config=settings
    )
    _, stored = read_tensors(tmp_path / "m.asgraph")
    for target in ("qkv", "o", "gate_up", "down"):
        target = f"layers.0.{target}"
        weight = np.concatenate([tensors[part] for part in parts_of(target)])
        ours = (search if searched else quantize)(weight, form(name, group_size))
        np.testing.assert_array_equal(ours.values, stored[target])
        scales = of_bits(stored[f"{target}_scale"])
        np.testing.assert_array_equal(ours.scales.view(np.uint32), scales.view(np.uint32))
        if ours.zeros is None:
            assert f"{target}_zero" not in stored
        else:
            np.testing.assert_array_equal(ours.zeros, stored[f"{target}_zero"])


def random_grid(rng, weight_format, rows=16, features=256):
    """Any integers with any scales, of both signs, one of them zero."""
    groups = features // (weight_format.group_size or features)
    scales = rng.standard_normal((rows, groups)) * 2.0 ** rng.integers(-40, 40, (rows, groups))
    scales[3, 0] = 0
    zeros = rng.integers(0, weight_format.top + 1, (rows, groups), np.uint8)
    values = rng.integers(0, weight_format.top + 1, (rows, features), np.uint8)
    own_zeros = zeros if weight_format.asymmetric else None
    # A group without a scale has but one value.
    middle = zeros[3, 0] if weight_format.asymmetric else weight_format.middle
    values[3, : features // groups] = middle
    return QuantizedWeight(weight_format, values, bfloat16(scales).astype(np.float32), own_zeros)


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("name", FORMATS)
def test_values_of_a_grid_are_exact_and_stay(name, group_size):
    grid = random_grid(np.random.default_rng(1), form(name, group_size))
    floats = grid.to_float()
    # An integer of 9 bits times a scale of 8 bits is exact in float32.
    oracle = Grid.of(grid)
    np.testing.assert_array_equal(floats, oracle.to_float(grid.values))
    again = on_grid(floats, grid)
    np.testing.assert_array_equal(again.values, grid.values)
    assert again.scales is grid.scales and again.zeros is grid.zeros


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_to_a_grid_takes_the_nearest_value_and_cuts_off_the_rest(name):
    rng = np.random.default_rng(2)
    grid = random_grid(rng, form(name, 32))
    oracle = Grid.of(grid)
    steps = rng.uniform(-1.5, 1.5, grid.values.shape) * oracle.top
    weight = (oracle.scales * steps).astype(np.float32)
    values = on_grid(weight, grid).values
    for column in range(weight.shape[1]):
        places = oracle.places(weight[:, column].astype(np.float64), column)
        distance = np.abs(places + oracle.zeros[:, column] - values[:, column])
        # Quotients up to 383 are rounded to float32 before: by at most 2^-24 * 512.
        assert (distance <= 0.5 + 2.0**-15).all()


@pytest.mark.parametrize("name", FORMATS)
def test_groups_of_zeros_have_no_scale_and_stay_zero(name):
    weight = np.ones((4, 128), np.float32)
    weight[1, 32:64] = 0
    weight[2] = -0.0
    weight[3] = 2.0**-127  # the writer takes what is below all normal numbers as zero
    quantized = quantize(weight, form(name, 32))
    np.testing.assert_array_equal(
        quantized.scales == 0, [[0, 0, 0, 0], [0, 1, 0, 0], [1] * 4, [1] * 4]
    )
    for made in (quantized, search(weight, form(name, 32)), on_grid(weight, quantized)):
        floats = made.to_float()
        assert not floats[1, 32:64].any() and not floats[2:].any()
        assert np.isfinite(floats).all()


@pytest.mark.filterwarnings("ignore:overflow encountered")  # squares of errors: not less
@pytest.mark.parametrize("scale", [1.0, 2.0**126, 2.0**-100, 2.0**-119])
@pytest.mark.parametrize("value", [0.37, -2.5 / 2])
@pytest.mark.parametrize("name", FORMATS)
def test_constant_groups_move_by_half_a_step_at_most(name, value, scale):
    weight = np.full((2, 64), value * scale, np.float32)
    for made in (quantize(weight, form(name, 32)), search(weight, form(name, 32))):
        floats = made.to_float()
        assert np.isfinite(floats).all() and len(np.unique(floats)) == 1
        steps = np.abs(made.scales).max().astype(np.float64) / 2
        assert np.abs(floats.astype(np.float64) - weight).max() <= steps


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.5 * float(LARGEST)])
def test_a_weight_that_cannot_be_quantised_is_named(value):
    weight = np.ones((40, 64), np.float32)
    weight[37, 21] = value
    with pytest.raises(ValueError, match=r"37.*21"):
        quantize(weight, form("uint4", 32))


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="96"):
        quantize(np.ones((4, 96), np.float32), form("uint4", 64))


def test_scales_are_rounded_to_bfloat16():
    rng = np.random.default_rng(3)
    scales = (rng.standard_normal(4096) * 2.0 ** rng.integers(-120, 120, 4096)).astype(np.float32)
    # Halfway between two, to even; and the largest below the next power of two.
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x3FFFFFFF], np.uint32).view(np.float32)
    scales = np.concatenate([scales, ties])
    np.testing.assert_array_equal(round_scales(scales), bfloat16(scales).astype(np.float32))


# GPTQ.

# Conditions: a weight's rows, features, tokens, format and group size.
SIZES = [
    (24, 64, 512, "int8", 0),
    (24, 64, 512, "uint4", 32),
    (64, 256, 1024, "int4", 128),
    (64, 256, 1024, "uint4", 64),
    (64, 256, 1024, "uint8", 32),
    (40, 136, 96, "int4", 0),  # fewer tokens than features, and a serial end of other size
]


def problem(rows, features, tokens, name, group_size, seed=0):
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((rows, features)).astype(np.float32) / np.float32(8)
    inputs = correlated(rng, tokens, features)
    products = (inputs.T @ inputs).astype(np.float32)
    return weight, search(weight, form(name, group_size)), products


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gptq_takes_the_nearest_integer_at_each_step(size):
    """The float64 algorithm is given our integers. At each step, where errors of earlier columns
    have been passed on, ours must be the nearest, unless float32 could not tell.

    A weight is the sum of up to `features` parts that were passed on. Each is an error of at most
    half a step (more where it is cut off, which is rare) times a quotient of the factor, and the
    factor's own relative error is 2^-24 times the condition of X^T X after damping: at most
    features / 0.01, its trace over the damping. Errors of random signs add up to sqrt(features). A
    thousandth of a step holds both: it is 2^-24 * 25600 * sqrt(256) / 24 at the largest size
    (found: no step above 0.5 at three seeds of each). A damping off by a tenth gives 0.55 to 0.71.
    """
    weight, grid, products = problem(*size)
    made = gptq(weight, grid, products)
    steps = gptq_steps(weight, Grid.of(grid), products, forced=made.values)
    assert steps.distances.max() <= 0.5 + 1e-3
    assert made.scales is grid.scales and made.zeros is grid.zeros


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gptq_leaves_the_error_of_the_float64_algorithm(size):
    """Where one integer differs, all later ones of the row may; its error is another sum of as many
    random squares. Such a sum over k columns has a relative deviation of sqrt(0.8 / k), so if a
    tenth of n rows differ, the whole error moves by sqrt(2 * 0.8 / k / n / 10) (one deviation): at
    most 1.1 % at these sizes. 3 % is more than two and a half of them.
    """
    weight, grid, products = problem(*size)
    made = gptq(weight, grid, products)
    oracle = Grid.of(grid)
    exact = gptq_steps(weight, oracle, products)
    errors = product_errors(weight, made.to_float(), products)
    expected = product_errors(weight, oracle.to_float(exact.values), products)
    same = (made.values == exact.values).all(axis=1)
    assert same.mean() >= 0.9
    np.testing.assert_allclose(errors[same], expected[same], rtol=1e-9)
    assert errors.sum() == pytest.approx(expected.sum(), rel=0.03)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("features", [8, 16, 32])
def test_gptq_has_the_integers_of_the_float64_algorithm_in_small_cases(name, features):
    """Inputs are almost independent, and few: no quotient of these lies near a boundary."""
    rng = np.random.default_rng(features)
    weight = rng.standard_normal((6, features)).astype(np.float32)
    inputs = rng.standard_normal((32 * features, features))
    products = (inputs.T @ inputs).astype(np.float32)
    grid = quantize(weight, form(name, 0))
    exact = gptq_steps(weight, Grid.of(grid), products)
    # 6 * 32 places are this far from a boundary, at these seeds; float32 errs by some 1e-5.
    assert exact.distances.max() < 0.5 - 1e-4
    np.testing.assert_array_equal(gptq(weight, grid, products).values, exact.values)


@pytest.mark.parametrize("name", FORMATS)
def test_gptq_errs_less_than_rounding_where_inputs_are_correlated(name):
    for seed in range(8):
        weight, grid, products = problem(32, 64, 256, name, 32, seed)
        errors = [
            product_errors(weight, made.to_float(), products).sum()
            for made in (gptq(weight, grid, products), on_grid(weight, grid), grid)
        ]
        assert errors[0] < min(errors[1:])
        plain = quantize(weight, grid.format)
        rounded = product_errors(weight, plain.to_float(), products).sum()
        assert product_errors(weight, gptq(weight, plain, products).to_float(), products).sum() < (
            rounded
        )


def test_gptq_of_independent_inputs_is_rounding():
    """Then no error is passed on."""
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((16, 64)).astype(np.float32)
    grid = search(weight, form("int4", 32))
    products = np.diag(rng.uniform(1, 100, 64)).astype(np.float32)
    np.testing.assert_array_equal(gptq(weight, grid, products).values, on_grid(weight, grid).values)


def test_gptq_does_not_depend_on_the_size_of_inputs():
    weight, grid, products = problem(16, 64, 256, "uint4", 32)
    for factor in (2.0**-80, 2.0**60):  # a power of two is exact
        other = gptq(weight, grid, products * np.float32(factor))
        np.testing.assert_array_equal(other.values, gptq(weight, grid, products).values)


def test_gptq_without_a_factor_says_so():
    weight, grid, products = problem(16, 64, 256, "uint4", 32)
    for bad in (np.zeros_like(products), -products, np.full_like(products, np.nan),
                np.full_like(products, np.inf)):  # fmt: skip
        with np.errstate(all="ignore"), pytest.raises(NotFactorable):
            gptq(weight, grid, bad)


def alike(features, product):
    """X^T X with 1 for each feature and `product` for any two: its least eigenvalue is
    1 - product, so it has factors from a damping of product - 1 on."""
    return np.where(np.eye(features, dtype=bool), 1, product).astype(np.float32)


@pytest.mark.parametrize(("raises", "product"), [(1, 1.05), (2, 1.5), (3, 6)])
def test_gptq_raises_the_damping_by_ten_until_there_is_a_factor(raises, product):
    """The damping is a part of the mean of ones. The float64 algorithm with the same has our
    integers (see above); with ten times as much, not."""
    weight, grid, _ = problem(16, 64, 256, "uint4", 32)
    products = alike(64, product)
    made = gptq(weight, grid, products)

    def distance(damping):
        steps = gptq_steps(weight, Grid.of(grid), products, damping, forced=made.values)
        return steps.distances.max()

    damping = 0.01 * 10**raises
    assert distance(damping) <= 0.5 + 1e-3 and distance(10 * damping) > 0.51
    with pytest.raises(np.linalg.LinAlgError):
        distance(damping / 10)


def test_inputs_that_no_damping_helps_fall_back_to_search_and_say_why():
    rng = np.random.default_rng(6)
    weight, inputs = rng.standard_normal((16, 64)).astype(np.float32), correlated(rng, 256, 64)
    own, products = form("uint4", 32), alike(64, 51)
    with pytest.raises(NotFactorable):
        gptq(weight, quantize(weight, own), products)
    statistics = {("down", 0): replace(statistics_of(inputs), products=products)}
    config = QuantizeConfig(method="gptq")
    solved = LayerSolver(config, None, Serial()).solve({"down": weight}, {"down": own}, statistics)
    assert solved.fallbacks == {"down": "its inputs depend on each other"}
    expected = search(weight, own, np.full(64, 1 / 256, np.float32))
    np.testing.assert_array_equal(solved.quantized["down"].values, expected.values)


def test_gptq_rounds_the_weights_of_features_that_are_always_zero():
    weight, grid, products = problem(16, 64, 256, "uint4", 32)
    dead = [3, 40, 63]
    products[dead] = 0
    products[:, dead] = 0
    made = gptq(weight, grid, products)
    np.testing.assert_array_equal(made.values[:, dead], on_grid(weight, grid).values[:, dead])
    # The others are those of a weight without these features, but for the damping, a part of the
    # mean, which is of fewer features: its difference moves few integers.
    assert product_errors(weight, made.to_float(), products).sum() < (
        product_errors(weight, on_grid(weight, grid).to_float(), products).sum()
    )


def test_gptq_of_groups_of_zeros_is_finite():
    weight, _, products = problem(16, 64, 256, "uint4", 32)
    weight[3, 32:] = 0
    weight[4] = 0
    grid = quantize(weight, form("uint4", 32))
    floats = gptq(weight, grid, products).to_float()
    assert np.isfinite(floats).all() and not floats[3, 32:].any() and not floats[4].any()


# AWQ and SmoothQuant.


def statistics_of(inputs):
    exact = inputs.astype(np.float64)
    return InputStatistics(
        len(inputs),
        np.abs(exact).mean(axis=0),
        np.abs(inputs).max(axis=0),
        (exact.T @ exact).astype(np.float32),
    )


def move_of(features, spread=None):
    producers = features if spread is None else int(spread.max()) + 1
    return Move((("o", 0),), producers=producers, spread=spread)


def awq_errors(inputs, weights, spread):
    """Of the 20 scales: ||X (Q(W s) / s - W)^T||^2, from the inputs themselves."""
    magnitudes = np.abs(np.concatenate(inputs).astype(np.float64)).mean(axis=0)
    if spread is not None:
        magnitudes = np.array(
            [magnitudes[spread == producer].mean() for producer in range(spread.max() + 1)]
        )
    scales, errors = [], []
    for step in range(20):
        scale = np.maximum(magnitudes ** (step / 20), 1e-4)
        scale = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
        factors = scale if spread is None else scale[spread]
        error = 0.0
        for x, (weight, weight_format) in zip(inputs, weights, strict=True):
            rounded = quantize(weight * factors, weight_format).to_float().astype(np.float64)
            error += np.square(x.astype(np.float64) @ (rounded / factors - weight).T).sum()
        scales.append(scale)
        errors.append(error)
    return scales, np.array(errors)


GQA = (np.arange(4) // 2)[:, np.newaxis] * 16 + np.arange(16)  # two of four heads share values


@pytest.mark.parametrize(
    ("names", "spread"),
    [
        (["uint4"], None),
        (["int4"], None),
        (["int8"], None),
        (["uint4", "int8", "int4"], None),
        (["uint4"], GQA.ravel()),
    ],
    ids=["uint4", "int4", "int8", "three weights", "grouped heads"],
)
@pytest.mark.parametrize("seed", range(3))
def test_awq_takes_the_best_of_the_scales(names, spread, seed):
    rng = np.random.default_rng(seed)
    inputs = [correlated(rng, 128 * (i + 1), 64, spread=1.5) for i in range(len(names))]
    weights = [(rng.standard_normal((48, 64)).astype(np.float32), form(name, 32)) for name in names]
    scales, errors = awq_errors(inputs, weights, spread)
    best, second = np.argsort(errors)[:2]
    # The sums of squares in float32 are exact to 2^-24 * sqrt(48 * 64 * 64) < 1e-4.
    assert best > 0 and errors[best] < errors[second] * (1 - 1e-4)
    consumers = [
        Consumer(*weight, statistics_of(x)) for x, weight in zip(inputs, weights, strict=True)
    ]
    made = awq_scale(move_of(64, spread), consumers, map)
    np.testing.assert_allclose(made, scales[best], rtol=1e-6)


def test_awq_leaves_a_weight_alone_where_no_scale_is_better():
    rng = np.random.default_rng(0)
    ones = np.ones((64, 64), np.float32)
    consumer = Consumer(ones, form("int8", 0), statistics_of(np.eye(64, dtype=np.float32)))
    assert awq_scale(move_of(64), [consumer], map) is None
    zeros = statistics_of(np.zeros((8, 64), np.float32))
    weight = rng.standard_normal((64, 64)).astype(np.float32)
    assert awq_scale(move_of(64), [Consumer(weight, form("int4", 32), zeros)], map) is None


def test_awq_scales_are_finite_where_features_are_always_zero():
    rng = np.random.default_rng(0)
    inputs = correlated(rng, 256, 64, spread=2)
    inputs[:, [0, 17, 40]] = 0
    weight = rng.standard_normal((48, 64)).astype(np.float32)
    scale = awq_scale(
        move_of(64), [Consumer(weight, form("uint4", 32), statistics_of(inputs))], map
    )
    assert scale is not None and np.isfinite(scale).all() and (scale > 0).all()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.85, 1.0])
def test_smooth_scales_are_those_of_the_paper(alpha):
    """s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)."""
    rng = np.random.default_rng(7)
    inputs = [correlated(rng, 64, 32), correlated(rng, 96, 32)]
    weights = [rng.standard_normal((rows, 32)).astype(np.float32) for rows in (24, 40)]
    consumers = [
        Consumer(weight, form("int8", 0), statistics_of(x))
        for weight, x in zip(weights, inputs, strict=True)
    ]
    largest_input = np.abs(np.concatenate(inputs)).max(axis=0).astype(np.float64)
    largest_weight = np.abs(np.concatenate(weights)).max(axis=0).astype(np.float64)
    expected = largest_input**alpha / largest_weight ** (1 - alpha)
    # Two powers and a quotient in float32: 2^-24 each, times the exponents of up to 8 bits.
    np.testing.assert_allclose(smooth_scale(move_of(32), consumers, alpha), expected, rtol=2e-6)


def test_smooth_scales_even_out_inputs_and_weights():
    """At alpha 0.5, both have the same largest magnitude of each feature."""
    rng = np.random.default_rng(8)
    inputs = correlated(rng, 64, 32, spread=2)
    weight = rng.standard_normal((24, 32)).astype(np.float32)
    scale = smooth_scale(
        move_of(32), [Consumer(weight, form("int8", 0), statistics_of(inputs))], 0.5
    )
    np.testing.assert_allclose(
        np.abs(inputs / scale).max(axis=0), np.abs(weight * scale).max(axis=0), rtol=1e-5
    )


def test_smooth_scales_are_finite_where_inputs_or_weights_are_zero():
    rng = np.random.default_rng(9)
    inputs = correlated(rng, 64, 32)
    inputs[:, 3] = 0
    weight = rng.standard_normal((24, 32)).astype(np.float32)
    weight[:, [3, 9]] = 0
    consumer = Consumer(weight, form("int8", 0), statistics_of(inputs))
    for alpha in (0.0, 0.5, 1.0):
        scale = smooth_scale(move_of(32), [consumer], alpha)
        assert np.isfinite(scale).all() and (scale > 0).all()


def test_statistics_of_divided_inputs_are_those_of_the_quotients():
    rng = np.random.default_rng(10)
    inputs = correlated(rng, 128, 32)
    scale = rng.uniform(0.1, 10, 32).astype(np.float32)
    found, expected = divided(statistics_of(inputs), scale), statistics_of(inputs / scale)
    assert found.num_tokens == expected.num_tokens
    np.testing.assert_allclose(found.mean_abs, expected.mean_abs, rtol=1e-6)
    np.testing.assert_allclose(found.max_abs, expected.max_abs, rtol=1e-6)
    # Each element is a sum that may cancel; its terms are at most as large as the diagonal's.
    sizes = np.sqrt(np.outer(*2 * [np.diagonal(expected.products)]))
    assert (np.abs(found.products - expected.products) <= 1e-6 * sizes).all()
    np.testing.assert_allclose(found.mean_square, np.square(inputs / scale).mean(axis=0), rtol=1e-6)


# Search.


def errors_of(weight, quantized, importance=None):
    """[rows, groups], in float64."""
    error = np.square(weight.astype(np.float64) - Grid.of(quantized).to_float(quantized.values))
    if importance is not None:
        error *= importance
    return error.reshape(*quantized.scales.shape, -1).sum(axis=2)


def heavy_tails(rng, rows, features):
    return rng.standard_t(2.5, (rows, features)).astype(np.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("name", FORMATS)
def test_search_never_errs_more_than_rounding(name, group_size, weighted):
    rng = np.random.default_rng(11)
    weight = odd_groups(heavy_tails(rng, 300, 256))
    weight[[5, 21]] *= 2.0**-70  # no square beyond float32
    importance = rng.gamma(0.3, 1, 256).astype(np.float32) if weighted else None
    if weighted:
        importance[:40] = 0
    found = search(weight, form(name, group_size), importance)
    before = errors_of(weight, quantize(weight, form(name, group_size)), importance)
    after = errors_of(weight, found, importance)
    # Two sums of up to 256 squares are compared in float32, each rounded by 2^-24 at each step.
    assert (after <= before * (1 + 1e-5)).all()
    if weighted or name.endswith("int4"):  # and often less; but 8 bits have enough for the tails
        assert (after < before).mean() > 0.05
    assert is_bfloat16(found.scales)


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_the_writer_tries_the_same_parts_of_the_range(name, group_size):
    """Where all features count the same, the tool's own search finds what the writer's does."""
    weight = heavy_tails(np.random.default_rng(15), 300, 256)
    alike = np.ones(256, np.float32)
    ours, theirs = (search(weight, form(name, group_size), each) for each in (alike, None))
    # One compares sums in float32, the other in float64: ties within their rounding may differ.
    assert (ours.scales == theirs.scales).mean() > 0.99
    errors = [errors_of(weight, each, None) for each in (ours, theirs)]
    np.testing.assert_allclose(*errors, rtol=1e-5)


def brute_force(weight, weight_format, importance):
    """One row of one group: the smallest error of all parts of the range, with the integers."""
    full = quantize(weight, weight_format)
    scale, zero = float(full.scales[0, 0]), weight_format.middle
    best = None
    for part in searches.PARTS:
        own = scale if part == 1 else float(bfloat16(np.float32(scale) * part))
        if weight_format.asymmetric:
            low = min(float(weight.min()), 0.0)
            zero = int(np.clip(np.rint(-low * float(part) / own), 0, weight_format.top))
        for_each = [
            (abs(float(w) - (u - zero) * own) ** 2 * float(h), u)
            for w, h in zip(weight[0], importance, strict=True)
            for u in [int(np.clip(np.rint(float(w) / own) + zero, 0, weight_format.top))]
        ]
        error = sum(each for each, _ in for_each)
        if best is None or error < best[0] * (1 - 1e-6):
            best = error, own, zero, [u for _, u in for_each]
    return best


@pytest.mark.parametrize("name", FORMATS)
def test_search_finds_the_best_part_of_the_range(name):
    weight_format = form(name, 0)
    rng = np.random.default_rng(12)
    narrowed = 0
    for _ in range(40):
        weight = heavy_tails(rng, 1, 8)
        importance = rng.gamma(0.5, 1, 8).astype(np.float32)
        error, scale, zero, values = brute_force(weight, weight_format, importance)
        found = search(weight, weight_format, importance)
        assert found.scales[0, 0] == scale
        assert found.zeros is None or found.zeros[0, 0] == zero
        np.testing.assert_array_equal(found.values[0], values)
        assert errors_of(weight, found, importance)[0, 0] == pytest.approx(error, rel=1e-12)
        narrowed += scale != quantize(weight, weight_format).scales[0, 0]
    assert narrowed > 0


def test_search_looks_at_each_group_alone():
    """Rows and groups in any company have the scales that they have alone."""
    rng = np.random.default_rng(13)
    weight, importance = heavy_tails(rng, 600, 128), rng.gamma(1, 1, 128).astype(np.float32)
    whole = search(weight, form("uint4", 32), importance)
    for row, group in itertools.product((0, 255, 256, 599), range(4)):
        part = slice(32 * group, 32 * group + 32)
        alone = search(weight[row : row + 1, part], form("uint4", 0), importance[part])
        assert alone.scales[0, 0] == whole.scales[row, group]
        assert alone.zeros[0, 0] == whole.zeros[row, group]
        np.testing.assert_array_equal(alone.values[0], whole.values[row, part])


@pytest.mark.parametrize("name", FORMATS)
def test_search_makes_no_scale_that_the_format_forbids(name):
    """No scale is below 2^-125, so that arithmetic that flushes subnormals gives the same
    (csrc/weights/README.md)."""
    rng = np.random.default_rng(14)
    for exponent in (-118, -121, -123, -125):
        weight = np.ldexp(heavy_tails(rng, 64, 64), exponent).astype(np.float32)
        scales = np.abs(search(weight, form(name, 32)).scales)
        assert (scales[scales > 0] >= 2.0**-125).all()
