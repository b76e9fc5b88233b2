"""The public API of `LLM`."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import loading
from jaxinfer.compilations import count_compilations
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.llm import LLM, _with_settings
from jaxinfer.quant import is_stored
from jaxinfer.sampling_params import QueueFullError, RequestError, SamplingParams
from jaxinfer.text.chat_template import ChatTemplate
from tests.fakes import mixed_params, random_model
from tests.serve.fake_engine import VOCAB, fake_tokenizer
from tests.text.test_contents import NOT_TEXT

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(random_model(), max_num_seqs=4, prefill_sizes=(16, 64), max_model_len=200)


def teacher_forced(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return the log probabilities [positions, vocab] of the uncached forward pass."""
    logits = llm.model.apply(llm.model.params, jnp.array([ids]))[0]
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 64, 65, 66, 130, 150])
def test_served_logprobs_equal_apply(llm, length):
    prompt = np.random.default_rng(length).integers(0, 97, length).tolist()
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, logprobs=5, prompt_logprobs=3)
    output = llm.generate([prompt], params)[0]
    sample = output.outputs[0]
    want = teacher_forced(llm, prompt + sample.token_ids)
    for step, (token, got) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        row = want[length - 1 + step]
        assert got.keys() >= {token}
        assert {t for t, c in got.items() if c.rank <= 5} >= set(np.flatnonzero(row > np.sort(row)[-5] + 2e-5).tolist())
        for candidate, (logprob, rank, _) in got.items():
            assert abs(logprob - row[candidate]) <= 1e-5
            assert (row > row[candidate] + 2e-5).sum() < rank <= 1 + (row > row[candidate] - 2e-5).sum()
    assert sample.cumulative_logprob == pytest.approx(
        sum(c[t].logprob for t, c in zip(sample.token_ids, sample.logprobs, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == length
    for position, got in enumerate(output.prompt_logprobs[1:], start=1):
        assert abs(got[prompt[position]].logprob - want[position - 1, prompt[position]]) <= 1e-5


def test_greedy_equals_apply_step_by_step(llm):
    ids = [3, 1, 4, 1, 5]
    for _ in range(12):
        ids.append(int(teacher_forced(llm, ids)[-1].argmax()))
    assert llm.generate([ids[:5]], GREEDY)[0].outputs[0].token_ids[:12] == ids[5:]


def test_nothing_compiles_while_serving(llm):
    rng = np.random.default_rng(0)
    llm.generate([[1]], GREEDY)
    with count_compilations() as seen:
        for _ in range(10):
            prompts = [rng.integers(0, 97, n).tolist() for n in rng.integers(1, 150, 20)]
            llm.generate(prompts, [mixed_params(int(i), n=1 + int(i) % 2) for i in rng.integers(0, 1000, 20)])
    assert seen.count == 0


def test_the_guard_sees_a_compilation():
    with count_compilations() as seen:
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
    assert seen.count >= 1


def test_streamed_tokens_are_the_result(llm):
    deltas = []
    outputs = llm.generate([[1, 2], [3, 4, 5]], SamplingParams(n=2, seed=1, max_tokens=9), on_delta=deltas.append)
    for at, output in enumerate(outputs):
        for sample in output.outputs:
            mine = [d for d in deltas if (d.request, d.index) == (at, sample.index)]
            assert [token for d in mine for token in d.token_ids] == sample.token_ids
            assert [d.finish_reason for d in mine] == [None] * (len(mine) - 1) + ["length"]


def test_stop_tokens_end_a_sequence(llm):
    free = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0]
    third = free.token_ids[2]
    first = free.token_ids.index(third)
    params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[third])
    stopped = llm.generate([[1, 2, 3]], params)[0].outputs[0]
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", third)
    later = llm.generate(
        [[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=20, min_tokens=8, stop_token_ids=[third])
    )
    assert third not in later[0].outputs[0].token_ids[:8]


def test_more_requests_than_slots_and_pages():
    model = random_model()
    small = LLM(model, max_num_seqs=3, num_pages=5, page_size=16, max_model_len=64)
    prompts = [[i, i + 1, i + 2] * (1 + i % 9) for i in range(20)]
    got = small.generate(prompts, GREEDY)
    small.engine.check()
    for prompt, output in zip(prompts, got, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == small.generate([prompt], GREEDY)[0].outputs[0].token_ids


def test_the_context_limits_the_output(llm):
    output = llm.generate([[7] * 195], SamplingParams(temperature=0.0, max_tokens=None))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (5, "length")


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt_token_ids is empty"),
        ([97], GREEDY, "prompt_token_ids: 97"),
        ([1] * 200, GREEDY, "200 tokens"),
        ("text", GREEDY, "no tokenizer"),
        ([1], SamplingParams(logprobs=21), "logprobs=21"),
        ([1], SamplingParams(logit_bias={97: 1.0}), "logit_bias key: 97"),
        ([1], SamplingParams(bad_words=["x"]), "no tokenizer"),
    ],
)
def test_bad_requests_disturb_nobody(llm, prompt, params, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([[1, 2, 3], prompt], [GREEDY, params])
    assert not llm.engine.has_work
    llm.engine.check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 300}, "max_model_len = 300 is beyond the model's context of 256"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"page_size": 24}, "page_size = 24"),
        ({"num_pages": 2}, "num_pages = 2 must hold one sequence"),
        ({"max_num_batched_tokens": 50}, "max_num_batched_tokens = 50"),
        ({"prefill_sizes": (32, 16)}, "prefill_sizes"),
        ({"memory_utilization": 0.0}, "memory_utilization = 0.0"),
        ({"memory_utilization": 1.5}, "memory_utilization = 1.5"),
        ({"memory_utilization": 1e-9}, "weights .* sequence of 256 tokens .*memory_utilization"),
        ({"num_pages": 10**9}, "num_pages = 1000000000 .* GiB .*memory_utilization"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy = lifo must be one of fcfs, priority, fair"),
        ({"exactness": "mostly"}, "exactness = mostly"),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_max = 2"),
        ({"swap_space_gib": -1.0}, "swap_space_gib = -1.0"),
        ({"typical_threshold": 1.5}, "typical_threshold = 1.5"),
        ({"typical_alpha": float("nan")}, "typical_alpha = nan"),
    ],
)
def test_bad_settings_name_the_setting(changes, message):
    with pytest.raises(EngineConfigError, match=message):
        LLM(random_model(), **changes)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_num_seq", "LLM has no setting max_num_seq: did you mean max_num_seqs?"),
        (
            "tokenizer_path",
            "LLM has no setting tokenizer_path: a model is one folder, with its tokenizer: "
            "copy the files of another tokenizer into it",
        ),
        ("xyzzy", "LLM has no setting xyzzy: docs/settings.md lists them"),
    ],
)
def test_an_unknown_setting_is_an_error_with_the_nearest_name(name, said):
    with pytest.raises(TypeError) as refused:
        LLM("demo-draft", **{name: 3})
    assert str(refused.value) == said


