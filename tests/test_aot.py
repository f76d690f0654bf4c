"""Compiling for machines that are not there: what is refused, and what the compilers say of small models."""

import json
import sys
from importlib.util import find_spec

import pytest

from meshwright.audit import aot, target
from meshwright.cli.main import main
from meshwright.config import Refused, parse_layout
from meshwright.presets import resolve

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpu", "KIND:SHAPE"),
        ("cpu:", "KIND:SHAPE"),
        ("tpu-v9:2x2", "tpu-v5p"),
        ("h100:8", "h100-sxm"),
        ("tpu-v5p:16", "tpu-v5p:2x2x4"),
        ("tpu-v5p:2x0x4", "whole number"),
        ("tpu-v5p:2x2x-4", "whole number"),
        ("cpu:8x2", "cpu:8"),
    ],
)
def test_unknown_targets_are_refused(text, words):
    with pytest.raises(Refused, match=words):
        target.parse(text)


@pytest.mark.parametrize(
    ("text", "count"), [("cpu:8", 8), ("tpu-v5p:2x2x4", 16), ("tpu-v5e:4x4", 16), ("h100-sxm:2x8", 16)]
)
def test_a_target_has_the_product_of_its_shape(text, count):
    assert target.parse(text).device_count == count


@pytest.mark.parametrize(("text", "package"), [("tpu-v5p:2x2x4", "libtpu"), ("h100-sxm:2x8", r"jax\[cuda13\]")])
def test_a_missing_compiler_is_refused_with_what_to_install(monkeypatch, text, package):
    monkeypatch.setattr(target, "find_spec", lambda name: None)
    with pytest.raises(Refused, match=f"pip install .?{package}"):
        aot.compile_step(resolve("llama-tiny"), target.parse(text))


def test_chips_must_be_the_layouts_product(capsys):
    assert main(["compile", "llama-tiny", "--target", "cpu:8", "--layout", "fsdp=4"]) == 2
    assert "there are 8" in capsys.readouterr().err


def test_a_compiler_that_dies_is_a_verdict_with_its_last_lines(monkeypatch, capsys):
    script = "import os, sys; print('lower\\n' * 50, 'F0000 check failed: wgmma', file=sys.stderr); os.abort()"
    monkeypatch.setattr(aot, "COMMAND", (sys.executable, "-c", script))
    assert main(["compile", "llama-tiny", "--target", "cpu:2", "--layout", "fsdp=2", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["verdict"] == "failed"
    assert "status -6" in facts["reason"] and "wgmma" in facts["reason"]
    assert len(facts["reason"].splitlines()) <= 1 + aot.LINES_SHOWN


def test_a_compiler_out_of_memory_does_not_fit(monkeypatch):
    script = "import sys; sys.exit('x\\nRESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 99G of 95G')"
    monkeypatch.setattr(aot, "COMMAND", (sys.executable, "-c", script))
    facts = aot.compile_step(resolve("llama-tiny"), target.parse("tpu-v5p:2x2x1"))
    assert facts["verdict"] == "does not fit" and "99G of 95G" in facts["reason"]


def test_cpu_step_and_its_text(tmp_path, capsys):
    text = tmp_path / "new" / "step.hlo"
    request = ["compile", "llama-tiny", "--target", "cpu:2", "--layout", "fsdp=2", "--json", "--text", str(text)]
    assert main(request) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["verdict"] == "fits" and facts["devices"] == 2
    assert facts["peak_bytes"] > facts["argument_bytes"] > 0 and facts["compile_s"] > 0
    assert "all-gather" in text.read_text()


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("preset", ["llama-tiny", "gpt-tiny"])
@pytest.mark.parametrize("layout", ["fsdp=16", "fsdp=4 tensor=4", "data=2 fsdp=4 tensor=2 sequence_parallel=false"])
def test_small_models_compile_for_tpu(preset, layout):
    config = resolve(preset)
    config = config.__class__(**{**vars(config), "layout": parse_layout(layout)})
    facts = aot.compile_step(config, target.parse("tpu-v5p:2x2x4"))
    assert facts["verdict"] == "fits", facts
    assert 0 < facts["argument_bytes"] < facts["peak_bytes"] < facts["hbm_bytes"]
