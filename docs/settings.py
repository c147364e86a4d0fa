"""The page of all settings, generated from the schemas: key, default, expected values and description."""

from lockstep.config.search_schema import SearchConfig
from lockstep.config.setting_list import list_settings
from lockstep.config.train_schema import Config

_NO_VALUE = ("", "–", "required")


def settings_page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Settings",
        "",
        "All keys of a config. Set them in a YAML file, or as `key=value` on the command line, with the dotted names",
        "below. Recipes add more keys, in sections such as `model` and `data`. `lockstep settings` lists all of them",
        "in the terminal, `lockstep settings --recipe NAME` those of a recipe. Generated from the schemas.",
    ]
    for title, schema in (("Training", Config), ("Search", SearchConfig)):
        lines += ["", f"## {title}", "", "| setting | default | expected | description |", "|---|---|---|---|"]
        for setting in list_settings(schema):
            default = setting.shown_default if setting.shown_default in _NO_VALUE else f"`{setting.shown_default}`"
            description = setting.description.replace("|", "\\|").replace("*", "\\*")
            lines.append(f"| `{setting.key}` | {default} | {setting.expected} | {description} |")
    return "\n".join(lines) + "\n"
