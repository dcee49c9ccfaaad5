"""The moving pictures of one negotiation: an animated GIF, and a page with a slider that needs no other file."""

from __future__ import annotations

import base64
import html
import io
import pathlib
from typing import Any

from sakanajax.core import files
from sakanajax.sheaf_admm import inspection_artists as artists
from sakanajax.sheaf_admm import inspection_plots as plots

MOST_FRAMES = 48
STILLS = (
    ("evolution.png", "The prediction at some iterations"),
    ("residuals.png", "Who still wants something else, and where the agreement still moves"),
    ("disagreement.png", "Where neighbours disagree"),
    ("curves.png", "Over all iterations"),
    ("trajectories.png", "What agents want and what is agreed"),
)


def write_all(folder: pathlib.Path, n, given, report) -> None:
  """Writes negotiation.gif and negotiation.html into `folder`, which holds the still pictures."""
  shown = plots.moments(len(n.prediction) - 1, MOST_FRAMES)
  images = indexed(frames(n, given, shown))
  files.write_bytes(folder / "negotiation.gif", as_gif(images))
  stills = [(title, (folder / name).read_bytes()) for name, title in STILLS]
  page = as_page(n.kind, report, shown, [_png(image) for image in images], stills)
  files.write_text(folder / "negotiation.html", page)


def frames(n, given, shown: list[int]) -> list[Any]:
  """One PIL image per iteration in `shown`: belief, primal residual and disagreement side by side."""
  from PIL import Image

  height, width = n.board.shape
  stacked = width > 1.6 * height  # a wide board has its panels below each other
  panels = 4 if n.kind == "mnist" else 3
  size = (3.3 * panels, 3.2 * max(height / width, 0.6) + 0.8)
  if stacked:
    size = (7.0, panels * (6.6 * height / width + 0.35) + 0.4)
  images = []
  with plots.canvas(*size, dpi=100) as figure:
    places = list(figure.subplots(panels, 1) if stacked else figure.subplots(1, panels))
    movers = [artists.belief(places[0], n, given)]
    if n.kind == "mnist":
      movers.append(artists.votes(places[1], n))
      places[1].set(title="vote", box_aspect=None if stacked else 1)
    primal, apart = artists.scale_of(n.primal), artists.scale_of(n.disagreement)
    movers.append(artists.residual(places[-2], n, n.primal, primal))
    movers.append(artists.disagreement(places[-1], n, apart))
    plots.colour_bar(figure, places[-2], artists.RESIDUALS, primal)
    plots.colour_bar(figure, places[-1], artists.DISAGREEMENT, apart)
    places[0].set_title("belief")
    places[-2].set_title("primal residual of agents")
    places[-1].set_title("disagreement of neighbours")
    title = figure.suptitle(" ", x=0.01, ha="left")
    for k in shown:
      title.set_text(f"iteration {k} of {len(n.prediction) - 1}")
      for move in movers:
        move(k)
      figure.canvas.draw()
      figure.set_layout_engine("none")  # laid out once, so that nothing jumps
      images.append(Image.fromarray(_pixels(figure)))
  return images


def _pixels(figure):
  import numpy as np

  return np.array(figure.canvas.buffer_rgba())[..., :3]


def as_gif(images: list[Any]) -> bytes:
  """An endless GIF that rests on the last image."""
  content = io.BytesIO()
  pace = [600] + [160] * (len(images) - 2) + [2500] if len(images) > 1 else [2500]
  images[0].save(content, "GIF", save_all=True, append_images=images[1:], duration=pace, loop=0, disposal=1)
  return content.getvalue()


def _png(image: Any) -> bytes:
  content = io.BytesIO()
  image.save(content, "PNG", optimize=True)
  return content.getvalue()


def indexed(images: list[Any]) -> list[Any]:
  """The images in 256 colours that they share, so that nothing flickers."""
  from PIL import Image

  sample = images[:: max(1, len(images) // 8)]
  width, height = sample[0].size
  sheet = Image.new("RGB", (width, height * len(sample)))
  for i, image in enumerate(sample):
    sheet.paste(image, (0, i * height))
  palette = sheet.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
  return [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]


def as_page(kind: str, report, shown: list[int], images: list[bytes], stills: list[tuple[str, bytes]]) -> str:
  """The whole page as text; pictures are inside it."""
  source = lambda png: "data:image/png;base64," + base64.b64encode(png).decode("ascii")
  film = "\n".join(
      f'<img class="frame" alt="iteration {k}" src="{source(png)}">' for k, png in zip(shown, images))
  rest = "\n".join(
      f'<section><h2>{html.escape(title)}</h2><img alt="{html.escape(title)}" src="{source(png)}"></section>'
      for title, png in stills)
  return _PAGE.format(
      kind=html.escape(kind), title=html.escape(report.title), text=html.escape(report.text), film=film, rest=rest,
      iterations=list(shown), last=len(shown) - 1, end=shown[-1])


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Negotiation: {kind}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1e293b; background: #fff; margin: 0 auto; max-width: 1100px; padding: 24px; }}
h1 {{ font-size: 22px; margin: 0 0 4px; }} h2 {{ font-size: 16px; margin: 32px 0 8px; }}
img {{ max-width: 100%; height: auto; }} .frame {{ display: none; }} .frame.on {{ display: block; }}
.controls {{ display: flex; gap: 12px; align-items: center; margin: 8px 0 12px; }}
.controls input {{ flex: 1; accent-color: #ea580c; }} .controls output {{ min-width: 8em; font-variant-numeric: tabular-nums; }}
button {{ font: inherit; padding: 4px 14px; border: 1px solid #94a3b8; border-radius: 6px; background: #f8fafc; cursor: pointer; }}
pre {{ background: #f8fafc; padding: 12px 16px; border-radius: 6px; overflow-x: auto; line-height: 1.15; }}
</style>
</head>
<body>
<h1>How the agents negotiated ({kind})</h1>
<p>{title}</p>
<div class="controls">
<button id="play" type="button">Play</button>
<input id="slider" type="range" min="0" max="{last}" value="{last}" aria-label="iteration">
<output id="where">iteration {end}</output>
</div>
<div id="film">
{film}
</div>
{rest}
<section><h2>The final prediction</h2><pre>{text}</pre></section>
<script>
const iterations = {iterations};
const images = document.querySelectorAll(".frame"), slider = document.getElementById("slider");
const where = document.getElementById("where"), play = document.getElementById("play");
let timer = null;
function show(i) {{
  images.forEach((image, j) => image.classList.toggle("on", i === j));
  where.textContent = "iteration " + iterations[i];
  slider.value = i;
}}
function stop() {{ clearInterval(timer); timer = null; play.textContent = "Play"; }}
slider.addEventListener("input", () => {{ stop(); show(Number(slider.value)); }});
play.addEventListener("click", () => {{
  if (timer) {{ stop(); return; }}
  let i = Number(slider.value) === {last} ? 0 : Number(slider.value);
  play.textContent = "Pause";
  show(i);
  timer = setInterval(() => {{ if (i === {last}) {{ stop(); return; }} show(++i); }}, 180);
}});
show({last});
</script>
</body>
</html>
"""
