"""What of generation_config.json takes effect."""

import json
import pathlib

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
