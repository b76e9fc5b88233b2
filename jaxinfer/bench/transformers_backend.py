"""Hugging Face's transformers as an engine under test, in a process of its own: it needs torch, and may need another
Python."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.bench import transformers_worker
from jaxinfer.bench.iterations import Ran
from jaxinfer.bench.target import Item


class BackendError(RuntimeError):
    """An engine that cannot be measured. The message is one sentence with the reason."""


class TransformersBackend:
    """A `Backend`, after `load`. Static batches, each computed in step until its last output ends.

    Args:
        python: interpreter with torch and transformers.

    Attributes:
        about: versions and, once a model is loaded, the device.

    Raises:
        BackendError: they are not installed, or not for this interpreter.
    """

    def __init__(
        self,
        python: str,
        *,
        batch_size: int,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        seed: int = 0,
    ) -> None:
        self._options = {"batch_size": batch_size, "temperature": temperature, "seed": seed}
        script = pathlib.Path(transformers_worker.__file__)
        try:
            # -P: modules beside the script are not those of other packages
            self._process = subprocess.Popen(
                [python, "-P", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as cause:
            raise BackendError(f"--transformers-python {python} cannot be started: {cause.strerror}") from cause
        self._python, self._ignore_eos = python, ignore_eos
        self.about = self._ask({})

    def load(self, folder: str, dtype: str) -> None:
        """Load the checkpoint of a folder. Raises BackendError: transformers cannot."""
        self.about |= self._ask({"model": folder, "dtype": dtype, "ignore_eos": self._ignore_eos})

    def run(self, items: Sequence[Item]) -> Ran:
        """See `Backend.run`."""
        prompts, lengths = [item.prompt for item in items], [item.output_len for item in items]
        answer = self._ask({"prompts": prompts, "output_lens": lengths, **self._options})
        deliveries = [[(time, tokens) for time, tokens in each] for each in answer["deliveries"]]
        return Ran(answer["seconds"], deliveries, answer["finishes"])

    def figures(self) -> Mapping[str, Any]:
        """Return versions and device."""
        return self.about

    def close(self) -> None:
        """End the process."""
        self._process.communicate()  # closes its standard input

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BackendError(f"the process of transformers ended (exit code {self._process.wait()}): see above")
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            raise BackendError(
                f"{self._python} lacks torch or transformers ({answer['missing']}): pip install torch transformers, or "
                f"name a Python that has them by --transformers-python"
            )
        if "error" in answer:
            raise BackendError(f"transformers: {answer['error']}")
        return answer
