"""Pictures of layouts, tensors, transfers and modules: SVG for notebooks and files, text for the terminal.

- `drawing`: `picture_of`, the picture of anything that has a layout; `picture`: `Picture`
- `layout_picture`, `transfer_picture`, `module_picture`: one file for each subject; `subjects`: their protocols
- `layout_drawing`: boxes as SVG, by `panels` (slices and copies) and `scale` (pixels); `layout_text`: boxes as text
- `shares`: how much each place holds; `svg`: `Canvas`; `colours`: of ranks; `words`: numbers as text
"""

from shardwise.layout.pictures.drawing import picture_of
from shardwise.layout.pictures.layout_picture import layout_picture
from shardwise.layout.pictures.picture import Picture
from shardwise.layout.pictures.transfer_picture import traffic_picture, transfer_picture

__all__ = ["Picture", "layout_picture", "picture_of", "traffic_picture", "transfer_picture"]
