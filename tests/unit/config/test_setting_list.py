"""The list of a config class's settings."""

from pydantic import Field

from lockstep.config.duration import Duration
from lockstep.config.field_types import ConfigSection, DurationField, FreeForm, Frozen, PositiveInt
from lockstep.config.setting_list import list_settings


class Inner(Frozen):
    depth: PositiveInt = 2  # of the tree


class Settings(Frozen):
    size: PositiveInt  # of the whole
    renamed: str | None = Field(default=None, validation_alias="name")
    every: DurationField = Duration.parse("2 epochs")
    flag: bool = (
        True  # a comment inside the definition
    )  # fmt: skip
    items: tuple[int, ...] = (1, 2)
    inner: Inner = Inner()
    other: Inner | None = None  # not there by default
    free: FreeForm = ConfigSection()


def test_each_setting_has_its_key_default_words_and_description() -> None:
    shown = [(each.key, each.shown_default, each.expected, each.description) for each in list_settings(Settings)]
    assert shown == [
        ("size", "required", "a whole number greater than 0", "of the whole"),
        ("name", "–", "text", ""),
        ("every", "2 epochs", "a duration, as in 200 steps, 2 epochs or 1e6 samples", ""),
        ("flag", "true", "true or false", "a comment inside the definition"),
        ("items", "[1, 2]", "a list", ""),
        ("inner", "", "a mapping", ""),
        ("inner.depth", "2", "a whole number greater than 0", "of the tree"),
        ("other", "–", "a mapping", "not there by default"),
        ("other.depth", "2", "a whole number greater than 0", "of the tree"),
        ("free", "–", "a mapping", ""),
    ]


def test_the_values_of_a_config_stand_in_place_of_the_defaults() -> None:
    config = Settings(size=7, other=Inner(depth=9), free=ConfigSection(a=(1, 2)))
    shown = {each.key: each.shown_default for each in list_settings(Settings, config)}
    assert (shown["size"], shown["inner.depth"], shown["other.depth"]) == ("7", "2", "9")
    assert shown["free"] == "{a: [1, 2]}"
