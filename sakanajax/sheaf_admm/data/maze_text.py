"""Mazes as text: parse, validate, solve, render. The vocabulary of every maze array lives here.

Symbols: `#` wall, space or `.` empty, `S` start, `G` goal, `*` path (read as empty); the digits 1..5 stand for the
vocabulary itself. Legend: h rows, w columns.
"""

from collections import deque

import numpy as np

from sakanajax.core.errors import UserError

PAD, WALL, EMPTY, START, GOAL, PATH = range(6)
VOCAB = 6
_SYMBOLS = dict(zip("# .SG*12345", (WALL, EMPTY, EMPTY, START, GOAL, EMPTY, WALL, EMPTY, START, GOAL, EMPTY)))
_RENDER = "?# SG*"


def parse_maze(text: str) -> np.ndarray:
  """Text of one maze, a line per row -> validated grid `[h, w]` uint8. UserErrors name row and column (from 1)."""
  lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
  while lines and not lines[-1].strip():
    lines.pop()
  while lines and not lines[0].strip():
    lines.pop(0)
  if not lines:
    raise UserError("maze: the text is empty; give one line per row with '#', ' ' or '.', one 'S' and one 'G'")
  width = len(lines[0])
  grid = np.zeros((len(lines), width), np.uint8)
  for r, line in enumerate(lines, 1):
    if len(line) != width:
      raise UserError(
          f"maze: row {r} has {len(line)} characters but row 1 has {width}; make all rows equally long, ending in '#'"
      )
    for c, symbol in enumerate(line, 1):
      if symbol not in _SYMBOLS:
        raise UserError(
            f"maze: row {r}, column {c} holds {symbol!r}; use '#', ' ' or '.', 'S', 'G' (or the digits 1..5)"
        )
      grid[r - 1, c - 1] = _SYMBOLS[symbol]
  return validate(grid)


def validate(grid: np.ndarray) -> np.ndarray:
  """Returns `grid` `[h, w]` as uint8 if it is a usable maze, else raises UserError (one line: what, where, remedy).

  Needs odd height and width of at least 3, cells in 1..4, a wall border, one start, one goal, the goal reachable.
  """
  grid = np.asarray(grid)
  if grid.ndim != 2 or grid.dtype.kind not in "iu":
    raise UserError(f"maze: expected a 2-d integer grid, got shape {grid.shape} and dtype {grid.dtype}")
  h, w = grid.shape
  for name, size in (("height", h), ("width", w)):
    if size % 2 == 0 or size < 3:
      raise UserError(
          f"maze: {name} {size} of a {h}x{w} maze is not an odd number of at least 3; add or remove a row or column of "
          "walls"
      )
  bad = np.argwhere((grid < WALL) | (grid > GOAL))
  if len(bad):
    r, c = bad[0]
    raise UserError(
        f"maze: row {r + 1}, column {c + 1} holds {grid[r, c]}; cells are 1 wall, 2 empty, 3 start, 4 goal"
    )
  border = np.ones((h, w), bool)
  border[1:-1, 1:-1] = False
  bad = np.argwhere(border & (grid != WALL))
  if len(bad):
    r, c = bad[0]
    raise UserError(f"maze: row {r + 1}, column {c + 1} on the border is open; the border must be walls ('#')")
  for name, symbol, value in (("start", "S", START), ("goal", "G", GOAL)):
    found = np.argwhere(grid == value)
    if len(found) != 1:
      where = f", the second at row {found[1][0] + 1}, column {found[1][1] + 1}" if len(found) else ""
      raise UserError(f"maze: found {len(found)} {name} cells{where}; mark exactly one with '{symbol}'")
  grid = grid.astype(np.uint8)
  _distances(grid)
  return grid


def _distances(grid: np.ndarray) -> np.ndarray:
  """Breadth-first distance of every cell to the goal, -1 where unreached; UserError when the start is unreached."""
  distance = np.full(grid.shape, -1, np.int32)
  start, goal = (tuple(int(v) for v in np.argwhere(grid == value)[0]) for value in (START, GOAL))
  distance[goal] = 0
  queue = deque([goal])
  while queue:
    r, c = queue.popleft()
    for cell in ((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)):
      if distance[cell] < 0 and grid[cell] != WALL:
        distance[cell] = distance[r, c] + 1
        queue.append(cell)
  if distance[start] < 0:
    raise UserError(
        f"maze: the goal at row {goal[0] + 1}, column {goal[1] + 1} cannot be reached from the start at "
        f"row {start[0] + 1}, column {start[1] + 1}; open a wall between them"
    )
  return distance


def path_length(grid: np.ndarray) -> int:
  """Edges on a shortest path from start to goal of a valid grid `[h, w]`."""
  return int(_distances(grid)[grid == START][0])


def solve(grid: np.ndarray) -> np.ndarray:
  """Label grid `[h, w]`: the cells of one shortest path become PATH, start and goal keep their own values.

  In a perfect maze the path is unique; elsewhere ties go up, down, left, right in that order.
  """
  distance, label = _distances(grid), grid.copy()
  r, c = (int(v) for v in np.argwhere(grid == START)[0])
  while distance[r, c] > 1:
    near = ((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1))
    r, c = next(cell for cell in near if distance[cell] == distance[r, c] - 1)
    label[r, c] = PATH
  return label


def render(grid: np.ndarray) -> str:
  """Grid or label grid `[h, w]` -> text, one line per row."""
  return "\n".join("".join(_RENDER[v] for v in row) for row in np.asarray(grid).tolist())
