"""Weights of a running engine change, its memory is freed and taken back, and no bit of an output is another's."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.engine.core import Pace
from jaxinfer.engine.engine import DeletedWeightsError
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.weights.errors import CheckpointError, WeightsError
from jaxinfer.weights.fit import checksum_of, leaves_of
from jaxinfer.weights.load import Deferred
from tests.engine.test_identity import MODES, ROOMY, SETTINGS, TIGHT, Requests, make_requests
from tests.engine.test_invariance import bits
from tests.fakes import random_model

SWAPPED = "jaxinfer.engine.scheduling.pages.prefer_swap"


def of_version(model: Model, version: int) -> Any:
    """Return other weights of the model, a function of ``version``."""
    keys = iter(jax.random.split(jax.random.key(version), len(jax.tree.leaves(model.params))))
    return jax.tree.map(lambda x: x + 0.2 * x.std() * jax.random.normal(next(keys), x.shape, x.dtype), model.params)


def generate(llm: LLM, requests: Requests, at: Callable[[int], None] = lambda step: None) -> list[Any]:
    """Generate, calling ``at`` with the number of each delta."""
    counts = iter(range(10**9))
    prompts, params = [prompt for prompt, _ in requests], [each for _, each in requests]
    outputs = llm.generate(prompts, params, on_delta=lambda delta: at(next(counts)))
    llm.engine.check()
    return outputs


def every(period: int, act: Callable[[], Any]) -> Callable[[int], None]:
    return lambda step: act() if step % period == period - 1 else None


@pytest.fixture(scope="module")
def tiny() -> tuple[Model, Requests, list[Any]]:
    model = random_model()
    requests = make_requests(24, model.config.vocab_size)
    undisturbed = LLM(model, **SETTINGS, num_pages=ROOMY)
    return model, requests, [bits(output) for output in generate(undisturbed, requests)]


FAST = ("full batch", "swapped", "drafts of an adversary")


@pytest.mark.parametrize(
    "mode", [mode if mode in FAST else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
)
def test_requests_go_on_as_if_nothing_had_happened(tiny, mode, monkeypatch):
    """Updates to equal weights, pauses, and sleep, every few tokens: each request keeps its bits."""
    model, requests, expected = tiny
    if mode.endswith("swapped"):
        monkeypatch.setattr(SWAPPED, lambda *_: True)
    model = model.replace(draft=random_model(seed=1, num_hidden_layers=1))
    llm = LLM(model, **{**SETTINGS, "num_pages": ROOMY, **MODES[mode][0]})
    acts = [
        lambda: llm.update_weights(model.params, mode="keep"),
        lambda: (llm.sleep(1), llm.wake_up()),
        lambda: (llm.pause(), llm.resume()),
        lambda: (llm.sleep(2), llm.wake_up(), llm.update_weights(model.params, mode="keep")),
        lambda: (llm.sleep(1, ["kv_cache"]), llm.wake_up(["kv_cache"])),
    ]
    turns = iter(acts * 1000)
    with count_compilations() as compilations:
        outputs = generate(llm, requests, every(17, lambda: next(turns)()))
    assert compilations.count == 0
    assert [bits(output) for output in outputs] == expected
    assert llm.weight_version > 3


def check_ranges(outputs: list[Any], requests: Requests, models: dict[int, LLM]) -> int:
    """Check that each range of tokens is what its version generates after those before; return the number of ranges."""
    seen = 0
    for output, (prompt, params) in zip(outputs, requests, strict=True):
        for sample in output.outputs:
            start = 0
            versions = sample.weight_versions or ((0, len(sample.token_ids)),)
            assert sum(count for _, count in versions) == len(sample.token_ids)
            for version, count in versions:
                before = [*prompt, *sample.token_ids[:start]]
                left = dataclasses.replace(params, max_tokens=params.max_tokens - start, n=1)
                (own,) = models[version].generate([before], left)
                assert own.outputs[0].token_ids[:count] == sample.token_ids[start : start + count], version
                start, seen = start + count, seen + 1
    return seen


def simple_requests(count: int, vocab: int) -> Requests:
    """Return requests whose continuation is a function of their tokens: greedy, or drawn with a seed."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, vocab, 40).tolist()
    return [
        (
            shared[: 10 * (number % 4)] + rng.integers(0, vocab, 5 + number).tolist(),
            SamplingParams(temperature=0.9 * (number % 2), top_p=0.9, seed=number, max_tokens=12 + number % 9),
        )
        for number in range(count)
    ]


