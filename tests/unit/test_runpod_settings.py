"""Settings of Runpod fleets: defaults, sources, and the messages for invalid ones."""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from windlass.config_loader import load_config
from windlass.model.config import ApiConfig, Config
from windlass.model.errors import ConfigError
from windlass.model.fleet import FleetConfig
from windlass.model.runpod import GpuChoice, RunpodSettings
from windlass.wiring import providers, reload, up
from windlass_emulators.runpod.images import PUBLIC_IMAGES, contents_of

FLEET = '[fleets.gpu]\nprovider = "runpod"\nhandler = "a:b"\n'


def load(folder: Path, text: str) -> Config:
    (folder / "windlass.toml").write_text(FLEET + text)
    return load_config(folder / "windlass.toml").config


def test_runpod_timeouts_are_those_of_the_original_orchestrator() -> None:
    fleet = FleetConfig(provider="runpod", runpod=RunpodSettings(image="i"))
    assert (fleet.default_spawn_timeout_s, fleet.heartbeat_timeout_s, fleet.stuck_timeout_s) == (900, 600, None)
    assert (fleet.poll_interval_s, fleet.heartbeat_interval_s, fleet.stop_timeout_s) == (10, 20, 600)
    assert (fleet.min_workers, fleet.max_workers, fleet.has_gpu, fleet.policy) == (0, 10, True, "adaptive")
    assert (fleet.min_scaling_interval_s, fleet.spawn_grace_s, fleet.scale_down_grace_s) == (0, 180, 60)
    assert (fleet.startup_grace_s, fleet.not_claiming_timeout_s, fleet.gpu_not_detected_timeout_s) == (600, 180, 300)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("NVIDIA L40S", GpuChoice("NVIDIA L40S", "SECURE", ())),
        ("NVIDIA L40S@COMMUNITY", GpuChoice("NVIDIA L40S", "COMMUNITY", ())),
        ("NVIDIA L40S@secure/EU-RO-1/US-KS-2", GpuChoice("NVIDIA L40S", "SECURE", ("EU-RO-1", "US-KS-2"))),
        (" NVIDIA A100-SXM4-80GB@SECURE ", GpuChoice("NVIDIA A100-SXM4-80GB", "SECURE", ())),
    ],
)
def test_choice_has_gpu_cloud_and_data_centers(text: str, choice: GpuChoice) -> None:
    assert RunpodSettings(choices=(text,)).ordered == (choice,)


def test_lists_may_be_separated_by_commas() -> None:
    settings = RunpodSettings(choices="NVIDIA L40S, NVIDIA H200@SECURE/EU-RO-1", ports="22/tcp,8888/http")  # type: ignore[arg-type]
    assert [choice.gpu for choice in settings.ordered] == ["NVIDIA L40S", "NVIDIA H200"]
    assert settings.opened_ports(has_ssh=True) == ("22/tcp", "8888/http")
    assert RunpodSettings(ports=("8888/http",)).opened_ports(has_ssh=True) == ("8888/http", "22/tcp")
    assert RunpodSettings().opened_ports(has_ssh=False) == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"choices": ["NVIDIA L40S@MOON"]}, "is not a GPU type and cloud: write NVIDIA L40S@SECURE"),
        ({"choices": ["@SECURE"]}, "is not a GPU type and cloud"),
        ({"choices": []}, "at least 1 item"),
        ({"ports": ["22"]}, "'22' is not a port: write 22/tcp or 8888/http"),
        ({"ports": ["70000/tcp"]}, "is not a port"),
        ({"min_cuda_version": "12"}, "min_cuda_version"),
        ({"env": {"WINDLASS_JOIN": "x"}}, "WINDLASS_JOIN is reserved for windlass"),
        ({"env": {"a-b": "x"}}, "'a-b' is not a valid name of an environment variable"),
        ({"volume_path": "workspace"}, "volume_path"),
        ({"volume_path": "/a b"}, "volume_path"),
        (
            {"network_volume_id": "v", "choices": ["NVIDIA X@COMMUNITY"]},
            "network volumes exist only in the secure cloud",
        ),
        ({"choices": ["nonsense"]}, "'nonsense' is not an NVIDIA GPU, and workers support no others"),
        ({"choices": ["AMD Instinct MI300X OAM@SECURE"]}, "is not an NVIDIA GPU"),
        ({"image": " "}, "' ' is not an image: write it as for docker pull"),
        ({"image": "a b"}, "'a b' is not an image"),
        ({"image": "a:1\n"}, "is not an image"),
        ({"volume_path": "/a/../b"}, "'/a/../b' must not contain . or .."),
        ({"ssh": {"storage_path": "/a/.."}}, "must not contain . or .."),
        ({"network_volume_id": "a/b?c"}, "'a/b?c' is not an id of Runpod: copy it from the console"),
        ({"registry_id": "../pods"}, "'../pods' is not an id of Runpod"),
        ({"template_id": " "}, "' ' is not an id of Runpod"),
        ({"gpu_count": 999}, "less than or equal to 32"),
        ({"disk_gb": 10**9}, "less than or equal to 16384"),
        ({"gpu_count": 0}, "gpu_count"),
        ({"disk_gb": 0}, "disk_gb"),
        ({"ssh": {"checks": [" "]}}, "a command must be printable text, and not empty"),
        ({"ssh": {"start_command": "a\x00b"}}, "a command must be printable text"),
        ({"gpus": 1}, "gpus"),
    ],
)
def test_invalid_setting_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        RunpodSettings(**settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither runpod.image nor runpod.template_id is set: name an image"),
        ('[fleets.gpu.runpod]\nimage = "i"\nport = 1', "fleets.gpu.runpod.port in .* is not a setting"),
        (
            '[fleets.gpu.runpod]\nimage = "i"\nchoices = ["@"]',
            "fleets.gpu.runpod.choices .*is not a GPU type and cloud",
        ),
        ('concurrency = 2\n[fleets.gpu.runpod]\nimage = "i"', "a GPU runs exactly one task at a time"),
    ],
)
def test_invalid_setting_is_reported_with_its_key_and_source(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, text)


