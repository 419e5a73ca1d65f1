"""Settings: values of the wrong type or range are refused by name."""

import pytest

from jaxserve.config import EngineConfig, MeshConfig, ServerConfig
from jaxserve.types import ConfigError


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (EngineConfig, {"prefix_cache": "no"}),
        (EngineConfig, {"overlap": 1}),
        (EngineConfig, {"max_queue": 1.5}),
        (EngineConfig, {"max_queue": -1}),
        (EngineConfig, {"max_num_seqs": 2.5}),
        (EngineConfig, {"max_num_seqs": 0}),
        (EngineConfig, {"max_num_seqs": True}),
        (EngineConfig, {"num_pages": 10.5}),
        (EngineConfig, {"num_pages": 1}),
        (EngineConfig, {"max_model_len": 1}),
        (EngineConfig, {"weights_seed": -1}),
        (EngineConfig, {"page_size": 24}),
        (EngineConfig, {"memory_fraction": 1.5}),
        (EngineConfig, {"memory_fraction": float("nan")}),
        (EngineConfig, {"policy": "lifo"}),
        (EngineConfig, {"dtype": "int8"}),
        (EngineConfig, {"model": ""}),
        (EngineConfig, {"max_num_seqs": 8, "max_batched_tokens": 4}),
        (EngineConfig, {"mesh": {"tensor": 2}}),
        (MeshConfig, {"tensor": 0}),
        (MeshConfig, {"data": 2}),
        (ServerConfig, {"port": 70000}),
        (ServerConfig, {"grace_s": "10"}),
    ],
)
def test_wrong_values_are_refused_by_name(kind, fields):
    with pytest.raises(ConfigError, match=list(fields)[-1]):
        kind(**fields)


def test_whole_numbers_serve_as_fractions():
    assert ServerConfig(grace_s=10).grace_s == 10
    assert EngineConfig(memory_fraction=1).memory_fraction == 1
