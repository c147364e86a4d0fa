"""Configs: YAML files and command-line overrides become one frozen, validated value; the environment is read here too.

Import from the files of this folder: `import lockstep` reaches `environment` and must work without pydantic and PyYAML.
"""