def test_penalties_count_the_tokens_of_all_versions():
    """Greedy with penalties: after an update each token is the new logits' best, less the penalties of all tokens."""
    model, presence, frequency = random_model(), 1.5, 0.7
    new, rng = of_version(model, 1), np.random.default_rng(5)
    llm = LLM(model, **SETTINGS)
    terms = SamplingParams(temperature=0.0, presence_penalty=presence, frequency_penalty=frequency, max_tokens=24)
    requests = [(rng.integers(0, 97, 20 + number).tolist(), terms) for number in range(4)]
    update = lambda step: llm.update_weights(new, mode="keep") if step == 40 else None  # noqa: E731
    for output, (prompt, _) in zip(generate(llm, requests, update), requests, strict=True):
        (sample,) = output.outputs
        (_, before), (_, after) = sample.weight_versions
        assert before > 3
        assert after > 3
        for at in range(before, before + after):
            known = sample.token_ids[:at]
            counts = np.bincount(known, minlength=97)
            logits = np.asarray(model.apply(new, jnp.asarray([[*prompt, *known]])))[0, -1]
            assert sample.token_ids[at] == (logits - presence * (counts > 0) - frequency * counts).argmax()


def check_updates(llm: LLM, model: Model, versions: int = 6) -> None:
    """Update while requests run, then twice between them: every range is that version's own continuation."""
    requests = simple_requests(12, model.config.vocab_size)
    numbers = iter(range(1, versions))

    def update() -> None:
        if (number := next(numbers, None)) is not None:
            llm.update_weights(of_version(model, number), version=number, mode="keep")

    of_version(model, 1)  # its programs are the test's own
    with count_compilations() as compilations:
        outputs = generate(llm, requests, every(23, update))
        own = compilations.count
    alone = {number: LLM(model.replace(params=of_version(model, number)), **SETTINGS) for number in range(1, versions)}
    assert check_ranges(outputs, requests, {0: LLM(model, **SETTINGS), **alone}) > len(requests)
    assert own == 0
    assert llm.engine.stats().replay_mismatches == 0  # tokens of other weights are not expected again
    last = llm.weight_version
    assert last == versions - 1
    assert [o.outputs[0].token_ids for o in generate(llm, requests)] == [
        o.outputs[0].token_ids for o in generate(alone[last], requests)
    ]


def test_each_range_is_its_versions_own_continuation(tiny):
    model = tiny[0]
    check_updates(LLM(model, **SETTINGS, num_pages=TIGHT), model)


@pytest.mark.slow
def test_two_hundred_updates_mix_no_versions(tiny):
    """Five sets of weights in turn, every few tokens; each range is what its set continues with."""
    model, sets = tiny[0], 5
    weights = [of_version(model, number) for number in range(sets)]
    llm = LLM(model.replace(params=weights[0]), **SETTINGS, num_pages=TIGHT)
    requests = simple_requests(12, model.config.vocab_size)
    alone = [LLM(model.replace(params=own), **SETTINGS) for own in weights]
    ranges = 0
    with count_compilations() as compilations:
        while llm.weight_version < 200:
            update = lambda: llm.update_weights(weights[(llm.weight_version + 1) % sets], mode="keep")  # noqa: E731
            outputs = generate(llm, requests, every(31, update))
            versions = {version: alone[version % sets] for version in range(llm.weight_version + 1)}
            ranges += check_ranges(outputs, requests, versions)
    assert compilations.count == 0
    assert ranges > 400


