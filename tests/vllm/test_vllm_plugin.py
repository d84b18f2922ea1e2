"""The entry point: what is registered when, quickly, without importing the backends, and never silently off."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvskim.config import ConfigError, SkimConfig
from kvskim.engines.vllm import plugin
from kvskim.errors import UnsupportedError

STANDIN = hasattr(registry, "overrides")
pytestmark = pytest.mark.skipif(not STANDIN, reason="looks into the stand-in's registry")


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("KVSKIM_CONFIG", "KVSKIM_DISABLE", "LOCKS_CONFIG", "AMASS_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    # The plugin adds to it.
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "")
    registry.overrides.clear()
    yield
    registry.overrides.clear()


def registered():
    return {member.name: path for member, path in registry.overrides.items()}


def test_installed_and_not_configured_vllm_stays_stock():
    plugin.register_plugin()
    assert registered() == {"CUSTOM": "kvskim.engines.vllm.backend.SkimBackend"}


@pytest.mark.parametrize("variable", ["KVSKIM_CONFIG", "LOCKS_CONFIG"])
def test_configured_it_takes_the_place_of_flash_attention(monkeypatch, variable):
    monkeypatch.setenv(variable, "{}")
    for _ in range(2):
        plugin.register_plugin()
        assert set(registered()) == {"CUSTOM", "FLASH_ATTN", "FLASH_ATTN_MLA"}


def test_workers_that_ray_starts_get_the_configuration(monkeypatch):
    """vLLM copies the variables that are listed in one of its own."""
    name = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
    monkeypatch.setenv(name, "MINE, KVSKIM_CONFIG")
    plugin.register_plugin()
    assert os.environ[name] == "MINE, KVSKIM_CONFIG", "not configured, vLLM stays stock"
    monkeypatch.setenv("LOCKS_CONFIG", "{}")
    monkeypatch.setenv("KVSKIM_CACHE_DIR", "/cache")
    monkeypatch.setenv("KVSKIM_NVCC", "/of/this/host")
    for _ in range(2):
        plugin.register_plugin()
        assert os.environ[name] == "MINE,KVSKIM_CONFIG,KVSKIM_CACHE_DIR,LOCKS_CONFIG"


@pytest.mark.parametrize(("value", "names"), [("1", set()), ("yes", set()), ("0", {"CUSTOM", "FLASH_ATTN", "FLASH_ATTN_MLA"})])
def test_fault_16_disable_means_what_it_says(monkeypatch, value, names):
    monkeypatch.setenv("KVSKIM_CONFIG", "{}")
    monkeypatch.setenv("KVSKIM_DISABLE", value)
    plugin.register_plugin()
    assert set(registered()) == names


def test_a_wrong_configuration_stops_vllm(monkeypatch):
    monkeypatch.setenv("KVSKIM_CONFIG", '{"tau": 7}')
    with pytest.raises(ConfigError, match="tau=7"):
        plugin.register_plugin()


def test_fault_13_an_unsupported_version_says_so(monkeypatch, caplog):
    monkeypatch.setattr("vllm.__version__", "0.51.0")
    monkeypatch.setenv("KVSKIM_CONFIG", "{}")
    with pytest.raises(UnsupportedError, match=r"0\.51\.0"):
        plugin.register_plugin()
    monkeypatch.setenv("KVSKIM_CONFIG", '{"on_unsupported": "dense"}')
    plugin.register_plugin()
    assert set(registered()) == {"CUSTOM"}
    assert "kvskim is OFF" in caplog.text


def test_registered_classes_exist_and_bear_the_name_of_their_place(monkeypatch):
    monkeypatch.setenv("KVSKIM_CONFIG", "{}")
    plugin.register_plugin()
    for member, path in registry.overrides.items():
        module, name = path.rsplit(".", 1)
        cls = getattr(__import__(module, fromlist=[name]), name)
        assert cls.get_name() == member.name
    assert registry.overrides[AttentionBackendEnum.FLASH_ATTN] != registry.overrides[AttentionBackendEnum.CUSTOM]


def test_register_from_python(monkeypatch):
    monkeypatch.setenv("KVSKIM_CONFIG", "{}")  # restored afterwards
    config = plugin.register({"rule": "budget", "budget_pages": 40})
    assert config == SkimConfig(rule="budget", budget_pages=40)
    import os

    assert json.loads(os.environ["KVSKIM_CONFIG"])["budget_pages"] == 40
    assert "FLASH_ATTN" in registered()
    assert plugin.register(SkimConfig(tau=0.01)).tau == 0.01
    with pytest.raises(ConfigError, match="tua"):
        plugin.register({"tua": 0.01})


def test_the_plugin_imports_no_backend_and_no_gpu():
    code = """
        import sys, time
        import torch, pydantic, yaml  # vLLM has imported these before
        import vllm.v1.attention.backends.registry
        from kvskim.engines.vllm import plugin
        started = time.perf_counter()
        plugin.register_plugin()
        seconds = time.perf_counter() - started
        assert not torch.cuda.is_initialized()
        assert "kvskim.engines.vllm.backend" not in sys.modules, "backend"
        assert "kvskim.engines.vllm.state" not in sys.modules, "state"
        assert "triton" not in sys.modules, "triton"
        print(seconds)
    """
    path = str(Path(__file__).parent / "standin")
    environment = {"PYTHONPATH": path, "KVSKIM_CONFIG": "{}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5


def test_the_entry_point_is_declared():
    from importlib.metadata import entry_points

    values = [entry.value for entry in entry_points(group="vllm.general_plugins") if entry.name == "kvskim"]
    assert values == ["kvskim.engines.vllm.plugin:register_plugin"]
