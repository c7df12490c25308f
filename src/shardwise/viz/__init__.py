"""Pictures of layouts, tensors, transfers and modules: SVG for notebooks and files, text for the terminal."""

from shardwise.viz.drawing import draw
from shardwise.viz.layout_picture import layout_picture
from shardwise.viz.picture import Picture
from shardwise.viz.transfer_picture import traffic_picture, transfer_picture

__all__ = ["Picture", "draw", "layout_picture", "traffic_picture", "transfer_picture"]
