"""/v1/embeddings: vectors of texts. Imports no jax."""

import base64
from typing import Annotated, Any, Literal

import fastapi
import numpy as np
from fastapi import Request, Response
from pydantic import Field

from jaxserve.entry.body_fields import Body, Prompt, sampling_params
from jaxserve.entry.client import EMBEDDING, embedding_of
from jaxserve.entry.front import Front, Record
from jaxserve.entry.http_io import (
    begin,
    gather,
    json_response,
    read,
    respond,
    takes,
    while_connected,
)
from jaxserve.types import InvalidRequest, SamplingParams


class EmbeddingRequest(Body):
    """The body of /v1/embeddings."""

    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Only the model's own size."
    )
    user: str | None = None
    pooling: Literal["last", "mean"] | None = Field(
        None, description="Of the tokens' hidden states; last when not given."
    )
    normalize: bool | None = Field(None, description="To length 1; true when not given.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep this many of a text's last tokens; -1: what fits."
    )

    def params(self) -> SamplingParams:
        """Raises: InvalidRequest naming the field."""
        fields = {name: getattr(EMBEDDING, name) for name in ("max_tokens", "temperature")}
        return sampling_params(
            **fields, ignore_eos=True, truncate_prompt_tokens=self.truncate_prompt_tokens
        )


async def embed(front: Front, record: Record, body: EmbeddingRequest) -> list[np.ndarray]:
    """Runs a request and returns a vector, f32[D], for each of its texts."""
    front.check_model(body.model)
    record.user = body.user
    record.names = {"prompt": "input", **record.names}
    params, most = body.params(), front.engine().max_in_flight
    if len(body.input) > most:
        raise InvalidRequest("input", f"has {len(body.input)} texts; allowed: at most {most}")
    for text in body.input:
        await record.open(text, params, None, pooling=body.pooling or "last")
    await gather([stream.result() for stream in record.streams])
    vectors: list[np.ndarray] = []
    for stream in record.streams:
        record.note(0, stream.choices[0].finish_reason)
        vector = embedding_of(stream, body.normalize is not False)
        if body.dimensions not in (None, len(vector)):
            raise InvalidRequest(
                "dimensions", f"is {body.dimensions}; allowed: {len(vector)}, the model's own"
            )
        vectors.append(vector)
    return vectors


def _written(index: int, vector: np.ndarray, form: str | None) -> dict[str, Any]:
    plain = form != "base64"
    value = vector.tolist() if plain else base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return {"object": "embedding", "index": index, "embedding": value}


def add_routes(app: fastapi.FastAPI, front: Front) -> None:
    @app.post("/v1/embeddings", openapi_extra=takes(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        record = begin(front, request, "embd")

        async def work() -> Response:
            body = await read(request, EmbeddingRequest)
            vectors = await while_connected(request.receive, embed(front, record, body))
            tokens = record.usage().prompt_tokens
            return json_response(
                {
                    "object": "list",
                    "model": front.model_name,
                    "data": [_written(i, v, body.encoding_format) for i, v in enumerate(vectors)],
                    "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                }
            )

        return await respond(record, work)
