"""Tests of the part readers of chats, as the HTTP APIs create them."""

from jaxinfer.serve.api.requests import Call, Conversation
from jaxinfer.serve.http.completions import Chat
from jaxinfer.serve.http.events.parts import REASONING, TEXT
from jaxinfer.serve.http.events.stream import event, reader_of
from jaxinfer.serve.http.fields import checked
from jaxinfer.serve.http.requests import ChatCompletionRequest
from jaxinfer.text.output import OutputDelta
from tests.serve.http.scripted import speaking
from tests.serve.http.support import events, run

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_tokens_are_known_by_their_part_when_all_come_at_once() -> None:
    """In one delta, marker tokens separate the parts; other special tokens are hidden."""

    async def test() -> None:
        async with speaking("<think>Hm<|secret|>.</think>Yes.") as running:
            frontend = running.frontend
            call = Call(Conversation(MESSAGES), {"logprobs": 0}, shown=frontend.parsers.markers)
            generation = await frontend.generate(call)
            body = checked(ChatCompletionRequest, {"messages": MESSAGES})
            chat = Chat(frontend, body, "r", generation, frontend.parsers)
            deltas = [delta async for delta in generation]
            whole = OutputDelta(0, "".join(each.text for each in deltas), [], finish_reason="stop")
            whole.token_ids = [token for each in deltas for token in each.token_ids]
            whole.logprobs = [position for each in deltas for position in each.logprobs]
            reader = reader_of(chat)
            reader.read(whole)
            found = [(part.kind, part.text, len(part.logprobs)) for part in reader.parts]
            assert found == [(REASONING, "Hm.", 3), (TEXT, "Yes.", 4)]
            marked = whole.token_ids.index(frontend.tokenizer.token_to_id("</think>"))  # type: ignore[union-attr]
            assert list(reader.parts[1].logprobs) == list(whole.logprobs)[marked + 1 : marked + 5]
            assert reader.reasoning_tokens == 3

    run(test)


def test_an_event_has_its_name_in_its_data() -> None:
    text = event("ping", {"a": "ü\n"})
    assert text.startswith("event: ping\ndata: {")
    assert events(text) == [{"type": "ping", "a": "ü\n"}]
