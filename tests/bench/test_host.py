"""The host bench runs the engine's own scheduler and packer."""

import pytest

from bench import host


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_part_of_a_step_is_timed(temperature):
    figures = host.measure(num_seqs=3, context=40, steps=8, temperature=temperature)
    parts = [figures[f"{part}_us"] for part in ("schedule", "pack", "commit")]
    assert all(part > 0 for part in parts)
    assert figures["total_us"] == pytest.approx(sum(parts), abs=0.3)