def test_a_failure_halfway_leaves_the_old_weights(tiny, monkeypatch):
    model = tiny[0]
    llm, new = LLM(model, **SETTINGS), of_version(model, 1)
    request = (list(range(9)), SamplingParams(temperature=0.0, max_tokens=8))
    expected, stage = bits(generate(llm, [request])[0]), llm.engine.stage
    for good in range(len(model.params)):
        calls = iter(range(100))

        def failing(*args: Any, good: int = good, calls: Any = calls, **options: Any) -> Any:
            if next(calls) == good:
                raise MemoryError(good)
            return stage(*args, **options)

        monkeypatch.setattr(llm.engine, "stage", failing)
        with pytest.raises(MemoryError):
            llm.update_weights(new)
        assert (llm.weight_version, bits(generate(llm, [request])[0])) == (0, expected)
    assert llm.weight_checksums() == {path: checksum_of([(path, leaf)]) for path, leaf in leaves_of(model.params)}


def test_prefix_pages_are_of_the_served_version(tiny):
    """A page of an old version is never hit; one that is still right is not dropped."""
    model = tiny[0]
    llm = LLM(model, **SETTINGS, num_pages=ROOMY)
    request = (list(range(60)), SamplingParams(temperature=0.0, max_tokens=2))
    generate(llm, [request])

    def hits() -> int:
        before = llm.engine.stats().prefix_hits
        generate(llm, [request])
        return llm.engine.stats().prefix_hits - before

    assert hits() == 48
    llm.update_weights(of_version(model, 1))
    assert hits() == 0
    assert hits() == 48
    llm.update_weights({name: model.params[name] for name in ("final_norm", "head")}, partial=True)
    assert hits() == 48  # they change no keys and values


def test_an_update_is_a_version_with_its_bytes_and_checksum(tiny):
    model = tiny[0]
    llm, new = LLM(model, **SETTINGS), of_version(model, 1)
    update = llm.update_weights(new, version=7)
    assert (update.version, llm.weight_version) == (7, 7)
    assert update.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(new))
    assert update.checksum == checksum_of(leaves_of(new))
    assert llm.weight_checksums() == {path: checksum_of([(path, leaf)]) for path, leaf in leaves_of(new)}
    ours, theirs = (jax.tree.leaves(tree)[0].unsafe_buffer_pointer() for tree in (llm.model.params, new))
    assert ours == theirs  # the array itself is served


def changed(params: Any, path: str, value: Any) -> Any:
    """Return parameters with another value, or without one (None)."""
    name, _, rest = path.partition(".")
    own = {key: node for key, node in params.items() if key != name}
    if not rest:
        return own if value is None else own | {name: value}
    return own | {name: changed(params[name], rest, value)}


WRONG = {
    "missing": ("layers_1.mlp.down", None, "layers_1.mlp.down"),
    "unknown": ("layers_1.mlp.up", np.zeros(3, np.float32), "layers_1.mlp.up"),
    "shape": ("layers_0.mlp.down", np.zeros((3, 4), np.float32), "layers_0.mlp.down"),
    "dtype": ("final_norm.scale", np.ones(32, np.float16), "final_norm.scale"),
    "no array": ("final_norm.scale", 1.0, "final_norm.scale"),
    "no dict": ("layers_0.mlp", np.zeros(3), "layers_0.mlp"),
    "not finite": ("layers_1.mlp.down", np.full((48, 32), np.nan, np.float32), "layers_1.mlp.down"),
}


@pytest.fixture(scope="module")
def checked(tiny) -> LLM:
    """An engine that no test changes."""
    return LLM(tiny[0], **SETTINGS, check_finite=True)


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_weights_change_nothing(checked, kind):
    llm, (path, value, place) = checked, WRONG[kind]
    request = (list(range(9)), SamplingParams(temperature=0.0, max_tokens=8))
    before = bits(generate(llm, [request])[0])
    with pytest.raises(WeightsError) as refused:
        llm.update_weights(changed(of_version(llm.model, 1), path, value))
    assert refused.value.name == place
    assert llm.weight_version == 0
    assert bits(generate(llm, [request])[0]) == before


