"""Predicting the memory and the time of a training step, without the devices.

- what a device can do: `device` (one of them), `device_table` (usual ones, from data sheets), `devices` (many, by name
  or from a file)
- measuring it: `own_device` (what this rank has), `timing` (seconds of a call), `measuring` and `measuring_links` (what
  a rank measures), `fitting` (a line through the points), `measured_devices` (what all ranks together found)
"""