def test_runpod_settings_need_provider_runpod() -> None:
    with pytest.raises(ValidationError, match="runpod is set and provider is 'local': set provider = \"runpod\""):
        FleetConfig(runpod=RunpodSettings(image="i"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[fleets.gpu.bootstrap]\nsetup = ["true"]\n', "bootstrap.setup is set and provider is 'runpod'"),
        ('[fleets.gpu.bootstrap]\nrequirements = ["app"]\n', "set auto_start_worker = true"),
        (
            "auto_start_worker = true\n[fleets.gpu.runpod.ssh]\ninstalls_windlass = false\n"
            '[fleets.gpu.bootstrap]\nrequirements = ["app"]\n',
            "runpod.ssh.installs_windlass = true",
        ),
    ],
)
def test_bootstrap_that_a_pod_would_ignore_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(tmp_path, text + '[fleets.gpu.runpod]\nimage = "i"\n')


def test_requirements_of_pods_need_ssh(tmp_path: Path) -> None:
    text = 'auto_start_worker = true\n[fleets.gpu.bootstrap]\nrequirements = ["app"]\n'
    fleet = load(tmp_path, text + '[fleets.gpu.runpod]\nimage = "i"\n').fleets["gpu"]
    assert fleet.bootstrap.requirements == ("app",)


def test_pods_may_have_the_certificate_of_an_own_authority(tmp_path: Path) -> None:
    text = '[fleets.gpu.bootstrap]\nca_file = "ca.pem"\n[fleets.gpu.runpod]\nimage = "i"\n'
    fleet = load(tmp_path, text).fleets["gpu"]
    assert fleet.bootstrap.ca_file == Path("ca.pem")


def test_storage_path_defaults_to_the_volume() -> None:
    assert RunpodSettings().storage_path is None
    assert RunpodSettings(network_volume_id="v", volume_path="/data").storage_path == "/data"
    assert RunpodSettings(network_volume_id="v", ssh={"storage_path": "/w"}).storage_path == "/w"  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- wiring


def configured(**changes: Any) -> tuple[FleetConfig, Config]:
    fleet = FleetConfig(provider="runpod", runpod=RunpodSettings(image="i"), **changes)
    return fleet, Config(fleets={"gpu": fleet}, api=ApiConfig(port=8080, url="https://plane.example.com"))


def test_missing_key_is_reported() -> None:
    with pytest.raises(ConfigError, match="the Runpod API key is missing. Set RUNPOD_API_KEY"):
        providers.make_provider("gpu", *configured(), "this")