def test_prompts_are_text_or_ids(llm):
    for prompts in (5, None):
        with pytest.raises(RequestError, match=r"^prompts=.* must be a text, a list of token ids, or a list of these"):
            llm.generate(prompts)


def test_a_prompt_that_is_refused_is_told_by_its_place(llm):
    with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt_token_ids has 300 tokens") as refused:
        llm.generate([[1], [1] * 300, [2]])
    assert refused.value.field == "prompts"
    with pytest.raises(RequestError, match=r"^prompt_token_ids has 300 tokens"):
        llm.generate([1] * 300)


def test_settings_stand_above_the_configuration():
    base = EngineConfig(max_num_seqs=3, max_model_len=64, page_size=16)
    config = _with_settings(base, {"max_num_seqs": 2, "prefill_sizes": [16]})
    assert config == EngineConfig(max_num_seqs=2, max_model_len=64, page_size=16, prefill_sizes=(16,))


def test_settings_may_have_the_names_of_other_engines():
    """The first line is what people type for vLLM; ``speculative_model`` alone means a draft model."""
    typed = {"gpu_memory_utilization": 0.9, "block_size": 16, "swap_space": 4, "enable_prefix_caching": True}
    typed |= {"max_num_batched_tokens": 4096, "tensor_parallel_size": 1, "trust_remote_code": True}
    config = _with_settings(EngineConfig(), {**typed, "speculative_model": "x", "num_speculative_tokens": 5})
    assert config == EngineConfig(
        memory_utilization=0.9,
        page_size=16,
        swap_space_gib=4,
        max_num_batched_tokens=4096,
        speculative="draft_model",
        speculative_model="x",
        num_speculative_tokens=5,
    )


@pytest.mark.parametrize("settings", [{"block_size": 16, "page_size": 32}, {"enable_chunked_prefill": False}])
def test_a_setting_of_another_engine_that_cannot_be_taken_over_is_rejected(settings):
    with pytest.raises(EngineConfigError) as refused:
        LLM("demo-draft", **settings)
    assert next(iter(settings)) in str(refused.value)


def test_a_full_queue_takes_all_prompts_or_none(llm, monkeypatch):
    scheduler = llm.engine._scheduler
    limited = dataclasses.replace(scheduler._engine, max_waiting_requests=2)
    monkeypatch.setattr(scheduler, "_engine", limited)
    with pytest.raises(QueueFullError, match="max_waiting_requests = 2"):
        llm.generate([[1], [2], [3]], GREEDY)
    assert not llm.engine.has_work
    assert len(llm.generate([[1], [2]], GREEDY)) == 2


