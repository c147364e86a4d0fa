"""Configs: YAML files and overrides become one validated, immutable value; environment variables.

This file imports nothing: scripts that use `environment` must work without pydantic and PyYAML. Import from the modules
in this folder.
"""