def test_what_is_read_when_it_is_placed_is_read_once_and_may_fail(checked):
    """Arrays of a checkpoint are read by shards; what cannot be read is an error of the update."""
    params, read = checked.model.params, list[tuple[slice, ...]]()
    down = params["layers_1"]["mlp"]["down"]

    def fill(index: tuple[slice, ...]) -> np.ndarray:
        read.append(index)
        return np.asarray(down)[index]

    def broken(index: tuple[slice, ...]) -> np.ndarray:
        raise CheckpointError("the file ends")

    def stage(give: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
        lazy = Deferred(down.shape, down.dtype, give)
        return checked._served.stage({"layers_1": {"mlp": {"down": lazy}}}, partial=True)

    np.testing.assert_array_equal(stage(fill).params["layers_1"]["mlp"]["down"], down)
    assert len(read) == 1
    with pytest.raises(WeightsError) as refused:
        stage(broken)
    assert refused.value.name == "params"


def test_versions_go_up(tiny):
    llm = LLM(tiny[0], **SETTINGS)
    llm.update_weights(tiny[0].params, version=3)
    for version in (0, 3, -1, True, 4.0, "5", 2**63):
        with pytest.raises(WeightsError) as refused:
            llm.update_weights(tiny[0].params, version=version)
        assert (refused.value.field, llm.weight_version) == ("version", 3), version


def test_arrays_of_another_dtype_are_cast_on_request(tiny):
    llm = LLM(tiny[0], dtype="bfloat16", **SETTINGS)
    new = of_version(tiny[0], 1)
    with pytest.raises(WeightsError):
        llm.update_weights(new)
    llm.update_weights(new, cast=True)
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), new)
    assert llm.weight_checksums() == {path: checksum_of([(path, leaf)]) for path, leaf in leaves_of(cast)}


def test_arrays_of_numpy_are_copied(tiny):
    llm, new = LLM(tiny[0], **SETTINGS), jax.tree.map(np.array, of_version(tiny[0], 1))
    request = (list(range(9)), SamplingParams(temperature=0.0, max_tokens=8))
    llm.update_weights(new)
    before = bits(generate(llm, [request])[0])
    for leaf in jax.tree.leaves(new):
        leaf[:] = 0
    llm.reset_prefix_cache()
    assert bits(generate(llm, [request])[0]) == before


def test_deleted_arrays_are_noticed_before_a_step(tiny):
    """An optimizer that donates what is served: the error names the remedy, which works."""
    request = (list(range(9)), SamplingParams(temperature=0.0, max_tokens=8))
    for copy in (False, True):
        mine = tiny[0].replace(params=jax.tree.map(jnp.copy, tiny[0].params))
        llm = LLM(mine, **SETTINGS, copy=copy)
        step = jax.jit(lambda params: jax.tree.map(lambda x: 0.9 * x, params), donate_argnums=0)
        new = step(mine.params)
        if copy:
            generate(llm, [request])
            continue
        with pytest.raises(DeletedWeightsError):
            generate(llm, [request])
        llm.update_weights(new)
        generate(llm, [request])
        llm.update_weights(new, copy=True)


@pytest.mark.slow
def test_a_draft_model_has_a_call_of_its_own(tiny):
    model, requests, expected = tiny
    drafting = model.replace(draft=random_model(seed=1, num_hidden_layers=1))
    llm = LLM(drafting, **SETTINGS, num_pages=ROOMY, speculative="draft_model")
    before = llm.engine.stats().draft_accepted
    cached = generate(llm, requests)
    slow = llm.engine.stats().draft_accepted - before
    llm.update_draft_weights(random_model(num_hidden_layers=1).params)
    assert llm.weight_version == 0
    again = generate(llm, requests)
    assert [bits(output) for output in cached] == [bits(output) for output in again] == expected
    same = LLM(model.replace(draft=model), **SETTINGS, num_pages=ROOMY, speculative="draft_model")
    other = same.update_draft_weights(random_model(seed=5).params)
    assert other.version == 0
    assert slow >= 0
    with pytest.raises(WeightsError):
        LLM(model, **SETTINGS).update_draft_weights(model.params)