def test_an_interrupted_run_leaves_nothing_behind(llm):
    class Interrupt(Exception):
        pass

    def interrupt(delta):
        raise Interrupt

    with pytest.raises(Interrupt):
        llm.generate([[1, 2, 3]] * 6, GREEDY, on_delta=interrupt)
    assert not llm.engine.has_work
    llm.engine.check()


def test_an_edited_model_is_served_as_it_is(llm):
    model = llm.model
    down = model.params["layers_1"]["mlp"]["down"]
    layer = {**model.params["layers_1"], "mlp": {**model.params["layers_1"]["mlp"], "down": jnp.zeros_like(down)}}
    edited = model.replace(params={**model.params, "layers_1": layer})
    other = LLM(edited, max_num_seqs=2, prefill_sizes=(16, 64))
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)
    sample = other.generate([[1, 2, 3]], params)[0].outputs[0]
    want = teacher_forced(other, [1, 2, 3, *sample.token_ids])
    for step, (token, got) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        assert abs(got[token].logprob - want[2 + step, token]) <= 1e-5
    assert sample.token_ids != llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids  # the edit changes the output


@pytest.mark.parametrize("prompts", [[[1], [2, 3], [97]], [[1], [2, 3], []]])
def test_the_error_of_one_prompt_among_several_says_which_it_is(llm, prompts):
    with pytest.raises(RequestError, match=r"^prompts\[2\]: prompt_token_ids") as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.field == "prompts"
    with pytest.raises(RequestError, match=r"^prompt_token_ids"):
        llm.generate(prompts[2:], GREEDY)


def test_scores_are_the_log_probabilities_of_apply(llm):
    context, continuations = [3, 1, 4], [[1, 5], [9, 2, 6], [5]]
    for ids, score in zip(continuations, llm.score(context, continuations), strict=True):
        want = teacher_forced(llm, context + ids)
        chosen = [want[len(context) - 1 + place, token] for place, token in enumerate(ids)]
        assert score.token_ids == ids
        assert [position[token].logprob for token, position in zip(ids, score.logprobs, strict=True)] == pytest.approx(
            chosen, abs=1e-5
        )
        assert score.logprob == pytest.approx(sum(chosen), abs=1e-4)
    greedy = llm.generate([context], GREEDY)[0].outputs[0].token_ids[:4]
    other = [*greedy[:3], (greedy[3] + 1) % 97]
    assert [score.is_greedy for score in llm.score(context, [greedy, other])] == [True, False]


@pytest.mark.parametrize(
    ("prompt", "continuations", "message"),
    [
        ([], [[1]], r"^prompt is empty"),
        ([1], [[2], []], r"^continuations\[1\] is empty"),
        ([1], [[2], [97]], r"^continuations\[1\]: prompt_token_ids: 97"),
        ([1], [[2], [3] * 200], r"^continuations\[1\]: prompt_token_ids has 201 tokens"),
        ([1], "text", r"^continuations is a text, and must be a list"),
        ("text", [[1]], r"^prompt is text, but the model has no tokenizer"),
    ],
)
def test_bad_scores_name_what_is_wrong(llm, prompt, continuations, message):
    with pytest.raises(RequestError, match=message):
        llm.score(prompt, continuations)
    assert not llm.engine.has_work


def test_default_sampling_has_two_names(llm):
    assert LLM.get_default_sampling_params is LLM.default_sampling_params
    assert llm.get_default_sampling_params(top_k=3) == SamplingParams(top_k=3)


def test_an_llm_and_its_results_show_themselves_in_few_lines(llm):
    shown = "random: Llama, 21.7K parameters, float32, 2 layers, 1 device"
    assert repr(llm) == f"<LLM {shown}; 4 sequences of up to 200 tokens, 1024 tokens of KV cache>"
    output = llm.generate([[7] * 150], SamplingParams(temperature=0.0, max_tokens=40, logprobs=5, seed=1))[0]
    assert "prompt_token_ids=[7, 7, 7, 7, 7, 7, 7, 7, ... 150 in all]" in repr(output)
    assert "token_ids=[" in repr(output.outputs[0])
    assert len(repr(output)) < 4000


