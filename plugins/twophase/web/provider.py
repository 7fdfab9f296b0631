"""Describe Twophase as an Airflow provider. Every component calls it early, so it imports nothing of Airflow."""

from __future__ import annotations

from importlib.metadata import metadata


def get_provider_info() -> dict[str, object]:
    """Describe the provider (entry point `apache_airflow_provider`); it brings no hooks of its own."""
    about = metadata("twophase")
    return {
        "package-name": about["Name"],
        "name": "Twophase",
        "description": about["Summary"],
        "versions": [about["Version"]],
    }
