"""The one way from input values to a request: each input has an effect, and none is known twice."""

from pathlib import Path

import pytest
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.pipelines.requests import LOAD_INPUTS, STORED, LoadRequest, load_request

MODEL = Path("model")
OTHER = {"compile_mode": "max-autotune-no-cudagraphs", "compile_dynamic": "all", "compile_cache_size": 3}
OTHER |= {"keep_free_gb": 1.5, "transformer_device": "cpu", "text_device": "cpu", "vae_device": "cpu"}


def test_no_values_ask_for_the_defaults():
    assert load_request({}, model=MODEL) == LoadRequest(MODEL)
    assert load_request({name: row.default for name, row in LOAD_INPUTS.items()}, model=MODEL) == LoadRequest(MODEL)


@pytest.mark.parametrize("name", LOAD_INPUTS)
def test_each_input_changes_the_request(name):
    compiled = {"compile": name != "compile"}  # the settings of the compiler act only with it
    default = LOAD_INPUTS[name].default
    value = OTHER.get(name, not default if isinstance(default, bool) else "another")
    assert load_request({**compiled, name: value}, model=MODEL) != load_request(compiled, model=MODEL)


def test_a_trace_is_a_profile_of_its_file():
    assert load_request({}, Path("trace.json"), model=MODEL).speed.profile.path == Path("trace.json")


def test_an_accelerator_that_is_not_there_is_refused():
    with pytest.raises(UnsupportedError, match="device 'gpu:3'"):
        load_request({"vae_device": "gpu:3"}, model=MODEL)


@pytest.mark.parametrize("name", STORED)
def test_a_precision_of_other_packs_is_a_way_of_storing_weights(name):
    named = load_request({"precision": name}, model=MODEL)
    assert named == load_request({"weights": STORED[name]}, model=MODEL) and named.precision == "auto"
    assert load_request({"precision": name, "weights": STORED[name]}, model=MODEL) == named
    with pytest.raises(InputError, match=f"precision {name!r} with weights 'int8'"):
        load_request({"precision": name, "weights": "int8"}, model=MODEL)
