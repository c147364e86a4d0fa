"""Markup is escaped, and pages are written atomically."""

from pathlib import Path

import pytest

from lockstep.report.html_page import Markup, element, write_page


def test_text_is_escaped_unless_it_is_markup() -> None:
    assert element("p", "<b>", Markup("<i></i>"), class_='"') == '<p class="&quot;">&lt;b&gt;<i></i></p>'


def test_attributes_of_none_are_omitted_and_images_have_no_end_tag() -> None:
    assert element("img", src="x", class_=None, data_plot="y") == '<img src="x" data-plot="y">'


def test_a_page_replaces_a_link_and_leaves_no_draft(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "report.html").symlink_to(precious)
    write_page(tmp_path / "report.html", "<p>new")
    assert precious.read_text() == "mine"
    assert (tmp_path / "report.html").read_text() == "<p>new"
    with pytest.raises(OSError):
        write_page(tmp_path / "nowhere" / "report.html", "<p>new")
    with pytest.raises(UnicodeEncodeError):
        write_page(tmp_path / "other.html", "\ud800")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "report.html"]
