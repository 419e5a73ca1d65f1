"""A chat request made ready for the engine, whichever protocol brought it. Imports no jax."""

from collections.abc import Callable

from jaxserve.config import ServerConfig
from jaxserve.entry.chat_format import ChatFormat, Message
from jaxserve.entry.client import Client, Until
from jaxserve.entry.openai_schema import ChatRequest
from jaxserve.types import InvalidRequest, SamplingParams


async def prepare_chat(
    engine: Client, settings: ServerConfig, body: ChatRequest, params: SamplingParams
) -> tuple[list[int], SamplingParams, Callable[[], Message], Callable[[], Until] | None]:
    """The prompt; `params` as its tools and parsers need them; what makes each choice's message;
    what makes, where something may end a choice early, what says when.

    Of `body` it reads what concerns the conversation; the sampling is `params`.
    Raises: InvalidRequest, EngineDead.
    """
    form = ChatFormat(
        engine,
        settings,
        body.template_tools(),
        body.chosen_tool(),
        separates_reasoning=body.separate_reasoning is not False,
        has_one_call=body.parallel_tool_calls is False,
    )
    params = form.adjust(params)
    variables = {**body.template_variables(), **form.template}
    prompt = await engine.chat_prompt(body.template_messages(), **variables)
    parser, id_of_call = form.parsers(prompt), form.id_of_call
    until = form.until(prompt)
    if until is not None and params.use_beam_search:
        raise InvalidRequest(
            "parallel_tool_calls", "can't be false with use_beam_search, whose texts end as they do"
        )

    def message() -> Message:
        return Message(
            parser(),
            id_of_call,
            shows_reasoning=body.include_reasoning is not False,
            has_one_call=body.parallel_tool_calls is False,
        )

    return prompt, params, message, until