def test_a_bar_counts_the_prompts_that_are_done(llm, capsys):
    for asked in ({}, {"progress": False}, {"use_tqdm": False}, {"progress": True, "on_delta": lambda _: None}):
        llm.generate([[1], [2], [3]], SamplingParams(max_tokens=2, n=2), **asked)
        assert ("3/3" in capsys.readouterr().err) == asked.get("progress", False)
    llm.generate([[1], [2]], GREEDY, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_a_closed_llm_gives_its_memory_back_and_says_so():
    model, before = random_model(), None
    few = {"max_num_seqs": 2, "num_pages": 16, "page_size": 16, "prefill_sizes": (16,)}
    LLM(model, **few).close()
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    with LLM(model, **few) as llm:
        llm.generate([[1, 2, 3]], GREEDY)
        assert sum(array.nbytes for array in jax.live_arrays() if id(array) not in before) > 0
    assert [array.shape for array in jax.live_arrays() if id(array) not in before] == []
    assert repr(llm) == "<LLM: closed>"
    with pytest.raises(RuntimeError, match="this LLM is closed: make another one"):
        llm.generate([[1]], GREEDY)
    llm.close()
    assert float(model(jnp.array([[1, 2]])).sum()) != 0  # the caller's model stays valid


def test_a_reset_forgets_cached_pages(llm):
    prompt, params = [7] * 150, SamplingParams(temperature=0.0, max_tokens=2)
    known, hits = [], []
    for _ in range(2):
        known.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    hits.append(llm.engine.stats().prefix_hits)
    assert llm.reset_prefix_cache() > 0
    assert llm.reset_prefix_cache() == 0
    known.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    hits.append(llm.engine.stats().prefix_hits)
    assert known == known[:1] * 3
    assert hits[0] == hits[1] > 0


@pytest.mark.parametrize("speculative", [None, "draft_model"])
def test_weights_as_some_cpus_like_them_are_the_same_function(monkeypatch, speculative):
    answers, lying = {}, {None: [], "in last": ["down"], "in first": ["gate_up"]}
    for layout, stored in lying.items():
        monkeypatch.setattr(loading, "layout_for_cpu", lambda *_, layout=layout: layout)
        with LLM("demo", "float32", max_num_seqs=2, max_model_len=128, speculative=speculative) as llm:
            assert [name for name, weight in llm.model.params["layers_0"]["mlp"].items() if is_stored(weight)] == stored
            answers[layout] = llm.generate(
                ["ROMEO:", "To be"], SamplingParams(temperature=0.0, max_tokens=24, logprobs=1)
            )
            if layout:
                ids = [*answers[layout][0].prompt_token_ids, *answers[layout][0].outputs[0].token_ids]
                assert teacher_forced(llm, ids).shape[0] == len(ids)
    for layout in ("in last", "in first"):
        for plain, turned in zip(answers[None], answers[layout], strict=True):
            assert plain.outputs[0].token_ids == turned.outputs[0].token_ids
            assert plain.outputs[0].cumulative_logprob == pytest.approx(turned.outputs[0].cumulative_logprob, abs=1e-4)


def test_a_single_sequence_in_16_bits_is_a_row_of_its_own():
    """Matrices are stored inputs first, and logprobs are near those of an engine with two rows."""
    prompt, params = "ROMEO:", SamplingParams(temperature=0.0, max_tokens=24, logprobs=1)
    found = []
    for most in (1, 2):
        with LLM("demo", "bfloat16", max_num_seqs=most, max_model_len=128, show_progress=False) as llm:
            assert llm.engine.config.rows == most
            assert is_stored(llm.model.params["layers_0"]["mlp"]["gate_up"]) is (most == 1)
            found.append(llm.generate([prompt], params)[0].outputs[0])
    alone, beside = found
    assert alone.token_ids[:4] == beside.token_ids[:4]
    first = [output.logprobs[0][output.token_ids[0]].logprob for output in found]
    assert first[0] == pytest.approx(first[1], abs=0.05)


def test_conversations_are_text_and_nothing_else():
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    model = random_model(vocab_size=VOCAB).replace(tokenizer=fake_tokenizer(), chat_template=template)
    talker = LLM(model, max_num_seqs=1, prefill_sizes=(64,), max_model_len=64)
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    outputs = talker.chat(
        [
            [{"role": "user", "content": parts}],
            [{"role": "system", "content": None}, called, {"role": "tool", "content": None}],
        ],
        SamplingParams(max_tokens=1),
    )
    shown = [talker.tokenizer.decode(output.prompt_token_ids) for output in outputs]
    assert shown == ["[user]a\nb", "[system][assistant][tool]"]
    for content, where in NOT_TEXT:
        with pytest.raises(RequestError) as refused:
            talker.chat([{"role": "user", "content": "a"}, {"role": "user", "content": content}])
        assert f"messages[1]{where}".startswith(refused.value.place)  # a text model refuses a whole video
    with pytest.raises(RequestError) as refused:
        talker.chat([[{"role": "user", "content": "a"}], ["nonsense"]])
    assert refused.value.place == "messages[1][0]"
    with pytest.raises(RequestError) as refused:
        talker.chat([[{"role": "user", "content": "a"}], 3])
    assert refused.value.place == "messages[1]"
