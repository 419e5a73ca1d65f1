"""The HTTP server: OpenAI's API over the client, streaming as server-sent events.

An endpoint is one function in `make_app`. Every error has OpenAI's body. A client that goes away
ends its request, whether it streams or not. Imports no jax.
"""

import functools

import fastapi
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from jaxserve.config import ServerConfig
from jaxserve.entry import batches, embeddings, openapi, responses, sglang, web_page
from jaxserve.entry import openai_answers as answers
from jaxserve.entry import openai_schema as schema
from jaxserve.entry.chat import prepare_chat
from jaxserve.entry.failures import HttpFailure, describe
from jaxserve.entry.front import Front, Record
from jaxserve.entry.http_guard import OPEN_PATHS, guard
from jaxserve.entry.http_io import (
    ClientGone,
    CompletionJob,
    answer,
    begin,
    failure_response,
    json_response,
    read,
    takes,
)
from jaxserve.metrics import CONTENT_TYPE, Metrics
from jaxserve.types import EngineDead, InvalidRequest, QueueFull, RequestFailed

KNOWN_ERRORS = (InvalidRequest, QueueFull, EngineDead, RequestFailed, HttpFailure, Exception)
"""What an endpoint may raise; starlette logs and re-raises the last, which is nobody's known
mistake.
"""


def make_app(front: Front, metrics: Metrics, settings: ServerConfig) -> ASGIApp:
    """The whole HTTP application, as an ASGI callable."""
    app = fastapi.FastAPI(
        title="jaxserve",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[fastapi.Depends(check_query)],
    )
    description = functools.cache(lambda: openapi.describe(app, front))

    @app.get("/openapi.json", include_in_schema=False)
    async def describe_api() -> Response:
        return json_response(description())

    @app.post("/v1/completions", openapi_extra=takes(schema.CompletionRequest))
    async def completions(request: Request) -> Response:
        record = begin(front, request, "cmpl")

        async def prepare() -> CompletionJob:
            body = await read(request, schema.CompletionRequest)
            front.check_model(body.model)
            params = body.sampling()
            tokenizer = front.engine().model.tokenizer
            reply = answers.Completion(
                record.request_id,
                front.model_name,
                record.created,
                front.engine().model.token_bytes,
                echoed=tokenizer if body.echoes_logprobs else None,
                hidden=tokenizer.special_token_ids
                if tokenizer and params.skip_special_tokens
                else (),
            )
            most = front.engine().max_in_flight
            if len(body.prompt) > 1 and len(body.prompt) * params.n > most:
                count = len(body.prompt) * params.n
                raise InvalidRequest("prompt", f"asks for {count} choices in all; allowed: {most}")
            return CompletionJob(record, reply, body, params, body.prompt)

        return await answer(request, record, prepare)

    @app.post("/v1/chat/completions", openapi_extra=takes(schema.ChatRequest))
    async def chat_completions(request: Request) -> Response:
        record = begin(front, request, "chatcmpl")

        async def prepare() -> CompletionJob:
            body = await read(request, schema.ChatRequest)
            front.check_model(body.model)
            return await chat_job(front, settings, record, body)

        return await answer(request, record, prepare)

    @app.get("/v1/models")
    async def models() -> Response:
        body = answers.model_body(front.model_name, front.info, front.started)
        return json_response({"object": "list", "data": [body]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        front.check_model(model)
        return json_response(answers.model_body(front.model_name, front.info, front.started))

    @app.get("/health")
    async def health() -> Response:
        front.engine()
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    @app.post("/tokenize", openapi_extra=takes(schema.TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await read(request, schema.TokenizeRequest)
        front.check_model(body.model)
        token_ids = await front.engine().tokenize(
            body.prompt, add_special_tokens=body.add_special_tokens
        )
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": front.info.max_model_len,
                "tokens": token_ids,
            }
        )

    @app.post("/detokenize", openapi_extra=takes(schema.DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await read(request, schema.DetokenizeRequest)
        front.check_model(body.model)
        return json_response({"prompt": await front.engine().detokenize(body.tokens)})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        model = front.engine().model
        tokenizer = front.engine().tokenizer
        template = tokenizer.chat_template
        tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        return json_response(
            {
                **(tokens if template is None else template.tokens),
                "chat_template": None if template is None else template.source,
                "eos_token_ids": sorted(model.eos_token_ids),
                "strips_first_space": tokenizer.strips_first_space,
                "vocab_size": tokenizer.vocab_size,
            }
        )

    @app.exception_handler(HTTPException)
    async def http_exception(request: Request, error: HTTPException) -> Response:
        message = {
            404: f"there is no {request.url.path}",
            405: f"{request.url.path} does not take {request.method}",
        }
        failure = describe(
            HttpFailure(error.status_code, message.get(error.status_code, error.detail))
        )
        return failure_response(failure, error.headers)

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    async def failed(request: Request, error: Exception) -> Response:
        return failure_response(describe(error))

    for kind in KNOWN_ERRORS:
        app.add_exception_handler(kind, failed)
    embeddings.add_routes(app, front)
    responses.add_routes(app, front, settings)
    batches.add_routes(app, front, settings)
    sglang.add_routes(app, front)
    web_page.add_routes(app, front)
    return guard(
        app,
        max_body_bytes=settings.max_body_bytes,
        api_keys=settings.all_api_keys(),
        cors_origins=settings.cors_origin,
        on_response=metrics.on_response,
    )


async def check_query(request: Request) -> None:
    """Raises: InvalidRequest for a query parameter, but where `files.page` reads them, and on
    OPEN_PATHS: probes and browsers put numbers there against caches.
    """
    path = request.scope["path"]
    is_list = request.method == "GET" and path in ("/v1/files", "/v1/batches")
    for name in () if is_list or path in OPEN_PATHS else request.query_params:
        raise InvalidRequest(name, "is not a parameter of this endpoint")


async def chat_job(
    front: Front, settings: ServerConfig, record: Record, body: schema.ChatRequest
) -> CompletionJob:
    """A chat request, with its prompt. Raises: InvalidRequest, EngineDead."""
    record.names = body.field_names
    params = body.sampling()
    prompt, params, message, until = await prepare_chat(front.engine(), settings, body, params)
    reply = answers.ChatCompletion(
        record.request_id,
        front.model_name,
        record.created,
        front.engine().model.token_bytes,
        bool(body.stream),
        message,
    )
    return CompletionJob(record, reply, body, params, [prompt], until)