# ---- pauses and memory


def test_nothing_is_computed_while_the_engine_is_paused(tiny):
    llm = LLM(tiny[0], **SETTINGS)
    llm.pause()
    assert llm.is_paused
    with pytest.raises(RequestError) as refused:
        llm.generate([[1, 2]], SamplingParams(max_tokens=2))
    assert refused.value.field == "engine"
    llm.resume()
    assert not llm.is_paused
    llm.generate([[1, 2]], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("mode", ["pause", "update"])
def test_abort_ends_what_runs(tiny, mode):
    llm = LLM(tiny[0], **SETTINGS)
    new = of_version(tiny[0], 1)

    def act() -> None:
        llm.abort_all() if mode == "pause" else llm.update_weights(new, mode="abort")

    outputs = generate(llm, simple_requests(12, 97), lambda step: act() if step == 20 else None)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons.count("abort") == 12
    generate(llm, simple_requests(2, 97))


def test_wait_needs_an_idle_engine(tiny):
    llm = LLM(tiny[0], **SETTINGS)
    refused = list[RequestError]()

    def act() -> None:
        for call in (llm.pause, lambda mode: llm.update_weights(tiny[0].params, mode=mode)):
            with pytest.raises(RequestError) as error:
                call("wait")
            refused.append(error.value)

    generate(llm, simple_requests(2, 97), lambda step: act() if step == 3 else None)
    assert [error.field for error in refused] == ["mode", "mode"]


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_sleep_frees_what_its_level_says(tiny):
    model = random_model(num_hidden_layers=1)
    before = live_bytes()
    llm = LLM(model, **SETTINGS, num_pages=400)
    pools = llm.engine.config.num_pages * 16 * 2 * 2 * 8 * 4
    generate(llm, simple_requests(4, 97))
    awake = live_bytes()
    assert awake - before > pools
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    llm.sleep(1, ["kv_cache"])
    assert live_bytes() <= awake - pools
    llm.wake_up()
    assert awake - pools < live_bytes() <= awake
    del model
    llm.sleep(2)
    assert live_bytes() <= awake - pools - weights
    with pytest.raises(WeightsError):
        llm.update_weights({})
    llm.wake_up()
    with pytest.raises(RequestError):
        llm.resume()
    with pytest.raises(WeightsError) as refused:
        llm.update_weights({"final_norm": {"scale": np.ones(32, np.float32)}}, partial=True)
    assert refused.value.field == "partial"
    llm.update_weights(random_model(num_hidden_layers=1).params)
    generate(llm, simple_requests(4, 97))
    assert live_bytes() <= awake


def test_a_hundred_naps_leave_nothing_behind(tiny):
    model = tiny[0]
    llm = LLM(model, **SETTINGS)
    request = (list(range(9)), SamplingParams(temperature=0.0, max_tokens=8))
    expected, size = bits(generate(llm, [request])[0]), live_bytes()
    with count_compilations() as compilations:
        for turn in range(100):
            llm.sleep(1 + turn % 2)
            llm.wake_up()
            if turn % 2:
                llm.update_weights(model.params)
            assert bits(generate(llm, [request])[0]) == expected
    assert compilations.count == 0
    assert live_bytes() <= size
    assert llm.engine.pace is Pace.RUNNING


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda llm: llm.sleep(3), "level"),
        (lambda llm: llm.sleep(True), "level"),
        (lambda llm: llm.sleep(1, ["pages"]), "tags"),
        (lambda llm: llm.wake_up(["pages"]), "tags"),
        (lambda llm: llm.pause("later"), "mode"),
        (lambda llm: llm.update_weights({}, mode="later"), "mode"),
    ],
)
def test_wrong_arguments(checked, call, field):
    with pytest.raises(RequestError) as refused:
        call(checked)
    assert refused.value.field == field
    assert checked.engine.pace is Pace.RUNNING
