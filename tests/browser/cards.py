"""Draw workflows/<name>.jpg and the icon, banner and moving picture: ``python tests/browser/cards.py [WORKFLOW ...]``.

A card says what goes in and what comes out. It shows a result where the demo model or the demo's mesh gives one
(``results.py``), and drawings where it would take a published model, of which none was run here.
"""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # where the tests of paint and of the host are

import results
from anygpu.paint.choices import demo_paint_models
from anygpu.pipelines.demo import demo_models
from host.prompts import apps, shipped
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[2]
WIDE, TALL = 640, 360
PREFIX = "anygpu_"  # of every workflow's name
INK, SOFT = (255, 255, 255), (255, 255, 255, 150)
COLOURS = {  # first letters of a workflow's name after the prefix -> corners of its background
    "ltx": ((16, 82, 90), (57, 166, 132)),
    "hunyuan_video_15": ((76, 29, 89), (203, 78, 122)),
    "hunyuan_video": ((40, 33, 99), (126, 87, 194)),
    "framepack": ((112, 46, 16), (226, 139, 52)),
    "mochi": ((16, 51, 102), (62, 142, 208)),
    **dict.fromkeys(("paint", "mv_adapter", "project"), ((88, 22, 44), (222, 96, 78))),
    "": ((34, 44, 58), (96, 125, 139)),
}
Pen = ImageDraw.ImageDraw


def gradient(size: tuple[int, int], corners: tuple[tuple[int, ...], tuple[int, ...]]) -> Image.Image:
    """A picture that goes from one colour to another, from corner to corner."""
    ramp = Image.linear_gradient("L").rotate(30, expand=False).resize(size)
    first, last = (Image.new("RGB", size, colour) for colour in corners)
    return Image.composite(last, first, ramp)


