"""Programs with adapters compute each row with its own adapter, are batch-invariant, and need no compilation."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution import commands
from jaxinfer.engine.execution.commands import DecodeBatch, Executor, PrefillBatch
from jaxinfer.engine.execution.executor import LocalExecutor
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.engine.execution.placement import targets_of
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.engine.execution.runner import Runner
from jaxinfer.engine.execution.stages import Stage
from jaxinfer.engine.scheduling.plan import StepPlan
from jaxinfer.kv.transfer import TRANSFERS
from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.lora.parts import parts
from jaxinfer.models.model import Model, abstract
from jaxinfer.parallel import messages
from jaxinfer.parallel.mesh import mesh_for
from jaxinfer.weights import init_params
from tests.fakes import llama_json, random_model

ROWS, PAGE, WIDTH, CHUNK = 4, 16, 2, 16
CONFIG = EngineConfig(
    max_num_seqs=ROWS,
    max_model_len=PAGE * WIDTH,
    prefill_sizes=(CHUNK,),
    page_size=PAGE,
    num_pages=ROWS * WIDTH,
    enable_lora=True,
    max_loras=3,
    max_lora_rank=4,
    structured_output_helpers=0,
)
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def mixtral(dtype: str) -> Model:
    model = abstract(llama_json(**MIXTRAL), dtype)
    params = init_params(model.specs, 0, dtype)
    return model.replace(params=jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, params))


class Device:
    """An executor with two adapters in its banks."""

    def __init__(self, model: Model, slots: tuple[int, int] = (0, 2)) -> None:
        mesh = mesh_for(CONFIG)
        prepared = prepare(model, CONFIG, "cpu", mesh)
        self.model, self.engine, _ = prepared
        self.executor = LocalExecutor(prepared, mesh)
        self.targets = targets_of(Stage(self.model), self.engine)
        self.adapters = [self.drawn(seed) for seed in (1, 2)]
        for slot, adapter in zip(slots, self.adapters, strict=True):
            self.load(slot, adapter)

    def drawn(self, seed: int) -> Adapter:
        rng, deltas = np.random.default_rng(seed), {}
        for path, target in self.targets.items():
            arrays = {name: rng.normal(0, 0.15, shape).astype(np.float32) for name, shape in target.shapes.items()}
            arrays["magnitude"] += 1.0
            deltas[path] = Delta(**arrays)
        return Adapter(str(seed), 4, deltas)

    def load(self, slot: int, adapter: Adapter) -> None:
        for part, arrays in enumerate(parts(adapter, self.targets)):
            self.executor.run(commands.LoadLora(slot, part, arrays))

    def generate(self, prompts: np.ndarray, loras: list[int], steps: int = 4) -> np.ndarray:
        """Return greedy tokens [steps, rows] after prompts [rows, tokens]; ``loras``: LoRA slot of each row."""
        length, tables = prompts.shape[1] - 1, np.arange(ROWS * WIDTH, dtype=np.int32).reshape(1, ROWS, WIDTH)
        for row, lora in enumerate(loras):
            chunk = np.zeros((1, CHUNK), np.int32)
            chunk[0, :length] = prompts[row, :-1]
            first = np.zeros(1, np.int32), np.int32([length]), tables[:, row : row + 1]
            self.executor.run(commands.Prefill(PrefillBatch(chunk, *first, loras=np.int32([lora]))))
        found, tokens = [], np.int32(prompts[:, -1])
        for step in range(steps):
            positions, generated = np.full(ROWS, length + step, np.int32), np.full(ROWS, step, np.int32)
            batch = DecodeBatch(tokens, positions, generated, tables, loras=np.int32(loras))
            found.append(np.asarray(self.executor.run(commands.Decode(0, batch)).tokens))
            tokens = np.full(ROWS, -1, np.int32)
        return np.array(found)

    def cache(self) -> np.ndarray:
        """Return the bytes of all pages, by row."""
        ids = np.arange(ROWS * WIDTH, dtype=np.int32).reshape(-1, 1, TRANSFERS[0])
        found = np.concatenate([self.executor.run(commands.ReadPages(some)) for some in ids])
        return found.reshape(ROWS, WIDTH * PAGE, -1)[:, :12]


@functools.cache
def device(kind: str) -> Device:
    return Device(mixtral("float32") if kind == "mixtral" else random_model(kind))


PROMPTS = np.random.default_rng(0).integers(97, size=(ROWS, 9))


def greedy(model: Model, prompt: np.ndarray, steps: int = 4) -> list[int]:
    tokens = list(prompt)
    for _ in range(steps):
        tokens.append(int(model(jnp.asarray([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["float32", "mixtral"])
def test_rows_say_what_the_model_says_with_their_adapters(kind):
    one = device(kind)
    loras = [2, -1, 0, 2]
    models = {-1: one.model, 0: one.model.with_lora(one.adapters[0]), 2: one.model.with_lora(one.adapters[1])}
    want = [greedy(models[lora], prompt) for lora, prompt in zip(loras, PROMPTS, strict=True)]
    with count_compilations() as compilations:
        found = one.generate(PROMPTS, loras)
    assert found.T.tolist() == want
    assert compilations.count == 0
    assert want[0] != greedy(one.model, PROMPTS[0])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "mixtral"])
def test_rows_keep_their_bits_in_mixed_batches(kind):
    one, same = device(kind), np.repeat(PROMPTS[:1], ROWS, axis=0)
    plain = [one.generate(same, [-1] * ROWS), one.cache()]
    alone = [one.generate(same, [0] * ROWS), one.cache()]
    mixed = [one.generate(same, [0, -1, 2, 0]), one.cache()]
    for row, want in ((0, alone), (1, plain), (3, alone)):
        np.testing.assert_array_equal(mixed[0][:, row], want[0][:, row])
        np.testing.assert_array_equal(mixed[1][row], want[1][row])
    assert (mixed[1][2] != alone[1][2]).any()


def test_an_adapters_slot_and_what_was_there_change_nothing():
    one = device("float32")
    want = [one.generate(PROMPTS, [0] * ROWS), one.cache()]
    with count_compilations() as compilations:
        one.load(1, one.drawn(7))
        one.load(1, one.adapters[0])
    assert compilations.count == 0
    found = [one.generate(PROMPTS, [1] * ROWS), one.cache()]
    np.testing.assert_array_equal(found[0], want[0])
    np.testing.assert_array_equal(found[1], want[1])
    one.load(1, Adapter("nothing", 1, {}))
    np.testing.assert_array_equal(one.generate(PROMPTS, [1] * ROWS), one.generate(PROMPTS, [-1] * ROWS))


def test_logprobs_of_prompts_are_those_of_the_model_with_its_adapter():
    one = device("float32")
    chunk, length = np.zeros((1, CHUNK), np.int32), PROMPTS.shape[1]
    chunk[0, :length] = PROMPTS[0]
    following = np.roll(chunk[0], -1)
    batch = PrefillBatch(
        chunk, np.zeros(1, np.int32), np.int32([length]), np.arange(2, dtype=np.int32).reshape(1, 1, 2)
    )
    found = one.executor.run(commands.PrefillLogprobs(batch._replace(loras=np.int32([2])), following))
    want = jax.nn.log_softmax(one.model.with_lora(one.adapters[1])(jnp.asarray(PROMPTS[:1]))[0])
    chosen = np.asarray(want)[np.arange(length - 1), following[: length - 1]]
    np.testing.assert_allclose(
        np.asarray(found.logprobs.logprob)[: length - 1], chosen, atol=1e-5 * np.abs(chosen).max()
    )


def test_a_plan_loads_before_its_programs():
    one, seen = device("float32"), list[commands.Command]()

    class Listening(Executor):
        def run(self, command):
            seen.append(command)

        def wait(self): ...

        def temporaries(self):
            return 0

        def digest(self):
            return None

    limits, tables = prepare(random_model(), CONFIG, "cpu").limits, np.zeros((1, ROWS, WIDTH), np.int32)
    runner = Runner(Listening(), one.engine, limits, tables, 97, {}, one.engine.decode_sizes)
    arrays = parts(one.adapters[0], one.targets)[0]
    runner.launch(StepPlan(loads=[(1, 0, arrays)]))
    (command,) = seen
    assert isinstance(command, commands.LoadLora)
    assert (command.slot, command.part, command.arrays) == (1, 0, arrays)


def test_banks_count_in_the_memory_plan():
    model = random_model()
    plain, own = (plan_engine(model, one, "cpu").needs for one in (EngineConfig(**changed(enable_lora=False)), CONFIG))
    banks = device("float32").executor.runtimes[0].banks
    assert own.adapters == sum(array.nbytes for array in jax.tree.leaves(banks)) > 0
    assert plain.adapters == 0
    assert own.weights == plain.weights


def test_tables_count_where_they_are_named_and_cost_nothing_else():
    model, named = random_model(tie_word_embeddings=True), ("all-linear", "embed_tokens", "lm_head")
    needs = [
        plan_engine(model, EngineConfig(**changed(lora_target_modules=modules)), "cpu").needs.adapters
        for modules in (named[:1], named[:2], named)
    ]
    vocab, width, rank, slots = model.config.vocab_size, model.config.hidden_size, 4, 3
    factors = 4 * slots * rank * (vocab + width)
    assert needs[1] - needs[0] == factors + 4 * slots * 2 * width
    assert needs[2] - needs[1] == factors + 4 * slots * 2 * vocab


def changed(**changes):
    return {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__} | changes


def test_a_load_crosses_to_another_process_as_it_is():
    arrays = {"layers_0/mlp/down:a": np.ones((2, 3), np.float32)}
    fields, sent = messages.encode(commands.LoadLora(2, 1, arrays))
    received = messages.decode(commands.LoadLora, json.loads(json.dumps(fields)), sent)
    assert (received.slot, received.part, received.arrays.keys()) == (2, 1, arrays.keys())
    np.testing.assert_array_equal(received.arrays["layers_0/mlp/down:a"], arrays["layers_0/mlp/down:a"])
