"""Registers the plugin where Airflow's plugins folder is this one.

An installed distribution registers it by its entry point, and Airflow reports a second one of the same name as an
error: then there is nothing to find here.
"""

from importlib.metadata import entry_points

if not entry_points(group="airflow.plugins", name="twophase"):
    from twophase.web.plugin import TwophasePlugin  # noqa: F401 - Airflow finds it here
