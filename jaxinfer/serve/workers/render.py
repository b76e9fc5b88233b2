"""Task of workers: chat templates, which come from checkpoints and requests. No jax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.requests import Conversation
from jaxinfer.serve.workers.codec import decode
from jaxinfer.serve.workers.normalize import written
from jaxinfer.text.chat_template import ChatTemplate, TemplateError


def renderer(sources: Mapping[str, str], tokens: Mapping[str, str]) -> Callable[[bytes], str]:
    """Return the renderer of encoded conversations. ``sources`` and ``tokens``: the checkpoint's `ChatTemplate`."""
    default = ChatTemplate(sources, tokens) if sources else None

    def render(question: bytes) -> str:
        asked = Conversation(**decode(question))
        try:
            template = default if asked.template is None else ChatTemplate(asked.template, tokens)
            if template is None:
                raise TemplateError("there is no chat template")
            write = functools.partial(
                template.render,
                add_generation_prompt=asked.add_generation_prompt,
                tools=asked.tools,
                extra=asked.variables,
                continue_final_message=asked.continue_final_message,
            )
            return written(asked.messages, write)
        except TemplateError as error:
            raise RequestError("messages", f": {error}") from error

    return render
