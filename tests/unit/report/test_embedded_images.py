"""Only small PNG files inside the run folder are embedded into its page."""

from pathlib import Path

from lockstep.observe.run_record import read_record
from lockstep.report.embedded_images import embed_images
from tests.run_folders import append, event, write_run
from tests.unit.report.parsed_page import png


def test_only_valid_images_in_the_media_folder_are_embedded(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (tmp_path / "outside.png").write_bytes(png())
    (folder / "media").mkdir()
    (folder / "media" / "good.png").write_bytes(png())
    (folder / "media" / "text.png").write_text("not an image, though it is called one")
    (folder / "media" / "huge.png").write_bytes(png(100_000, 1))
    (folder / "media" / "large.png").write_bytes(png() + b"x" * 2**21)
    (folder / "media" / "link.png").symlink_to(tmp_path / "outside.png")
    paths = ["good", "text", "huge", "large", "link", "missing", "../../outside", "../media/good"]
    images = {path: f"media/{path}.png" for path in paths} | {"far": str(tmp_path / "outside.png")}
    append(folder / "events.jsonl", [event("step", 1, images=images)])
    assert [image.name for image in embed_images(read_record(folder))] == ["good"]


def test_a_media_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.png").write_bytes(png())
    folder = write_run(tmp_path / "run", [event("step", 1, images={"a": "media/a.png"})])
    (folder / "media").symlink_to(tmp_path / "elsewhere")
    assert embed_images(read_record(folder)) == []


def test_the_pictures_of_a_recipe_are_embedded(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "wing.png").write_bytes(png(3, 2))
    (image,) = embed_images(read_record(folder))
    assert (image.name, image.step, image.width, image.height) == ("wing", None, 3, 2)
