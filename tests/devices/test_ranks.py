"""Rows stay on devices, over a process group: the host reads none, and errors come late. The CPU represents devices."""

import numpy as np
import pytest
import torch
from torch import nn

from devices import device_programs
from programs import transport_programs
from support.no_host import WAYS


@pytest.mark.parametrize("how", device_programs.STEPS)
def test_no_step_has_the_host_look_at_a_tensor(ranks, how):
    assert ranks(3, device_programs.step_without_a_host_read, how, on_devices=True) == [3] * 3


@pytest.mark.parametrize("way", WAYS)
def test_a_host_synchronisation_would_be_detected(ranks, way):
    assert ranks(2, device_programs.read_statistic, way, on_devices=True) == ["seen"] * 2


def test_ranks_in_different_layers_get_nan_and_then_the_error(ranks):
    for rank, (is_nan, stayed, text) in enumerate(ranks(3, device_programs.part_ways, on_devices=True)):
        assert is_nan
        assert stayed
        first, *rows = text.splitlines()
        assert first == "RoundMismatch: deadlock: the ranks wait in different rounds"
        own = "head.bn" if rank == 1 else "stem.bn"
        here = {"rank 1"} if rank == 1 else {"rank 0", "rank 2"}
        table = dict(row.split("  ")[1:] for row in rows[:3])
        assert {who for who, where in table.items() if where.startswith(f"in forward of layer {own!r}, call 1")} == here
        assert {who for who, where in table.items() if where == "in another round"} == table.keys() - here


def test_ranks_that_begin_in_different_layers_learn_where_the_others_are(ranks):
    for text in ranks(3, device_programs.begin_in_different_layers, on_devices=True):
        first, *rows = text.splitlines()
        assert first == "RoundMismatch: deadlock: the ranks wait in different rounds"
        assert [row.split("  ") for row in rows[:3]] == [
            ["", "rank 0", "in first forward of layer 'stem.bn', call 0, step 0, 3 channels, 2 vectors"],
            ["", "rank 2", "in first forward of layer 'stem.bn', call 0, step 0, 3 channels, 2 vectors"],
            ["", "rank 1", "in first forward of layer 'head.bn', call 0, step 0, 3 channels, 2 vectors"],
        ]


def test_too_few_values_give_nan_and_then_the_error(ranks):
    for is_nan, stayed, text in ranks(2, device_programs.have_too_few, on_devices=True):
        assert is_nan
        assert stayed
        assert text.startswith("ValueError: layer 'bn': expected more than 1 value per channel over all replicas")
        assert "got 1 (this replica's input has shape (2, 3, 2))" in " ".join(text.split())


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_nan_is_reported_as_soon_as_the_device_has_found_it(ranks, phase):
    for rank, (before, lines) in enumerate(ranks(2, device_programs.bring_nan, phase, on_devices=True)):
        ((level, text),) = lines
        expected = "INFO" if phase == "backward" else "ERROR" if rank == 1 else "WARNING"
        assert (before, level) == (0, expected)
        assert f"layer 'bn', {phase}, step 0, rank 1" in text


def test_filling_up_the_missing_rows_of_a_rank_changes_no_bit(ranks):
    assert ranks(2, device_programs.add_negative_zeros, on_devices=True) == [([0.0, 0.0], True, 3.0)] * 2


def test_one_rank_on_the_host_moves_all_to_the_host(ranks):
    found = ranks(2, device_programs.with_one_on_the_host, on_devices=True)
    assert [on_devices for on_devices, _ in found] == [False, False]
    whole = nn.BatchNorm1d(3)(torch.cat([device_programs.sample(0), device_programs.sample(1)]))
    np.testing.assert_allclose(
        np.concatenate([output for _, output in found]), whole.detach().numpy(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.long
def test_a_compiled_layer_whose_process_group_gathers_on_the_host_gives_the_same_bits(ranks):
    expected = ranks(4, transport_programs.compiled)
    for rank, found in enumerate(ranks(4, transport_programs.compiled_for_devices)):
        for name, values in expected[rank].items():
            assert found[name].tobytes() == values.tobytes(), name


def test_an_input_that_has_left_its_device_is_reported(ranks):
    _, text = ranks(2, device_programs.move_away, on_devices=True)
    assert text.startswith("ConfigurationError: layer 'bn': expected up to 1 inputs on devices of this process")
