"""`LLM`: offline inference with the engine in this process, with text in and text out."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import rich.console
import rich.progress
import rich.text

from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.config.aliases import SettingNameError, advice, our_settings
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.execution.on_policy import ServedPrograms
from jaxinfer.engine.scheduling.usage import Usage
from jaxinfer.images.expansion import for_vocabulary, place_images
from jaxinfer.images.prompts import HeldImage, ImagePrompt, bare_prompt, image_prompt, with_timestamps
from jaxinfer.loading import start_engine
from jaxinfer.lora.door import LoRAChoice, LoRAFrontend
from jaxinfer.models.model import Model
from jaxinfer.outputs import Collector, Delta, RequestOutput, Score, score_of
from jaxinfer.parsers.registry import detect
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.served import ServedModel, WeightFrontend, copied_arrays
from jaxinfer.structured.grammar import require_compiled
from jaxinfer.text.contents import messages_of, with_images
from jaxinfer.text.intake import AnyPrompt, Intake, Prompt, as_prompts, recommended_sampling
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import FinishReason, PlacedImage, Request, SequenceDelta

# Fields of a request that hold the prompt itself, as text or as tokens, and its images.
_OF_ONE_PROMPT = ("prompt", "prompt_token_ids", "images", "videos", "multi_modal_data")


class LLM(LoRAFrontend, WeightFrontend):
    """A model ready to generate: ``with LLM(...) as llm:``, or until `close`.

    Args:
        model: "demo", a folder, a hub id, or a `Model`, which is served exactly as it is.
        dtype: see `load_model`; for a `Model`, "auto" keeps its dtype, any other value casts its parameters.
        family, chat_template: see `load_model`.
        config: the engine's settings.
        settings: fields of `EngineConfig` by name, overriding ``config``: max_model_len, max_num_seqs, num_pages, ...
        check_finite: reject weights with NaN or infinity.
        copy: serve a copy of a `Model`'s parameters, which a program that donates them may then delete.
        compilation_cache_dir: where compiled programs are kept between runs; "" keeps none.

    Raises:
        CheckpointError, ConfigError, TokenizerError, TemplateError, EngineConfigError: one sentence with the reason. A
            model that does not fit into memory is rejected before the weights are loaded.
        ValueError: parameters of a `Model` do not match its specs; names the first.
        TypeError: ``settings`` has a name that is neither of `EngineConfig` nor of another engine (docs/cli.md);
            suggests a similar one.
    """

    def __init__(
        self,
        model: str | Model,
        dtype: str = "auto",
        *,
        family: str = "auto",
        chat_template: str | None = None,
        config: EngineConfig | None = None,
        check_finite: bool = False,
        copy: bool = False,
        compilation_cache_dir: str | None = None,
        show_progress: bool = True,
        **settings: Any,
    ) -> None:
        shares = isinstance(model, Model) and not copy
        if isinstance(model, Model) and copy:
            model = model.replace(params=copied_arrays(model.params))
        loaded, engine = start_engine(
            model,
            _with_settings(config or EngineConfig(), settings),
            dtype,
            family=family,
            chat_template=chat_template,
            check_finite=check_finite,
            compilation_cache_dir=compilation_cache_dir,
            show_progress=show_progress,
        )
        self._served: ServedModel[EngineCore] | None
        self._served = ServedModel(loaded, engine, shares=shares, check_finite=check_finite)
        served, longest = self.model, self.engine.config.max_model_len
        parsers = detect("\n".join(served.chat_template.sources.values()) if served.chat_template is not None else "")
        self._intake = Intake(served.tokenizer, served.config.vocab_size, longest, self.engine.limits, parsers.thought)
        self._ids = itertools.count()

    def __repr__(self) -> str:
        if self._served is None:
            return "<LLM: closed>"
        config, shown = self.engine.config, repr(self.model).removeprefix("<Model").removesuffix(">")
        room = f"{config.num_pages * config.page_size} tokens of KV cache"
        return f"<LLM{shown}; {config.max_num_seqs} sequences of up to {config.max_model_len} tokens, {room}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory of weights, KV cache and programs. A `Model` that was passed in keeps its arrays."""
        self._served = None
        gc.collect()  # an engine and its callbacks refer to each other

    @property
    def model(self) -> Model:
        return self._open().model

    @property
    def engine(self) -> EngineCore:
        return self._open().engine

    @property
    def served(self) -> ServedModel[EngineCore]:
        """The model and its engine, whose weights and memory change between two steps."""
        return self._open()

    def _open(self) -> ServedModel[EngineCore]:
        if self._served is None:
            raise RuntimeError("this LLM is closed: make another one")
        return self._served

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.tokenizer

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the sampling parameters of the checkpoint's generation_config.json, overridden by ``changes``."""
        return SamplingParams(**{**recommended_sampling(self.model.generation_config), **changes})

    get_default_sampling_params = default_sampling_params  # vLLM's name

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: LoRAChoice | Sequence[LoRAChoice] = None,
        on_delta: Callable[[Delta], None] | None = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; results are in the order of the prompts.

        A prompt is text, a list of token ids or, with images, ``{"prompt": ..., "images": [...]}``, in whose text or
        ``prompt_token_ids`` each image is one placeholder. An image is a path, the bytes of a file, a data URL, a
        Pillow image or an array; ``videos`` are lists of such frames (docs/images.md).

        Args:
            sampling_params: one for all, or one for each prompt (default: the checkpoint's recommendation).
            lora: the adapter for all, or one (or None) for each prompt; a string names a loaded adapter.
            on_delta: called with each delta as it is generated.
            progress: draw a bar on stderr: prompts done, and tokens a second. None: if stderr is a terminal or in a
                notebook, unless there is ``on_delta``.
            use_tqdm: vLLM's name of ``progress``.

        Raises:
            RequestError: a prompt or a parameter is rejected, naming field and value; nothing is generated then.
            LoRAError: an adapter cannot be read.
        """
        asked = use_tqdm if progress is None else progress
        return self._generate(prompts, sampling_params, on_delta, asked, lora)

    def _generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt] | Sequence[ImagePrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        on_delta: Callable[[Delta], None] | None,
        asked: bool | None,
        lora: LoRAChoice | Sequence[LoRAChoice],
        *,
        answers: bool = False,
    ) -> list[RequestOutput]:
        """Implement `generate`. ``answers``: the prompts are conversations."""
        listed, requests = self.prepare(prompts, sampling_params, lora, answers=answers)
        show = False if asked is None and on_delta is not None else asked
        with prompts_bar(len(listed), show) as count:

            def told(delta: Delta, whole: RequestOutput) -> None:
                count(len(delta.token_ids), int(delta.finish_reason is not None and whole.finished))
                if on_delta is not None:
                    on_delta(delta)

            return self._run(listed, requests, told)

    def prepare(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt] | Sequence[ImagePrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora: LoRAChoice | Sequence[LoRAChoice] = None,
        *,
        answers: bool = False,
    ) -> tuple[list[Prompt | ImagePrompt], list[Request]]:
        """Return the prompts of `generate`, one by one, and a checked request for each, without running them.

        Args:
            answers: the prompts are conversations.
        """
        listed = [image_prompt(each) if isinstance(each, Mapping) else each for each in as_prompts(prompts)]
        made = self._requests("prompts", listed, self._params_for(listed, sampling_params), answers)
        return listed, self._adapted(made, lora)

    def _run(
        self,
        prompts: Sequence[Prompt | ImagePrompt],
        requests: Sequence[Request],
        told: Callable[[Delta, RequestOutput], None] = lambda delta, whole: None,
    ) -> list[RequestOutput]:
        self._open().require_running()
        run = _Run(self.engine, self.tokenizer, list(map(bare_prompt, prompts)), requests)
        try:
            for delta, whole in run:
                told(delta, whole)
        finally:
            run.abort()
        return run.outputs

    def served_programs(self) -> ServedPrograms:
        """Return what `Model.logprobs` needs to know of the engine; a static argument of `jax.jit`."""
        programs: ServedPrograms = self.engine.served_programs()
        return programs

    def memory(self) -> Usage:
        """Return the memory of the devices in bytes: by weights, KV cache, states, adapters and programs' temporaries,
        and what JAX's allocator and the driver report; also the time in which they had steps to compute."""
        return self.engine.usage()

    def reset_prefix_cache(self) -> int:
        """Drop every cached page; return their number."""
        return self.engine.reset_prefix_cache()

    def score(self, prompt: Prompt, continuations: Sequence[Prompt], *, lora: LoRAChoice = None) -> list[Score]:
        """Return log-probabilities, under the raw logits, of continuations (text or token ids) of the same prompt.

        Texts are tokenised separately: a continuation keeps its leading space.

        Args:
            lora: the adapter of the model that scores; a string names a loaded adapter.

        Raises:
            RequestError: prompt or continuations are rejected, naming field and value.
            LoRAError: the adapter cannot be read.
        """
        if isinstance(continuations, str):
            raise RequestError("continuations", "is a text, and must be a list of them")
        context = self._token_ids("prompt", prompt, add_special_tokens=True)
        listed = [self._token_ids(f"continuations[{rank}]", each) for rank, each in enumerate(continuations)]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        whole = [[*context, *ids] for ids in listed]
        made = self._requests("continuations", whole, [params] * len(whole))
        outputs = self._run(whole, self._adapted(made, lora))
        return [score_of(ids, output) for ids, output in zip(listed, outputs, strict=True)]

    def logprobs(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        completions: Prompt | Sequence[Prompt],
        *,
        lora: LoRAChoice | Sequence[LoRAChoice] = None,
    ) -> list[np.ndarray]:
        """Return the log-probabilities of each token of ``completions`` (token ids or text) after its prompt, under the
        raw logits, as arrays [tokens] of float32: bitwise those that a generation of these tokens returns, except where
        ``exactness=relaxed``.

        The tokens are forced (`SamplingParams.forced_token_ids`). `score` reads a completion in chunks, which is faster
        and may differ in the last bits.

        Raises:
            RequestError, LoRAError: see `generate`; also where there is not one completion for each prompt.
        """
        listed = as_prompts(prompts)
        ids = [self._completion(place, each) for place, each in enumerate(as_prompts(completions))]
        if len(ids) != len(listed):
            raise RequestError("completions", f": {len(ids)} given for {len(listed)} prompts")
        params = [SamplingParams(temperature=0.0, logprobs=0, forced_token_ids=each) for each in ids]
        arrays = (whole.outputs[0].arrays.logprobs for whole in self._generate(listed, params, None, False, lora))
        return [each for each in arrays if each is not None]

    def _completion(self, place: int, completion: Any) -> list[int]:
        if isinstance(completion, np.ndarray):
            completion = completion.tolist()
        return self._token_ids(f"completions[{place}]", completion)

    def _token_ids(self, field: str, prompt: Prompt, add_special_tokens: bool = False) -> list[int]:
        ids = self._intake.encode(field, prompt, add_special_tokens) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError(field, "is empty: a score needs at least one token on each side")
        return ids

    def _requests(
        self,
        field: str,
        prompts: Sequence[Prompt | ImagePrompt],
        params: Sequence[SamplingParams],
        answers: bool = False,
    ) -> list[Request]:
        """Make and check the requests; with several prompts the error names the rejected one."""
        made = []
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            try:
                made.append(self._request(prompt, each, answers))
                require_compiled(each)
            except RequestError as error:
                if len(prompts) == 1 or error.field not in _OF_ONE_PROMPT:
                    raise
                raise RequestError(f"{field}[{index}]", f": {error}") from error
        return made

    def _request(self, prompt: Prompt | ImagePrompt, params: SamplingParams, answers: bool) -> Request:
        vision, images = self.model.vision, list[HeldImage]()
        if isinstance(prompt, ImagePrompt):
            images, prompt = [*prompt.images], prompt.prompt
        if vision is None and images:
            kind = "a video" if images[0].video else "an image"
            raise RequestError(images[0].field, f"is {kind}, and the model reads text only")
        placed: tuple[PlacedImage, ...] = ()
        if vision is not None:
            processor = vision.processor
            if self.tokenizer is not None:
                processor = for_vocabulary(processor, self.tokenizer.token_to_id)
            prompt = with_timestamps(prompt, images, processor)
            ids = self._intake.encode("prompt", prompt) if isinstance(prompt, str) else prompt
            found = [image.prepared(processor) for image in images]
            prompt, placed = place_images("prompt", ids, processor, found)
        request = self._intake.request(str(next(self._ids)), prompt, params, answers=answers)
        return dataclasses.replace(request, images=placed)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        lora: LoRAChoice | Sequence[LoRAChoice] = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        on_delta: Callable[[Delta], None] | None = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate on conversations, through the checkpoint's chat template; see `generate`.

        An image is a part of a content: ``{"type": "image", "image": ...}``, or OpenAI's ``image_url`` with a data URL;
        a video is ``{"type": "video", "video": [frame, ...], "fps": 2}``.

        Args:
            mm_processor_kwargs: options of the image processor for all images (``min_pixels``, ``max_pixels``) and
                videos (``fps``, too).

        Raises:
            RequestError: the checkpoint has no chat template, a content is neither text nor an image, or `generate`
                rejects a prompt.
            TemplateError: the template rejects the messages.
        """
        prompts = self.render(messages, add_generation_prompt, tools, mm_processor_kwargs)
        asked = use_tqdm if progress is None else progress
        return self._generate(prompts, sampling_params, on_delta, asked, lora, answers=True)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ImagePrompt]:
        """Return the prompts of one or several conversations; see `chat`."""
        template, tokenizer = self.model.chat_template, self.tokenizer
        if template is None or tokenizer is None:
            raise RequestError("messages", f": the model {self.model.name!r} has no chat template")
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        plain = (messages_of("messages" + f"[{i}]" * (not single), c, template) for i, c in enumerate(conversations))
        prompts = []
        for each in plain:
            shown, images = with_images(each, list(template.sources.values()))
            text = template.render(shown, add_generation_prompt, tools)
            options = mm_processor_kwargs or {}
            held = [HeldImage(i.field, i.source, {**options, **i.options}, i.video) for i in images]
            if self.model.vision is not None:
                text = with_timestamps(text, held, self.model.vision.processor)
            # The template adds the special tokens itself.
            prompts.append(ImagePrompt(tokenizer.encode(text, add_special_tokens=False), held))
        return prompts

    def _params_for(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError("sampling_params", f": {len(params)} given for {len(prompts)} prompts")
        return list(params)


def _with_settings(config: EngineConfig, settings: Mapping[str, Any]) -> EngineConfig:
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    try:
        ours = our_settings(settings, known)
    except SettingNameError as error:
        raise EngineConfigError(str(error)) from error
    for name, value in ours.items():
        if name not in known:
            raise TypeError(f"LLM has no setting {name}: {advice(name, known) or 'docs/settings.md lists them'}")
        ours[name] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(config, **ours)


class _Run:
    """A `generate` call: iterating drives the engine until every output has ended, and yields the deltas."""

    def __init__(
        self,
        engine: EngineCore,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
    ) -> None:
        self._engine, resolved = engine, _add_all(engine, requests)
        self._position = {request.request_id: i for i, request in enumerate(resolved)}
        self._collectors = [Collector(p, request, tokenizer) for p, request in zip(prompts, resolved, strict=True)]
        self._running = set(range(len(resolved)))  # places of requests with open outputs

    @property
    def outputs(self) -> list[RequestOutput]:
        return [collector.output for collector in self._collectors]

    def __iter__(self) -> Iterator[tuple[Delta, RequestOutput]]:
        while self._running:
            for delta in self._engine.step():
                yield self._take(delta)

    def abort(self) -> None:
        """Abort outputs that are still open, and drain the step in flight."""
        for request_id, place in self._position.items():
            for index in self._collectors[place].open:
                self._engine.abort(request_id, index)
        while self._engine.has_work:
            self._engine.step()

    def _take(self, delta: SequenceDelta) -> tuple[Delta, RequestOutput]:
        place = self._position[delta.request_id]
        new = self._collectors[place].take(delta)
        if new.finish_reason is not None and delta.finish_reason is None:
            # A stop string: the engine does not check those.
            self._engine.abort(delta.request_id, delta.index, FinishReason.STOP)
        if not self._collectors[place].open:
            self._running.discard(place)
        made = Delta(place, new.index, new.text, new.token_ids, new.finish_reason)
        return made, self._collectors[place].output


def _add_all(engine: EngineCore, requests: Sequence[Request]) -> list[Request]:
    """Add all requests, or none."""
    added: list[Request] = []
    try:
        for request in requests:
            added.append(engine.add(request))
    except RequestError:
        for request in added:
            engine.abort(request.request_id)
        raise
    return added


Count = Callable[[int, int], None]
"""Callback with the number of new tokens and the number of prompts that finished."""


@contextlib.contextmanager
def prompts_bar(prompts: int, show: bool | None) -> Iterator[Count]:
    """Draw finished prompts and tokens per second on stderr; the bar disappears when the block ends.

    Args:
        show: None: if stderr is a terminal, or in a notebook.
    """
    console = rich.console.Console(stderr=True, force_terminal=show or None)
    if show is False or not (console.is_terminal or console.is_jupyter):
        yield lambda tokens, done: None
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        _TokensPerSecond(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("prompts", total=prompts, tokens=0)

        def count(tokens: int, done: int) -> None:
            bar.update(task, advance=done, tokens=bar.tasks[0].fields["tokens"] + tokens)

        yield count


class _TokensPerSecond(rich.progress.ProgressColumn):
    def render(self, task: rich.progress.Task) -> rich.text.Text:
        rate = task.fields["tokens"] / task.elapsed if task.elapsed else 0.0
        return rich.text.Text(f"{rate:,.0f} tokens/s")
