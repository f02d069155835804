"""Rotation of a provider's key as docs/operations.md describes it: the file changes, SIGHUP applies it, no hold.

tests/simulator/test_other_account.py shows that a new key of the same account does not hold the fleet.
"""

from pathlib import Path

import pytest

from windlass.config_loader import load_config, secrets_of
from windlass.model.redaction import HIDDEN, mask_of
from windlass.wiring.reload import ACCOUNTS, ActiveConfig

OLD, NEW = "old-key-1234567890", "new-key-0987654321"


@pytest.mark.parametrize(
    ("variable", "setting"), [("HCLOUD_TOKEN", "hetzner_api_token"), ("RUNPOD_API_KEY", "runpod_api_key")]
)
@pytest.mark.parametrize("source", ["named file", "credentials folder", "command"])
def test_reload_applies_a_rotated_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, setting: str, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    key = tmp_path / variable
    match source:
        case "named file":
            monkeypatch.setenv(f"{variable}_FILE", str(key))
        case "credentials folder":
            monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
        case "command":
            monkeypatch.setenv(variable, f"cmd:cat {key}")
    key.write_text(f"{OLD}\n")
    active = ActiveConfig(load_config(None, {}).config, None)
    assert getattr(active.config, setting).get_secret_value() == OLD
    key.write_text(f"{NEW}\n")
    merged = active.merged_with(load_config(None, {}).config, is_head_in_use=False)
    assert getattr(merged, setting).get_secret_value() == NEW
    # A changed account setting rebuilds the providers; the new key is masked from then on.
    assert setting in ACCOUNTS
    assert mask_of(secrets_of(merged))(f"denied for {NEW}") == f"denied for {HIDDEN}"
