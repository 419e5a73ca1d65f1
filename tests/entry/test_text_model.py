"""What of generation_config.json takes effect, and what a request's numbers become."""

import enum
import json
import pathlib

import msgspec
import numpy as np
from engines import write_model
from server_fakes import fake_info

from jaxserve.entry.inputs import resolve_sampling
from jaxserve.entry.text_model import load_text_model
from jaxserve.types import SamplingParams


def test_generation_config_gives_defaults_that_a_request_overrides(tmp_path: pathlib.Path):
    stated = {"repetition_penalty": 1.1, "typical_p": 0.9, "no_repeat_ngram_size": 3, "top_k": 40}
    write_model(tmp_path, weights=False)
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    model, info = load_text_model(str(tmp_path)), fake_info(vocab_size=101)
    sampling = resolve_sampling(SamplingParams(), 3, model, info)
    assert {name: getattr(sampling, name) for name in stated} == stated
    asked = SamplingParams(repetition_penalty=1.0, typical_p=1.0, no_repeat_ngram_size=0, top_k=0)
    sampling = resolve_sampling(asked, 3, model, info)
    assert {name: getattr(sampling, name) for name in stated} == {
        "repetition_penalty": 1.0,
        "typical_p": 1.0,
        "no_repeat_ngram_size": 0,
        "top_k": 0,
    }


class Number(enum.IntEnum):
    TWO = 2


def test_numbers_of_derived_classes_are_sent_as_plain_ones(tmp_path: pathlib.Path):
    write_model(tmp_path, weights=False)
    model, info = load_text_model(str(tmp_path)), fake_info(vocab_size=101)
    two, half = Number.TWO, np.float64(0.5)
    given = {
        "max_tokens": two, "min_tokens": two, "seed": two, "top_k": two, "logprobs": two,
        "prompt_logprobs": two, "prompt_logprobs_start": two, "no_repeat_ngram_size": two,
        "temperature": half, "top_p": half, "min_p": half, "typical_p": half,
        "repetition_penalty": half, "presence_penalty": half, "frequency_penalty": half,
        "logit_bias": {two: half}, "allowed_token_ids": (two,), "stop_token_ids": (two,),
        "token_ids_logprob": (two,), "bad_words": ((two,),),
    }  # fmt: skip
    sampling = resolve_sampling(SamplingParams(**given), 3, model, info)
    for name in given:
        value = getattr(sampling, name)
        assert value == given[name] or name == "stop_token_ids"  # ends of text are among those
        assert not any(name in repr(value) for name in ("Number", "float64"))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=type(sampling))
    assert again == sampling
