"""Configs: YAML files and overrides become one validated, immutable value; environment variables.

Import from the modules of this folder, which imports nothing itself: `import lockstep` reaches `environment` and must
work without pydantic and PyYAML.
"""
