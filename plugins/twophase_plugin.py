"""Tells Airflow of Twophase where its plugins folder is this one; the class itself is in the package."""

from twophase.web.plugin import TwophasePlugin

__all__ = ["TwophasePlugin"]