def font(pixels: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, which every machine has."""
    return ImageFont.load_default(pixels)


def wrapped(pen: Pen, text: str, width: int, pixels: int) -> list[str]:
    """``text`` in lines that are no wider than ``width``."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if pen.textlength(longer, font(pixels)) <= width else [*lines, word]
    return lines


def draw_text(pen: Pen, left: int, top: int) -> None:
    """A page of writing."""
    pen.rounded_rectangle((left, top, left + 84, top + 84), 10, outline=INK, width=3)
    for row, share in enumerate((0.9, 0.7, 1.0, 0.5)):
        y = top + 18 + 16 * row
        pen.line((left + 14, y, left + 14 + int(56 * share), y), fill=SOFT, width=4)


def draw_picture(pen: Pen, left: int, top: int) -> None:
    """A picture: sun and hills."""
    pen.rounded_rectangle((left, top, left + 84, top + 84), 10, outline=INK, width=3)
    pen.ellipse((left + 52, top + 14, left + 70, top + 32), fill=SOFT)
    pen.polygon([(left + 8, top + 76), (left + 34, top + 36), (left + 56, top + 76)], fill=SOFT)
    pen.polygon([(left + 44, top + 76), (left + 60, top + 52), (left + 76, top + 76)], fill=SOFT)


def draw_film(pen: Pen, left: int, top: int) -> None:
    """A strip of film with a mark to play it."""
    pen.rounded_rectangle((left, top, left + 116, top + 84), 10, outline=INK, width=3)
    for column in range(5):
        for y in (top + 8, top + 68):
            pen.rectangle((left + 10 + 20 * column, y, left + 20 + 20 * column, y + 8), fill=SOFT)
    pen.polygon([(left + 46, top + 26), (left + 46, top + 58), (left + 76, top + 42)], fill=INK)


def draw_mesh(pen: Pen, left: int, top: int) -> None:
    """A cube."""
    corners = [(42, 4), (80, 24), (80, 62), (42, 82), (4, 62), (4, 24)]
    outline = [(left + x, top + y) for x, y in corners]
    pen.polygon(outline, outline=INK, width=3)
    for index in (1, 3, 5):
        pen.line((outline[index], (left + 42, top + 44)), fill=INK, width=3)


def draw_arrow(pen: Pen, left: int, top: int) -> None:
    """From what goes in to what comes out."""
    y = top + 42
    pen.line((left, y, left + 36, y), fill=INK, width=4)
    pen.polygon([(left + 32, y - 10), (left + 50, y), (left + 32, y + 10)], fill=INK)


def inputs_of(kinds: set[str], count: int) -> list[tuple[object, int]]:
    """What goes in, by the nodes of a workflow: drawings with their widths."""
    shown: list[tuple[object, int]] = []
    if "AnyGPULoadMesh" in kinds:
        shown.append((draw_mesh, 84))
    if "LoadVideo" in kinds or "AnyGPURecoverLatents" in kinds:
        shown.append((draw_film, 116))
    shown += [(draw_picture, 84)] * count
    return shown or [(draw_text, 84)]


def card(workflow: Path) -> Image.Image:
    """The card of a workflow, from the first line of its note and its nodes."""
    nodes = json.loads(workflow.read_text(encoding="utf-8"))["nodes"]
    note = next(node["widgets_values"][0] for node in nodes if node["type"] == "MarkdownNote")
    title, _, does = note.splitlines()[0].removeprefix("# ").partition(": ")
    kinds = {node["type"] for node in nodes}
    corners = next(pair for start, pair in COLOURS.items() if workflow.stem.removeprefix(PREFIX).startswith(start))
    picture = gradient((WIDE, TALL), corners)
    pen = ImageDraw.Draw(picture, "RGBA")
    size = next((size for size in (54, 46, 38, 32) if len(wrapped(pen, title, WIDE - 80, size)) == 1), 32)
    pen.text((40, 38), "\n".join(wrapped(pen, title, WIDE - 80, size)), INK, font(size))
    for row, line in enumerate(wrapped(pen, does, WIDE - 80, 28)[:2]):
        pen.text((40, 118 + 36 * row), line, SOFT, font(28))
    left, top = 40, 226
    if workflow.stem in results.RESULTS:
        show_result(picture, pen, *results.RESULTS[workflow.stem]())
        pen.text((40, 334), drawn_by(workflow.stem), SOFT, font(14))
        return picture
    shown = inputs_of(kinds, sum(node["type"] == "LoadImage" for node in nodes))
    for draw, width in shown:
        draw(pen, left, top)  # type: ignore[operator]
        left += width + 16
    draw_arrow(pen, left, top)
    (draw_mesh if "SaveGLB" in kinds else draw_film)(pen, left + 66, top)
    return picture


def drawn_by(name: str) -> str:
    """What drew the result on the card of a workflow, without its size in the list, which training may change."""
    bare = name.removeprefix(PREFIX)
    choices = {folder.name: choice for choice, folder in demo_models().items() if bare.startswith(folder.name)}
    if choices:
        return f"drawn by {choices[max(choices, key=len)].rpartition(' (')[0]}"
    (painter,) = demo_paint_models()
    after_a_picture = results.RESULTS[name] in (results.after_picture, results.projected)
    return (
        f"painted by {painter.rpartition(' (')[0]}" if after_a_picture else "the demo's mesh, from synthetic pictures"
    )


def show_result(picture: Image.Image, pen: Pen, given: results.Strip, made: results.Strip) -> None:
    """Frames of what goes in and of what comes out, beside one another above the lower edge."""
    side, left, top = (126, 40, 200) if not given else (94, 40, 232)
    for strip, last in ((given, False), (made, True)):
        for frame in strip:
            picture.paste(frame.resize((side, side), Image.Resampling.BICUBIC), (left, top))
            left += side + 6
        if strip and not last:
            draw_arrow(pen, left + 2, top + side // 2 - 42)
            left += 62


def icon(side: int) -> Image.Image:
    """The pack's sign: a chip with a mark to play."""
    big = 4 * side
    picture = Image.new("RGBA", (big, big))
    back = gradient((big, big), COLOURS["ltx"]).convert("RGBA")
    mask = Image.new("L", (big, big))
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, big - 1, big - 1), big // 5, fill=255)
    picture.paste(back, (0, 0), mask)
    pen, unit = ImageDraw.Draw(picture), big // 20
    for step in range(4):
        at = (6 + step * 2.6) * unit
        for box in ((at, 2 * unit, at + unit, 18 * unit), (2 * unit, at, 18 * unit, at + unit)):
            pen.rounded_rectangle(box, unit // 2, fill=INK)
    pen.rounded_rectangle((4 * unit, 4 * unit, 16 * unit, 16 * unit), 2 * unit, fill=INK)
    pen.polygon([(8 * unit, 6.5 * unit), (8 * unit, 13.5 * unit), (14 * unit, 10 * unit)], fill=COLOURS["ltx"][0])
    return picture.resize((side, side), Image.Resampling.LANCZOS)


def banner() -> Image.Image:
    """The registry's banner, 21:9."""
    picture = gradient((1260, 540), COLOURS["ltx"])
    sign = icon(300)
    picture.paste(sign, (90, 120), sign)
    pen = ImageDraw.Draw(picture, "RGBA")
    pen.text((450, 150), "AnyGPU", INK, font(110))
    pen.text((454, 290), "Video and 3D texture models\nin ComfyUI, on the GPU you have", INK, font(44), spacing=14)
    return picture


def main(names: list[str]) -> None:
    """Draw the cards of these workflows, or all; the sign and the banner too with all."""
    for workflow in shipped():
        if not names or workflow.stem in names:
            card(workflow).save(workflow.with_suffix(".jpg"), quality=72, optimize=True, progressive=True)
    for app in apps():
        shutil.copyfile(app.with_name(app.name.replace(".app.json", ".jpg")), app.with_suffix(".jpg"))
    if not names:
        icon(256).save(ROOT / "docs" / "images" / "icon.png", optimize=True)
        results.moving()
        banner().quantize(128).save(ROOT / "docs" / "images" / "banner.png", optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