def test_auto_start_needs_an_ssh_key(tmp_path: Path) -> None:
    fleet, config = configured(auto_start_worker=True)
    config = config.model_copy(update={"runpod_api_key": Config(runpod_api_key="k").runpod_api_key})
    with pytest.raises(ConfigError, match="fleet gpu has auto_start_worker, which needs an SSH key. Create one"):
        providers.make_provider("gpu", fleet, config, "this")
    missing = config.model_copy(update={"runpod_ssh_key_file": tmp_path / "none"})
    with pytest.raises(ConfigError, match="cannot read SSH key"):
        providers.make_provider("gpu", fleet, missing, "this")
    assert not providers.make_provider("gpu", *_without_ssh(config), "this").traits.has_prepare_step


@pytest.mark.parametrize("image", sorted(f"{start}x:1" if start.endswith("/") else start for start in PUBLIC_IMAGES))
def test_public_image_that_starts_no_worker_is_refused(image: str) -> None:
    pods = RunpodSettings(image=image)
    assert "starts no worker. Set auto_start_worker = true" in (pods.start_problem(has_ssh=False) or "")
    has_ssh = contents_of(image, {}).has_ssh
    assert (pods.start_problem(has_ssh=True) is None) == has_ssh
    for start in ({"args": "bash /workspace/start.sh"}, {"template_id": "t1"}):
        assert RunpodSettings(image=image, **start).start_problem(has_ssh=False) is None


@pytest.mark.parametrize("image", ["docker.io/library/python:3.12", "nvidia/cuda@sha256:0", "docker.io/runpod/base"])
def test_public_image_is_known_by_all_its_names(image: str) -> None:
    assert RunpodSettings(image=image).start_problem(has_ssh=False) is not None


@pytest.mark.parametrize(
    "image", ["ghcr.io/example/python:1", "example.org:5000/ubuntu:1", "python-of-mine/worker", "i"]
)
def test_image_of_ones_own_may_start_its_worker(image: str) -> None:
    assert RunpodSettings(image=image).start_problem(has_ssh=False) is None


async def test_fleet_that_can_never_work_is_refused_at_start_and_by_the_doctor() -> None:
    pods = FleetConfig(provider="runpod", handler="a:b", runpod=RunpodSettings(image="runpod/pytorch:1"))
    endpoint = "http://127.0.0.1:9/v2"
    config = Config(fleets={"gpu": pods}, runpod_api_key="k", runpod_endpoint=endpoint, api=ApiConfig(port=8499))
    starts: list[Callable[[], Awaitable[object]]] = [
        lambda: up.check_start(config), lambda: up.run_cycles(config, "1"), lambda: reload.check_fleets(config)
    ]  # fmt: skip
    for start in starts:
        with pytest.raises(ConfigError, match="fleet gpu: image runpod/pytorch:1 starts no worker"):
            await start()
    found = [each async for each in providers.check_runpod(config)]
    assert ("image", True) in [(each.check, each.is_error) for each in found]


def _without_ssh(config: Config) -> tuple[FleetConfig, Config]:
    return configured()[0], config


def test_fleets_with_one_key_share_an_account_and_the_longest_timeout() -> None:
    config = Config(runpod_api_key="secret")
    one, other = providers.runpod_account(config, 20), providers.runpod_account(config, 30)
    assert one is other
    assert one.timeout_s == 30
    assert providers.runpod_account(config, 20).timeout_s == 30
    assert providers.runpod_account(Config(runpod_api_key="another"), 20) is not one


def test_variables_of_runpod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "k")
    monkeypatch.setenv("RUNPOD_ENDPOINT", "http://127.0.0.1:8191/v2/")
    monkeypatch.setenv("RUNPOD_SSH_PRIVATE_KEY_PATH", str(tmp_path / "id"))
    # What stands in a pod's environment is no setting, and no mistake either.
    monkeypatch.setenv("WINDLASS_POD", "x/gpu/gpu-0-aa")
    monkeypatch.setenv("WINDLASS_JOIN", "{}")
    config = load_config().config
    assert config.runpod_endpoint == "http://127.0.0.1:8191/v2"
    assert config.runpod_ssh_key_file == tmp_path / "id"
    monkeypatch.setenv("RUNPOD_ENDPOINT", "127.0.0.1:9")
    with pytest.raises(ConfigError, match="runpod_endpoint .* must be a URL .* such as https://api.runpod.io/v2"):
        load_config()
