"""Predicting the memory and the time of a training step, without the devices.

- what a device can do: `device` (one of them), `device_table` (usual ones, from data sheets), `devices` (many, by name
  or from a file)
- measuring it: `timing` (seconds of a call), `measuring` (what a rank measures), `fitting` (a line through the points),
  `measured_devices` (what the measurements of all ranks say of their devices)
"""
